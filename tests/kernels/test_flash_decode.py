"""Flash-Decoding: right numbers from any splits, operations that are what it touches, counters."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference, rounding
from iosim.kernels.split_kv import default_splits, wave_efficiency
from iosim.launch import why_not
from iosim.problem import Attention, Schedule
from iosim.problem_variants import Decode
from iosim.profiles import load_profile, profile_names

KERNEL = load_kernel("flash-decode")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")


def planned(problem, schedule, chip=GPU):
    return KERNEL.launches(problem, schedule, chip)


def arrays_of(harness, problem, splits, peak=0.0):
    """Q and O with the rows of a KV head together; room for the parts of all splits."""
    arrays = harness.attention_arrays(problem, peak)
    count, rows = problem.batch * problem.kv_heads, problem.group * problem.seqlen
    return {
        "Q": arrays["Q"].reshape(count, rows, problem.head_dim),
        "K": arrays["K"],
        "V": arrays["V"],
        "O": np.full((count, rows, problem.head_dim), np.nan),
        "O_part": np.full((count * splits, rows, problem.head_dim), np.nan),
        "lse_part": np.full((count * splits, rows), np.nan),
    }


def expected(arrays, problem):
    heads = problem.batch * problem.heads
    q = arrays["Q"].reshape(heads, problem.seqlen, problem.head_dim)
    o, lse = reference.attention(q, arrays["K"], arrays["V"], problem)
    return o.reshape(arrays["O"].shape), lse


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    splits=st.integers(1, 7),
    stages=st.integers(1, 3),
    peak=st.sampled_from([0.0, 1e4]),
    cuts=st.lists(st.integers(1, 30), max_size=3),
)
def test_computes_attention_from_any_splits(harness, data, tile, splits, stages, peak, cuts):
    problem = data.draw(harness.attention_problems(longest=6))
    schedule = Schedule(tile=tile, stages=stages, splits=splits)
    arrays = arrays_of(harness, problem, splits, peak)
    for launch in planned(problem, schedule):
        computed = harness.compute(harness.exact(launch), arrays)
        harness.assert_ranges(launch, computed, cuts)
        harness.assert_work(launch, computed)
    o, _ = expected(arrays, problem)
    np.testing.assert_allclose(arrays["O"], o, rtol=1e-10, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    tile=st.sampled_from([(16, 128), (32, 256), (16, 512)]),
    cuts=st.lists(st.integers(1, 5), max_size=2),
)
def test_computes_attention_in_grid_steps(harness, data, tile, cuts):
    problem = data.draw(harness.attention_problems(longest=9, longest_k=600))
    (launch,) = planned(problem, Schedule(tile=tile), TPU)
    arrays = arrays_of(harness, problem, 1)
    computed = harness.compute(harness.exact(launch), arrays)
    harness.assert_ranges(launch, computed, cuts)
    harness.assert_work(launch, computed)
    np.testing.assert_allclose(arrays["O"], expected(arrays, problem)[0], rtol=1e-10, atol=1e-10)
    moved = run_grid(launch, TPU).traffic
    for form in KERNEL.closed_forms(problem, Schedule(tile=tile), TPU)[1:]:
        assert getattr(moved, form.quantity) == form.value, form.quantity


SIZE = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 3, "seqlen_k": 29, "head_dim": 4}
TRACED = {
    "plain": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top-left"},
    "rows without keys": {"causal": True, "seqlen_k": 2},
    "window": {"causal": True, "window": 5},
    "one row": {"seqlen": 1, "kv_heads": 4},
}


@pytest.mark.parametrize("case", TRACED)
@pytest.mark.parametrize("tile", [(4, 3), (16, 8)], ids=str)
def test_reports_what_it_touches_on_a_gpu(trace, harness, case, tile):
    problem = Attention(**{**SIZE, **TRACED[case]})
    arrays = arrays_of(harness, problem, 3)
    arrays = trace("flash-decode", problem, Schedule(tile=tile, splits=3), "h200", arrays)
    np.testing.assert_allclose(arrays["O"], expected(arrays, problem)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["plain", "causal"])
def test_reports_what_it_touches_in_a_grid(trace, harness, case):
    problem = Attention(**{**SIZE, **TRACED[case], "seqlen_k": 300}, dtype="bf16")
    arrays = arrays_of(harness, problem, 1)
    arrays = trace("flash-decode", problem, Schedule(tile=(16, 128)), "tpu-v5e", arrays)
    np.testing.assert_allclose(arrays["O"], expected(arrays, problem)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_keys_and_values_with_scales(trace, harness, dtype):
    problem = Attention(**SIZE, kv_dtype=dtype)
    arrays = arrays_of(harness, problem, 2)
    for name in "KV":
        arrays[name], scales = rounding.quantized(arrays[name], dtype)
        arrays[f"{name}_scale"] = scales[:, None, :]
    schedule = Schedule(tile=(8, 8), splits=2)
    done = trace("flash-decode", problem, schedule, "h200", arrays)
    wide = {**done, **{n: done[n] * done[f"{n}_scale"][:, 0, :, None] for n in "KV"}}
    np.testing.assert_allclose(done["O"], expected(wide, problem)[0], rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["fp16", "bf16"]), splits=st.integers(1, 4))
def test_rounds_as_the_hardware_does(harness, data, dtype, splits):
    """Probabilities are rounded before the second product, O once at the end: each adds at most a
    unit roundoff u of Σ P |V|, which is no more than the greatest |V|."""
    problem = data.draw(harness.attention_problems(longest=4))
    problem = Attention(**{**vars(problem), "dtype": dtype, "kv_dtype": dtype})
    arrays = arrays_of(harness, problem, splits)
    for name in "QKV":
        arrays[name] = rounding.rounded(arrays[name], dtype)
    for launch in planned(problem, Schedule(tile=(8, 8), splits=splits)):
        harness.compute(launch, arrays)
    o, _ = expected(arrays, problem)
    bound = 2.01 * rounding.unit_roundoff(dtype) * np.abs(arrays["V"]).max()
    assert np.abs(arrays["O"] - o).max() <= bound
    np.testing.assert_array_equal(rounding.rounded(arrays["O"], dtype), arrays["O"])


SHAPES = {
    "whole tiles": {},
    "ragged": {"seqlen_k": 1000},
    "several rows": {"seqlen": 5, "causal": True},
    "several tiles of rows": {"seqlen": 50, "causal": True},
    "no group": {"kv_heads": 8},
    "window": {"seqlen": 4, "causal": True, "window": 300},
    "scales": {"kv_dtype": "int8"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [1, 5])
def test_closed_forms_are_what_the_engine_counts(shape, splits):
    size = {"batch": 2, "heads": 8, "kv_heads": 2, "seqlen_k": 1024, "head_dim": 64}
    problem = Decode(**{**size, **SHAPES[shape]})
    schedule = Schedule(tile=(16, 64), stages=3, warps=4, splits=splits, spills=0)
    memory = CachedMemory(GPU)
    runs = [
        run_blocks(launch, GPU, memory, clock_hz=1.7e9, seed=0, soil=False).traffic
        for launch in planned(problem, schedule)
    ]
    for form in KERNEL.closed_forms(problem, schedule, GPU)[1:]:
        assert sum(getattr(run, form.quantity) for run in runs) == form.value, form.quantity


def test_spills_are_stored_at_every_step():
    problem = Decode(heads=16, kv_heads=1, seqlen_k=1024, head_dim=64)
    plain = Schedule(tile=(16, 64), stages=3, warps=4, splits=4, spills=0)
    spilling = Schedule(tile=(16, 64), stages=3, warps=4, splits=4, spills=10)
    one, other = (
        {f.quantity: f.value for f in KERNEL.closed_forms(problem, s, GPU)}
        for s in (plain, spilling)
    )
    assert other["l1_write_bytes"] - one["l1_write_bytes"] == 16 * 10 * 4 * 128
    first, _ = planned(problem, spilling)
    counts = run_blocks(first, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    assert counts.operands["local"].l1_write_bytes == 16 * 10 * 4 * 128


COUNTERS = Path(__file__).resolve().parents[2] / "reports" / "accuracy" / "h200.jsonl"
ROWS = [
    row
    for row in map(json.loads, COUNTERS.read_text().splitlines()[1:])
    if row.get("family") == "decode"
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_the_splits_move_what_was_measured(row):
    p = row["params"]
    problem = Decode(
        batch=p["B"],
        heads=p["HK"] * p["G"],
        kv_heads=p["HK"],
        seqlen_k=p["NK"],
        head_dim=p["D"],
    )
    schedule = Schedule(tile=(p["G"], p["BN"]), stages=3, warps=4, splits=p["splits"])
    first, _ = planned(problem, schedule)
    assert first.blocks == row["grid"]
    assert first.footprint.shared_bytes + 1024 == row["smem_per_block"]
    assert first.footprint.registers == pytest.approx(row["registers"], rel=0.12)
    counts = run_blocks(first, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=True)
    assert counts.traffic.l1_fill_bytes == pytest.approx(row["l1_fill_bytes"], rel=0.005)
    assert counts.traffic.l1_write_bytes == pytest.approx(row["l1_write_bytes"], rel=0.005)


def test_there_are_counters():
    assert len(ROWS) >= 3


def test_splits_fill_the_cores():
    """FlashAttention-3's example: 48 tiles on 108 cores."""
    assert wave_efficiency(48 * 2, 108) == pytest.approx(0.889, abs=5e-4)
    assert wave_efficiency(48 * 3, 108) == pytest.approx(0.667, abs=5e-4)
    assert default_splits(48, 108, key_tiles=64) == 2
    assert default_splits(108, 108, key_tiles=64) == 1
    assert default_splits(1, 108, key_tiles=1) == 1


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("group", [1, 8, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_schedules_fit(profile, group, head_dim):
    chip = load_profile(profile)
    problem = Decode(heads=2 * group, kv_heads=2, head_dim=head_dim, dtype="bf16")
    launches = planned(problem, KERNEL.default_schedule(problem, chip), chip)
    assert all(why_not(launch.footprint, chip) is None for launch in launches)


def test_a_grid_has_no_splits():
    with pytest.raises(RequestError, match="4 splits gain nothing"):
        planned(Decode(dtype="bf16"), Schedule(tile=(16, 128), splits=4), TPU)
