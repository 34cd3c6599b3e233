"""`iosim validate COUNTERS`."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from iosim.cli import main

Capture = pytest.CaptureFixture[str]
FLASH = {
    "chip": "v5e", "batch": 1, "heads": 2, "seqlen": 1024, "seqlen_k": 1024, "head_dim": 128,
    "causal": False, "block_q": 512, "block_k_major": 512, "block_k": 512,
    "vmem_bytes": 2000000, "read_bytes": 1, "write_bytes": 524288,
}  # fmt: skip
XLA = {"chip": "v4", "seqlen": 1024, "head_dim": 128, "heads": 1, "hbm_read_bytes": 786432}
GPU = {
    "id": "odd/1", "family": "nothing-like-it", "kernel": "k", "params": {}, "dram_read_bytes": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counters") / "rows.jsonl"
    rows = ({"how": "by hand"}, FLASH, {**FLASH, "seqlen": 2048, "write_bytes": 1 << 20}, XLA, GPU)
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def said(capsys: Capture, *arguments: str) -> str:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_json_has_a_row_per_row(counters: Path, capsys: Capture) -> None:
    text = said(capsys, "validate", str(counters), "--profile", "h200", "--json")
    document = json.loads(text)
    assert document["format"] == 1
    rows: list[dict[str, Any]] = document["rows"]
    assert [row["id"] for row in rows] == [1, 2, 3, "odd/1"]
    wanted = {"id", "family", "kernel", "measured", "predicted", "skipped"}
    assert all(set(row) >= wanted for row in rows)
    assert set(rows[0]["predicted"]) == {"read_bytes", "write_bytes", "vmem_bytes", "fits"}
    assert rows[0]["measured"]["write_bytes"] == 524288
    assert rows[3]["predicted"] is None
    assert "nothing-like-it" in rows[3]["skipped"]


def test_the_table(counters: Path, capsys: Capture) -> None:
    out = said(capsys, "validate", str(counters), "--profile", "h200")
    assert "2 of 4 rows predicted" in " ".join(out.split())
    assert "tpu-flash/v5e" in out
    assert "read_bytes" in out
    assert "rows without a prediction" in out
    assert "no kernel for the family nothing-like-it yet" in out
    assert "error: distance to the range of the repeats" in out


def test_families_restrict_the_work(counters: Path, capsys: Capture) -> None:
    flags = ("--profile", "h200", "--family", "tpu-flash/v5e", "--json")
    rows = json.loads(said(capsys, "validate", str(counters), *flags))["rows"]
    assert [row["skipped"] is None for row in rows] == [True, True, False, False]


@pytest.mark.parametrize("suffix", [".json", ".csv", ".md"])
def test_files(suffix: str, counters: Path, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / f"v{suffix}"
    flags = ("--profile", "h200", "-o", str(path), "--json")
    out = said(capsys, "validate", str(counters), *flags)
    text = path.read_text()
    if suffix == ".json":
        assert text == out
    elif suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
        assert rows[0]["measured.write_bytes"] == "524288"
    else:
        assert "| tpu-flash/v5e | read_bytes |" in text
