"""Predicted against measured: the real tables where they are at hand, and the error rule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from iosim.chip import Chip
from iosim.counters.table import CounterRow, read_table
from iosim.kernels import load_kernel
from iosim.launch import blocks_per_core
from iosim.profiles import load_profile
from iosim.simulation import complete
from iosim.validation.compare import Comparison, document, family_errors, validate
from iosim.validation.requests import chip_of, request_of

COUNTERS = Path(__file__).parents[2] / "reports" / "accuracy"

HAND_COUNTED = ("fa2", "gemm", "copy")  # their fills and writes are arithmetic
QUICK_BYTES = 3e9  # rows that fill less are run here; all rows by `iosim validate`


@pytest.fixture
def chip() -> Chip:
    return load_profile("h200")


def comparison(measured: float, predicted: float | None, span: object = None) -> Comparison:
    fields = {"id": "x", "family": "f", "dram_read_bytes": measured}
    if span:
        fields["range"] = {"dram_read_bytes": span}
    row = CounterRow(kind="gpu", id="x", fields=fields)
    values = None if predicted is None else {"dram_read_bytes": predicted}
    return Comparison(row=row, predicted=values, skipped=None if values else "no kernel")


@pytest.mark.parametrize(
    ("measured", "predicted", "span", "error"),
    [
        (100e6, 110e6, None, 0.1),
        (100e6, 90e6, None, 0.1),
        (0, 1 << 19, None, 0.5),  # over 1 MiB at least
        (100e6, None, None, 1.0),  # no prediction counts as 100 %
        (100e6, 104e6, [99e6, 105e6], 0.0),  # inside the range of the repeats
        (100e6, 110e6, [99e6, 105e6], 0.05),
        (100e6, 90e6, [95e6, 105e6], 0.05),
    ],
)
def test_error_rule(measured: float, predicted: float | None, span: object, error: float) -> None:
    assert comparison(measured, predicted, span).error("dram_read_bytes") == pytest.approx(error)


def test_what_was_not_measured_has_no_error() -> None:
    assert comparison(1e6, 1e6).error("sm_cycles") is None


def test_family_errors_name_the_worst_row() -> None:
    rows = [comparison(100e6, 101e6), comparison(100e6, 120e6), comparison(100e6, None)]
    (summary,) = family_errors(rows)
    assert (summary.rows, summary.worst) == (2, pytest.approx(0.2))
    assert summary.mean == pytest.approx(0.105)


def test_rows_come_back_in_order_with_reasons(tmp_path: Path, chip: Chip) -> None:
    base = {"id": "a", "kernel": "k_copy"}
    rows = [
        {**base, "family": "copy", "params": {"mb": 1}, "dram_read_bytes": 1 << 20},
        {**base, "family": "sdpa-flash", "params": {}, "dram_read_bytes": 1},
        {**base, "family": "fa2", "params": {"B": 1}, "dram_read_bytes": 1},
        {**base, "family": "copy", "params": {"n": 4096}, "dram_read_bytes": 8192},
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    told: list[tuple[int, int]] = []
    results = validate(path, chip, progress=lambda *at: told.append(at))
    entries = document(results)["rows"]
    assert [entry["id"] for entry in entries] == ["a"] * 4
    assert entries[0]["predicted"]["dram_read_bytes"] == 1 << 20
    assert entries[3]["predicted"]["dram_read_bytes"] == 8192
    assert "no kernel for the family sdpa-flash" in entries[1]["skipped"]
    assert "lacks the parameter H" in entries[2]["skipped"]
    assert entries[1]["predicted"] is None
    assert told[-1] == (4, 4)


def test_a_gpu_table_needs_a_chip(tmp_path: Path) -> None:
    row = {"id": "a", "kernel": "k", "family": "copy", "params": {"mb": 1}}
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert "--profile" in str(validate(path)[0].skipped)


def test_compiled_flash_attention_is_exact() -> None:
    """Every DMA byte of the real TPU compiler, every refusal, VMEM within 25 %."""
    results = validate(COUNTERS / "tpu-flash.jsonl")
    assert len(results) == 36
    for result in results:
        assert result.predicted is not None
        assert result.error("fits") == 0
        assert (result.error("read_bytes") or 0) == 0
        assert (result.error("write_bytes") or 0) == 0
    vmem = [e for r in results if (e := r.error("vmem_bytes")) is not None]
    assert len(vmem) == 34
    assert max(vmem) < 0.25


def test_occupancy_is_the_driver_s(chip: Chip) -> None:
    """Blocks per core from our formulas equal the least of what the profiler reports."""
    assert chip.limits is not None
    checked = 0
    for row in read_table(COUNTERS / "h200.jsonl").rows:
        request = request_of(row, chip)
        if isinstance(request, str) or row.family not in HAND_COUNTED:
            continue
        kernel = load_kernel(request.kernel)
        schedule = complete(kernel, request.problem, chip, request.schedule)
        launch = kernel.launches(request.problem, schedule, chip)[0]
        facts = [row.fields[name] for name in ("occ_smem", "occ_regs", "occ_warps")]
        assert blocks_per_core(launch.footprint, chip.limits) == min(facts), row.id
        assert launch.blocks == row.fields["grid"]
        checked += 1
    assert checked == 54


def test_bytes_of_known_kernels(chip: Chip, tmp_path: Path) -> None:
    """Fills and writes within 0.5 % on each row, HBM reads within 10 % in the mean."""
    lines = (COUNTERS / "h200.jsonl").read_text(encoding="utf-8").splitlines()
    kept = []
    for line in lines[1:]:
        row = json.loads(line)
        if row["family"] in HAND_COUNTED and row["l1_fill_bytes"] < QUICK_BYTES:
            kept.append(line)
    path = tmp_path / "quick.jsonl"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    results = validate(path, chip)
    assert len(results) == 24
    errors: dict[str, list[float]] = {}
    for result in results:
        assert (result.error("l1_fill_bytes") or 0) <= 0.005, result.row.id
        assert (result.error("l1_write_bytes") or 0) <= 0.005, result.row.id
        error = result.error("dram_read_bytes")
        assert error is not None
        errors.setdefault(result.row.family, []).append(error)
    for family, values in errors.items():
        assert np.mean(values) <= 0.10, family


def test_rows_of_the_tpu_name_their_own_chip() -> None:
    for row in read_table(COUNTERS / "tpu-flash.jsonl").rows:
        own = chip_of(row, None)
        assert own is not None
        assert own.name == f"tpu-{row.fields['chip']}"
