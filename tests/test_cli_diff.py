"""`iosim diff A.json B.json`."""

import json
from pathlib import Path
from typing import Any

import pytest

from iosim.cli import main

Capture = pytest.CaptureFixture[str]


def entry(kernel: str, tile: int, read: int | None, **more: Any) -> dict[str, Any]:
    """A result document's entry, made by hand."""
    operands = {"K": {"dram_read_bytes": read, "unique_bytes": 64}} if read is not None else {}
    return {
        "kernel": kernel,
        "profile": "h200",
        "problem": {"seqlen": 64},
        "tile": {"m": tile, "n": tile},
        "order": "query",
        "dtype": "fp16",
        "schedule": {"stages": 2},
        "fits": read is not None,
        "why_not": None if read is not None else "too large",
        "footprint_bytes": tile * 64,
        "traffic": None if read is None else {"dram_read_bytes": read, "dram_write_bytes": 64},
        "operands": operands,
        "compulsory": {"read_bytes": 64, "write_bytes": 64},
        "flops": 1000,
        "exps": 10,
        "floor_s": None if read is None else read * 1e-9,
        "limiter": None if read is None else "hbm",
        **more,
    }


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(name: str, *entries: dict[str, Any]) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"format": 1, "results": entries}))
        return str(path)

    return make


def said(capsys: Capture, *arguments: str) -> str:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_levels_and_operands(capsys: Capture, write: Any) -> None:
    a, b = write("a", entry("flash2", 64, 1000)), write("b", entry("flash2", 32, 3000))
    document = json.loads(said(capsys, "diff", a, b, "--json"))
    assert document["format"] == 1
    [diff] = document["diff"]
    assert diff["changed"] == {"tile": ["64x64", "32x32"]}
    assert diff["traffic"]["dram_read_bytes"] == [1000, 3000]
    assert diff["operands"]["K"]["dram_read_bytes"] == [1000, 3000]
    out = said(capsys, "diff", a, b)
    assert "3.00 ×" in out
    assert "same" in out
    assert "K HBM read" in out


def test_kernels_are_paired_by_name(capsys: Capture, write: Any) -> None:
    a = write("a", entry("flash1", 64, 10), entry("flash2", 64, 20))
    b = write("b", entry("flash2", 64, 30), entry("standard", 64, 40))
    [diff] = json.loads(said(capsys, "diff", a, b, "--json"))["diff"]
    assert diff["kernel"] == ["flash2", "flash2"]
    assert diff["traffic"]["dram_read_bytes"] == [20, 30]


def test_sweeps_are_paired_by_everything_asked(capsys: Capture, write: Any) -> None:
    a = write("a", entry("flash2", 64, 10), entry("flash2", 32, 20))
    b = write("b", entry("flash2", 32, 21), entry("flash2", 16, 40))
    [diff] = json.loads(said(capsys, "diff", a, b, "--json"))["diff"]
    assert diff["traffic"]["dram_read_bytes"] == [20, 21]
    assert diff["changed"] == {}


def test_single_runs_are_paired_whatever_they_are(capsys: Capture, write: Any) -> None:
    a, b = write("a", entry("flash1", 64, 10)), write("b", entry("flash2", 64, 20))
    assert "A: flash1 on h200, B: flash2 on h200" in said(capsys, "diff", a, b)


def test_one_side_that_does_not_fit(capsys: Capture, write: Any) -> None:
    a, b = write("a", entry("flash2", 64, 10)), write("b", entry("flash2", 512, None))
    out = said(capsys, "diff", a, b)
    assert "B: too large" in out


def test_markdown(capsys: Capture, write: Any, tmp_path: Path) -> None:
    a, b = write("a", entry("flash2", 64, 10)), write("b", entry("flash2", 32, 20))
    code = main(["diff", a, b, "-o", str(tmp_path / "d.md")])
    capsys.readouterr()
    assert code == 0
    assert "| HBM read | 10 B | 20 B | 2.00 × |" in (tmp_path / "d.md").read_text()
