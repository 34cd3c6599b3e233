"""FlashAttention-1: right numbers, operations that are what it touches, traffic by arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference
from iosim.launch import why_not
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile

KERNEL = load_kernel("flash1")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")


def the_launch(problem, schedule):
    (launch,) = KERNEL.launches(problem, schedule, GPU)
    return launch


def forms_of(problem, schedule):
    return {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, GPU)}


def assert_right(arrays, problem):
    """O, and the log-sum-exp that l and m make, against the twin."""
    o, lse = reference.attention(arrays["Q"], arrays["K"], arrays["V"], problem)
    np.testing.assert_allclose(arrays["O"], o, rtol=1e-10, atol=1e-10)
    with np.errstate(divide="ignore"):
        found = arrays["m"] + np.log(arrays["l"])
    np.testing.assert_allclose(found, lse, rtol=1e-10, atol=1e-10)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    peak=st.sampled_from([0.0, 1e4]),
    cuts=st.lists(st.integers(1, 100), max_size=4),
)
def test_computes_attention(harness, data, tile, peak, cuts):
    problem = data.draw(harness.attention_problems())
    launch = the_launch(problem, Schedule(tile=tile))
    arrays = harness.attention_arrays(problem, peak)
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays, problem)
    harness.assert_ranges(launch, computed, cuts)
    harness.assert_work(launch, computed)


@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": True}, {"causal": True, "seqlen_k": 5}, {"window": 3}, {"seqlen": 1}],
    ids=str,
)
@pytest.mark.parametrize("tile", [(4, 3), (32, 64)], ids=str)
def test_reports_what_it_touches(trace, harness, mask, tile):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 11, "seqlen_k": 9, "head_dim": 4}
    problem = Attention(**{**size, **mask})
    arrays = trace(
        "flash1", problem, Schedule(tile=tile), "h200", harness.attention_arrays(problem)
    )
    assert_right(arrays, problem)


SHAPES = {
    "whole tiles": {},
    "causal": {"causal": True},
    "ragged": {"seqlen": 200, "seqlen_k": 328},
    "rows without keys": {"seqlen": 328, "seqlen_k": 200, "causal": True},
    "window": {"window": 70, "seqlen": 328, "seqlen_k": 328},
    "unseen keys": {"seqlen": 200, "seqlen_k": 640, "causal": True, "align": "top-left"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_closed_forms_are_what_the_engine_counts(shape):
    """With two stages, whose loads pass L1 by: what L1 keeps of so small a problem is no form."""
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 256, "seqlen_k": 256, "head_dim": 64}
    problem = Attention(**{**size, **SHAPES[shape]})
    schedule = Schedule(tile=(64, 48), stages=2, warps=4)
    launch = the_launch(problem, schedule)
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    forms = forms_of(problem, schedule)
    assert counts.traffic.l1_fill_bytes == forms["l1_fill_bytes"]
    assert counts.traffic.l1_write_bytes == forms["l1_write_bytes"]


# batch, N, d, tile: bytes that arrive at the SMs, bytes they write; Nsight Compute, 16 heads, fp16
COUNTERS = [
    (64, 1024, 64, (32, 32), 9119792192, 4563402752),
    (64, 1024, 64, (64, 32), 9123855744, 4563402752),
    (64, 1024, 64, (64, 64), 4695633664, 2281701376),
    (64, 1024, 64, (64, 128), 2479438464, 1140850688),
    (8, 2048, 64, (32, 32), 4496293760, 2281701376),
    (8, 2048, 128, (32, 32), 8858370048, 4429185024),
    (8, 2048, 64, (64, 64), 2281653760, 1140850688),
    (8, 2048, 128, (64, 64), 4496293888, 2214592512),
    (8, 2048, 64, (64, 128), 1174398208, 570425344),
    (8, 2048, 128, (64, 128), 2315255808, 1107296256),
]


@pytest.mark.parametrize("row", COUNTERS, ids=str)
def test_closed_forms_are_what_was_measured(row):
    batch, seqlen, head_dim, tile, filled, written = row
    problem = Attention(batch=batch, heads=16, seqlen=seqlen, head_dim=head_dim)
    forms = forms_of(problem, Schedule(tile=tile, stages=1))
    assert forms["l1_fill_bytes"] == pytest.approx(filled, rel=0.0015)
    assert forms["l1_write_bytes"] == written


@pytest.mark.slow
def test_the_engine_counts_what_was_measured():
    batch, seqlen, head_dim, tile, filled, written = COUNTERS[-2]
    problem = Attention(batch=batch, heads=16, seqlen=seqlen, head_dim=head_dim)
    launch = the_launch(problem, Schedule(tile=tile, stages=1, warps=4, registers=144, spills=0))
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=True)
    assert counts.traffic.l1_fill_bytes == pytest.approx(filled, rel=0.005)
    assert counts.traffic.l1_write_bytes == written


# d, tile, warps: shared memory without the reserve, registers; Triton 3.6
COMPILED = {
    (64, (64, 32), 4): (24576, 107),
    (64, (64, 64), 4): (32768, 124),
    (64, (64, 128), 4): (49152, 144),
    (128, (64, 64), 8): (65536, 130),
    (128, (64, 128), 8): (98304, 176),
    (64, (32, 32), 4): (None, 96),
    (128, (32, 32), 8): (None, 94),
}


@pytest.mark.parametrize("key", COMPILED, ids=str)
def test_footprint_is_near_what_the_compiler_takes(key):
    head_dim, tile, warps = key
    shared, registers = COMPILED[key]
    problem = Attention(head_dim=head_dim)
    footprint = the_launch(problem, Schedule(tile=tile, stages=1, warps=warps)).footprint
    if shared is not None:  # 32 rows need half the room for O
        assert footprint.shared_bytes == shared
    assert footprint.registers == pytest.approx(registers, rel=0.23)


def test_has_no_form_for_a_grid():
    with pytest.raises(RequestError, match="flash1 has no form"):
        KERNEL.launches(Attention(dtype="bf16"), Schedule(tile=(128, 128)), TPU)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_default_schedules_fit(head_dim):
    problem = Attention(head_dim=head_dim)
    launch = the_launch(problem, KERNEL.default_schedule(problem, GPU))
    assert why_not(launch.footprint, GPU) is None
