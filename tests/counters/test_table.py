"""Counter tables: what a file must hold, and one clear line for every one that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from iosim.counters.table import read_table
from iosim.errors import CountersError

GPU = {
    "id": "copy/4MB",
    "family": "copy",
    "kernel": "k_copy",
    "params": {"mb": 4},
    "dram_read_bytes": 4197376,
    "range": {"dram_read_bytes": [4197000, 4198000]},
}
FLASH = {
    "chip": "v5e",
    "batch": 1,
    "heads": 4,
    "seqlen": 2048,
    "head_dim": 128,
    "block_q": 128,
    "block_k_major": 128,
    "read_bytes": 69206016,
}


def written(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_header_and_rows(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "c.jsonl", {"device": "a GPU"}, GPU, FLASH))
    assert table.header == {"device": "a GPU"}
    assert [row.kind for row in table.rows] == ["gpu", "tpu-flash"]
    assert [row.id for row in table.rows] == ["copy/4MB", 2]
    assert [row.family for row in table.rows] == ["copy", "tpu-flash/v5e"]
    assert table.rows[0].range_of("dram_read_bytes") == (4197000, 4198000)
    assert table.rows[0].range_of("sm_cycles") is None
    assert table.rows[0].measured == {"dram_read_bytes": 4197376}
    assert table.rows[1].measured == {"read_bytes": 69206016, "fits": True}


def test_a_table_needs_no_header(tmp_path: Path) -> None:
    assert len(read_table(written(tmp_path / "c.jsonl", GPU)).rows) == 1


def test_a_refused_block_is_measured_not_to_fit(tmp_path: Path) -> None:
    row = {**FLASH, "error": "vmem: scoped allocation over the limit"}
    del row["read_bytes"]
    assert read_table(written(tmp_path / "c.jsonl", row)).rows[0].measured == {"fits": False}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no counter row"]),
        ('{"device": "a GPU"}\n', ["no counter row"]),
        ('{"device": "a GPU"}\n{"id": "x"\n', ["line 2", "not a line of JSON"]),
        ("[1, 2]\n", ["line 1", "must be a JSON object"]),
        ('{"a": 1}\n{"b": 2}\n', ["line 2", "missing"]),
        (json.dumps({**GPU, "params": 4}) + "\n", ["line 1", "params"]),
        (json.dumps({**GPU, "dram_read_bytes": "4 MB"}) + "\n", ["dram_read_bytes", "'4 MB'"]),
        (json.dumps({**GPU, "dram_read_bytes": -1}) + "\n", ["dram_read_bytes", "-1"]),
        (json.dumps({**GPU, "dram_read_bytes": True}) + "\n", ["dram_read_bytes", "True"]),
        (json.dumps({**GPU, "sm_cycles": float("inf")}) + "\n", ["sm_cycles"]),
        ('{"id": "a", "family": "copy", "params": {}}\n{"id": "b"}\n', ["line 2", "missing"]),
    ],
)
def test_a_damaged_table_gives_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CountersError) as caught:
        read_table(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "damaged.jsonl" in message
    assert all(word in message for word in words)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(CountersError, match="cannot read"):
        read_table(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(CountersError, match="UTF-8"):
        read_table(tmp_path / "b.jsonl")
