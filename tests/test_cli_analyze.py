"""`iosim analyze`: the tables, the JSON that scripts rely on, files, seeds, a second run."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from iosim.cli import main

Capture = pytest.CaptureFixture[str]
TPU = ("analyze", "--profile", "tpu-v5e", "--seqlen", "1k", "--heads", "2")
GPU = ("analyze", "--profile", "h200", "--seqlen", "512", "--heads", "8", "--kernel", "flash2")

KEYS = {
    "kernel", "profile", "problem", "tile", "order", "dtype", "fits", "why_not", "footprint_bytes",
    "traffic", "operands", "band", "compulsory", "flops", "exps", "sm_cycles", "clock_hz", "time_s",
    "limiter", "launches",
}  # fmt: skip
GPU_TRAFFIC = {
    "dram_read_bytes", "dram_write_bytes", "dirty_left_bytes", "l1_fill_bytes", "l1_write_bytes",
    "l2_from_l1_bytes", "l2_fabric_bytes",
}  # fmt: skip


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


def test_nothing_but_a_chip(capsys: Capture) -> None:
    out = said(capsys, "analyze", "--profile", "tpu-v5")
    assert "tpu-v5 = tpu-v5p, Google TPU v5p" in out
    assert "left out: flash1 has no form for a TPU" in out
    assert "standard" in out
    assert "16 heads, 4,096 queries × 4,096 keys, head_dim 128, bf16" in out


def test_json_has_the_keys_of_the_interface(capsys: Capture) -> None:
    [entry] = results(capsys, *GPU)
    assert set(entry) >= KEYS
    assert set(entry["traffic"]) == GPU_TRAFFIC
    assert entry["tile"] == {"m": 128, "n": 64}
    assert entry["dtype"] == "fp16"
    assert entry["sm_cycles"] is None
    assert entry["time_s"] is None
    assert set(entry["compulsory"]) == {"read_bytes", "write_bytes"}
    assert set(entry["operands"]) >= {"Q", "K", "V", "O"}
    assert set(entry["operands"]["K"]) >= {"dram_read_bytes", "l1_fill_bytes", "unique_bytes"}
    assert entry["limiter"] in entry["launches"][0]["floor_times_s"]


def test_json_is_alone_and_the_same_in_a_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    code = main([*TPU, "--json", "-o", str(path)])
    out, err = capsys.readouterr()
    assert code == 0
    assert out == path.read_text()
    assert f"wrote {path}" in err.splitlines()[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_two_runs_are_equal_to_the_byte(capsys: Capture, tmp_path: Path) -> None:
    written = []
    for name in ("a", "b"):
        said(capsys, *GPU, "--seeds", "2", "-o", str(tmp_path / f"{name}.json"))
        written.append((tmp_path / f"{name}.json").read_bytes())
    assert written[0] == written[1]
    assert said(capsys, *GPU) == said(capsys, *GPU)


def test_sizes_and_masks_reach_the_problem(capsys: Capture) -> None:
    flags = "--seqlen-k 2k --kv-heads 1 --head-dim 64 --causal --align top-left --window 128"
    entry = results(capsys, *TPU, "--kernel", "flash2", *flags.split())[0]
    wanted = {
        "batch": 1, "heads": 2, "kv_heads": 1, "seqlen": 1024, "seqlen_k": 2048, "head_dim": 64,
        "causal": True, "align": "top-left", "window": 128, "dtype": "bf16", "kv_dtype": "bf16",
    }  # fmt: skip
    assert entry["problem"] == wanted


def test_schedule_flags_reach_the_schedule(capsys: Capture) -> None:
    flags = "--tile 64x32 --order head --stages 3 --warps 4 --registers 96 --clock 1.5"
    [entry] = results(capsys, *GPU, *flags.split())
    assert entry["tile"] == {"m": 64, "n": 32}
    assert entry["order"] == "head"
    assert entry["clock_hz"] == 1.5e9
    assert entry["launches"][0]["footprint"]["registers"] == 96
    asked = {"group": 8, "stages": 3, "warps": 4, "registers": 96}
    left = {"spills": None, "splits": 0, "cluster": 0, "variant": ""}
    assert entry["schedule"] == {**asked, **left}


def test_other_problems(capsys: Capture) -> None:
    on = ("analyze", "--profile", "tpu-v5e", "--kernel")
    [gemm] = results(capsys, *on, "gemm", "--m", "1k", "--n", "512", "--k", "2k")
    assert [gemm["problem"][name] for name in "mnk"] == [1024, 512, 2048]
    [copy] = results(capsys, *on, "copy", "--bytes", "4MiB")
    assert copy["problem"]["elements"] == 2 * 1024**2
    assert copy["exps"] == 0


def test_several_seeds_give_a_band(capsys: Capture) -> None:
    [entry] = results(capsys, *GPU, "--seeds", "3")
    low, high = entry["band"]["dram_read_bytes"]
    assert low <= entry["traffic"]["dram_read_bytes"] <= high
    assert "seeds 0 to 2" in said(capsys, *GPU, "--seeds", "3")


def test_what_does_not_fit_is_an_answer(capsys: Capture) -> None:
    [entry] = results(capsys, *GPU, "--tile", "512x512")
    assert entry["fits"] is False
    assert entry["traffic"] is None
    assert entry["why_not"]
    out = " ".join(said(capsys, *GPU, "--tile", "512x512").split())
    assert entry["why_not"] in out
    assert "--tile 128x128 fits" in out
    assert results(capsys, *GPU, "--tile", "128x128")[0]["fits"] is True


def test_a_second_run_is_shown_as_a_difference(capsys: Capture) -> None:
    second = ("--against", "--tile 128x128")
    out = said(capsys, *TPU, "--kernel", "flash2", "--tile", "256x256", *second)
    assert "B against A" in out
    text = said(capsys, *TPU, "--kernel", "flash2", "--tile", "256x256", *second, "--json")
    document = json.loads(text)
    [difference] = document["diff"]
    assert difference["changed"] == {"tile": ["256x256", "128x128"]}
    pair = difference["traffic"]["dram_read_bytes"]
    assert pair[0] == document["results"][0]["traffic"]["dram_read_bytes"]
    assert pair[1] == document["against"][0]["traffic"]["dram_read_bytes"]
    assert pair[0] < pair[1]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_tables_keep_within_the_width(
    width: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (TPU, (*GPU, "--seeds", "2", "--against", "--tile 64x64")):
        lines = said(capsys, *arguments).splitlines()
        assert max(len(line) for line in lines) <= width
        assert not [line for line in lines if "…" in line or line != line.rstrip()]


def test_tables_hold_levels_operands_and_closed_forms(capsys: Capture) -> None:
    out = said(capsys, *GPU)
    words = (
        "shared memory of a block", "per SM, limited by", "HBM read", "HBM write", "L1 fill",
        "L2 fabric", "× compulsory", "flops", "exps", "flop per HBM byte", "ridge", "limited by",
        "no run at this clock can be faster", "not yet", "flash2 by operand", "K in", "O out",
        "closed forms", "agree",
    )  # fmt: skip
    assert not [word for word in words if word not in out]


@pytest.mark.parametrize("suffix", [".csv", ".md"])
def test_other_files(suffix: str, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    said(capsys, *TPU, "-o", str(path))
    text = path.read_text()
    if suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
        assert [row["kernel"] for row in rows] == ["standard", "flash2"]
        assert int(rows[1]["K.dram_read_bytes"]) > 0
        assert rows[1]["tile"] == "512x512"
    else:
        assert "| --- | ---: | ---: |" in text
        assert "**flash2 by operand**" in text


def test_an_existing_file_is_replaced(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    said(capsys, *TPU, "-o", str(path))
    assert json.loads(path.read_text())["format"] == 1
