"""`iosim sweep`: products of lists as a table, as data and as a plot."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from iosim.cli import main

Capture = pytest.CaptureFixture[str]
SWEEP = ("sweep", "--profile", "tpu-v5e", "--kernel", "flash2", "--heads", "2")
LISTS = ("--tile", "128x128,256x256,4096x4096", "--seqlen", "1k,2k")


def said(capsys: Capture, *arguments: str) -> str:
    """What a run that must not fail says on stdout."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def results(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    document = json.loads(said(capsys, *arguments, "--json"))
    assert document["format"] == 1
    found: list[dict[str, Any]] = document["results"]
    return found


def test_every_combination_once(capsys: Capture) -> None:
    found = results(capsys, *SWEEP, *LISTS)
    points = [(entry["problem"]["seqlen"], entry["tile"]["m"]) for entry in found]
    assert points == [(n, m) for n in (1024, 2048) for m in (128, 256, 4096)]
    assert [entry["fits"] for entry in found] == [True, True, False] * 2


def test_lists_of_chips_kernels_and_types(capsys: Capture) -> None:
    flags = "--profile tpu-v5e,tpu-v4 --kernel standard,flash2 --dtype bf16,fp32 --seqlen 512"
    found = results(capsys, *f"sweep --heads 1 {flags}".split())
    assert len({(e["profile"], e["kernel"], e["dtype"]) for e in found}) == len(found) == 8


def test_the_table_says_what_does_not_fit(capsys: Capture) -> None:
    out = said(capsys, *SWEEP, *LISTS)
    rows = [line for line in out.splitlines() if "4096x4096" in line and "does not fit" in line]
    assert len(rows) == 3  # two runs, and one line that says why
    assert "scoped limit" in out
    assert "seqlen" in out
    assert not [line for line in out.splitlines() if "…" in line]


def test_a_sweep_equals_single_runs(capsys: Capture) -> None:
    [entry] = [e for e in results(capsys, *SWEEP, *LISTS) if e["problem"]["seqlen"] == 2048][1:2]
    single = ("--tile", "256x256", "--seqlen", "2k")
    [alone] = results(capsys, "analyze", *SWEEP[1:], *single)
    assert alone == entry


def test_two_sweeps_are_equal_to_the_byte(capsys: Capture, tmp_path: Path) -> None:
    for suffix in (".json", ".csv", ".md", ".png", ".svg"):
        path = tmp_path / f"a{suffix}"
        written = []
        for _ in range(2):
            said(capsys, *SWEEP, *LISTS, "-o", str(path))
            written.append(path.read_bytes())
        assert written[0] == written[1]
    assert len(list(tmp_path.iterdir())) == 5


def test_csv_is_one_row_a_run(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    said(capsys, *SWEEP, *LISTS, "-o", str(path))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 6
    assert rows[0]["problem.seqlen"] == "1024"
    assert rows[2]["fits"] == "False"
    assert rows[2]["traffic.dram_read_bytes"] == ""


def test_plot_beside_json(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    found = results(capsys, *SWEEP, *LISTS, "--plot", str(path))
    assert len(found) == 6
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_lists_usual_tiles_are_taken(capsys: Capture, tmp_path: Path) -> None:
    found = results(capsys, *SWEEP, "--seqlen", "1k")
    assert len({tuple(entry["tile"].values()) for entry in found}) > 3
    found = results(capsys, *SWEEP, "--seqlen", "1k,2k")
    assert len(found) == 2
    plot = str(tmp_path / "a.svg")
    assert len(results(capsys, *SWEEP, "--seqlen", "1k,2k", "--plot", plot)) > 6
