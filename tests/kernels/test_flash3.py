"""FlashAttention-3: right numbers, operations that are what it touches, counts by arithmetic.

Small problems on `chip_of` few cores and short warp-group products have many work tiles for each
block. Order of the work, sizes and refusals are in test_flash3_sizes.py.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.kernels import load_kernel, reference
from iosim.kernels.rounding import FORMATS, rounded, unit_roundoff
from iosim.problem import Attention, Schedule, tiles
from iosim.profiles import load_profile

KERNEL = load_kernel("flash3")
GPU = load_profile("h200")
Q, K, V = range(3)
VARIANTS = list(KERNEL.variants)


def the_launch(problem, schedule, chip=GPU):
    (launch,) = KERNEL.launches(problem, schedule, chip)
    return launch


def forms_of(problem, schedule, chip=GPU):
    return {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, chip)}


def assert_right(arrays, problem):
    """O and the log-sum-exp of every row against the twin."""
    o, lse = reference.attention(arrays["Q"], arrays["K"], arrays["V"], problem)
    np.testing.assert_allclose(arrays["O"], o, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(arrays["lse"], lse, rtol=1e-10, atol=1e-10)


def spoiled(arrays):
    """Rows that nobody writes are found: O and lse hold what no result is."""
    arrays["O"][:] = arrays["lse"][:] = np.nan
    return arrays


@st.composite
def cuts_of_a_chip(draw, harness, problem):
    """(schedule, chip) that go together: clusters only without a mask."""
    rows = draw(st.integers(2, 6))
    masked = problem.causal or problem.window > 0
    cluster = 1 if masked else draw(st.sampled_from([1, 1, 2, 3, 4]))
    schedule = Schedule(
        tile=(rows * draw(st.integers(2, 3)), draw(st.integers(1, 20))),
        order=draw(st.sampled_from(["query", "head"])),
        stages=draw(st.integers(1, 3)),
        cluster=cluster,
        variant=draw(st.sampled_from(VARIANTS)),
        spills=draw(st.sampled_from([0, 3])),
    )
    return schedule, harness.chip_of(draw(st.integers(cluster, 9)), rows)


@settings(max_examples=250, deadline=None)
@given(
    data=st.data(),
    peak=st.sampled_from([0.0, 1e4]),
    cuts=st.lists(st.integers(1, 60), max_size=3),
)
def test_computes_attention_in_persistent_blocks(harness, data, peak, cuts):
    problem = data.draw(harness.attention_problems(longest=40))
    schedule, chip = data.draw(cuts_of_a_chip(harness, problem))
    launch = the_launch(problem, schedule, chip)
    arrays = spoiled(harness.attention_arrays(problem, peak))
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays, problem)
    harness.assert_work(launch, computed)
    harness.assert_ranges(launch, computed, cuts)
    most = 0
    for ops in computed:
        most = max(most, int(ops["step"].max()) + 1)
        assert (np.diff(ops["step"]) >= 0).all()
        assert set(ops["step"]) == set(range(ops["step"].max() + 1))  # dense
    assert launch.steps == most
    assert launch.blocks % launch.cluster == 0


TRACED = {
    "plain": ({}, {}),
    "persistent": ({"batch": 2}, {}),
    "causal": ({"causal": True}, {}),
    "top-left": ({"causal": True, "align": "top-left"}, {}),
    "rows without keys": ({"causal": True, "seqlen_k": 5}, {}),
    "window": ({"window": 3}, {}),
    "causal window": ({"causal": True, "window": 2, "align": "top-left"}, {}),
    "one row": ({"seqlen": 1, "seqlen_k": 9, "causal": True}, {}),
    "cluster of 2": ({"batch": 2}, {"cluster": 2}),
    "cluster of 4 with padding": ({}, {"cluster": 4}),
    "cluster that shares less than a row each": ({"seqlen_k": 7}, {"cluster": 4, "tile": (8, 3)}),
}


@pytest.mark.parametrize("case", TRACED)
@pytest.mark.parametrize("order", ["query", "head"])
def test_reports_what_it_touches(trace, harness, case, order):
    mask, cut = TRACED[case]
    size = {"heads": 4, "kv_heads": 2, "seqlen": 19, "seqlen_k": 9, "head_dim": 4}
    problem = Attention(**{**size, **mask})
    schedule = Schedule(**{"tile": (8, 4), "order": order, **cut})
    arrays = spoiled(harness.attention_arrays(problem))
    assert_right(trace("flash3", problem, schedule, harness.chip_of(5), arrays), problem)


def test_reports_what_it_touches_in_real_tiles(trace, harness):
    problem = Attention(heads=2, kv_heads=1, seqlen=200, seqlen_k=100, head_dim=2)
    schedule = Schedule(tile=(128, 48), cluster=2)
    arrays = spoiled(harness.attention_arrays(problem))
    assert_right(trace("flash3", problem, schedule, "h200", arrays), problem)


SHAPES = {
    "whole tiles": {},
    "causal": {"causal": True},
    "ragged": {"seqlen": 200, "seqlen_k": 328},
    "ragged causal": {"seqlen": 328, "seqlen_k": 200, "causal": True},
    "ragged top-left": {"seqlen": 200, "seqlen_k": 328, "causal": True, "align": "top-left"},
    "window": {"window": 70, "seqlen": 328, "seqlen_k": 328},
    "causal window": {"window": 100, "causal": True, "seqlen": 328, "seqlen_k": 200},
    "decode": {"seqlen": 8, "seqlen_k": 600, "causal": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cores", [5, 132])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_closed_forms_are_what_the_engine_counts(harness, shape, cores, head_dim):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 256, "seqlen_k": 256}
    problem = Attention(**{**size, **SHAPES[shape]}, head_dim=head_dim)
    chip, schedule = harness.chip_of(cores, 64), Schedule(tile=(128, 48), stages=2)
    assert_forms(problem, schedule, chip)


@pytest.mark.parametrize("cluster", [2, 3, 4])
@pytest.mark.parametrize("cores", [5, 132])
@pytest.mark.parametrize("shape", [{}, {"seqlen": 392, "seqlen_k": 328}, {"kv_heads": 1}])
def test_a_cluster_asks_for_each_tile_once(harness, cluster, cores, shape):
    problem = Attention(**{"heads": 3, "seqlen": 512, "seqlen_k": 256, **shape})
    schedule = Schedule(tile=(128, 48), stages=2, cluster=cluster)
    counts, _ = assert_forms(problem, schedule, harness.chip_of(cores, 64))
    heads, row_bytes = problem.heads, 2 * problem.head_dim
    query_tiles = -(-tiles(problem.seqlen, 128) // cluster) * cluster
    asked = 2 * heads * query_tiles // cluster * problem.seqlen_k * row_bytes
    saved = counts.l1_fill_bytes + counts.l1_write_bytes - counts.l2_from_l1_bytes
    assert saved == (cluster - 1) * asked


def assert_forms(problem, schedule, chip):
    launch = the_launch(problem, schedule, chip)
    counts = run_blocks(launch, chip, CachedMemory(chip), clock_hz=1.7e9, seed=0, soil=False)
    forms = forms_of(problem, schedule, chip)
    for quantity in ("l1_fill_bytes", "l1_write_bytes", "l2_from_l1_bytes"):
        assert getattr(counts.traffic, quantity) == forms[quantity], quantity
    assert launch.work.flops == forms["flops"] == problem.matrix_flops()
    for name in ("Q", "K", "V"):
        assert counts.operands[name].dram_read_bytes >= counts.operands[name].unique_bytes
    return counts.traffic, forms


@pytest.mark.parametrize("mask", [{}, {"causal": True}])
def test_spills_are_written_at_every_step(harness, mask):
    problem = Attention(heads=2, seqlen=320, seqlen_k=256, head_dim=64, **mask)
    dry, wet = (Schedule(tile=(128, 64), stages=2, spills=spills) for spills in (0, 5))
    before = assert_forms(problem, dry, harness.chip_of(3, 64))[1]
    after = assert_forms(problem, wet, harness.chip_of(3, 64))[1]
    pairs = sum(
        reference.mask(problem)[row : row + 128, c : c + 64].any()
        for row in range(0, 320, 128)
        for c in range(0, 256, 64)
    )
    assert after["l1_write_bytes"] - before["l1_write_bytes"] == 2 * pairs * 2 * 128 * 5 * 4
    assert after["l1_fill_bytes"] == before["l1_fill_bytes"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
@pytest.mark.parametrize("shape", [{}, {"causal": True}, {"window": 40}])
def test_rounds_as_its_dtype_does(harness, dtype, shape):
    problem = Attention(heads=4, kv_heads=2, seqlen=70, head_dim=16, dtype=dtype, **shape)
    arrays = spoiled(harness.attention_arrays(problem))
    for name in ("Q", "K", "V"):
        arrays[name] = rounded(arrays[name], dtype)
    launch = the_launch(problem, Schedule(tile=(12, 16), stages=2), harness.chip_of(5))
    harness.compute(launch, arrays)
    o, lse = reference.attention(arrays["Q"], arrays["K"], arrays["V"], problem)
    unit, form = unit_roundoff(dtype), FORMATS[dtype]
    least = 2.0 ** (form.least - form.digits)  # half the distance of subnormal numbers
    largest = np.abs(arrays["V"]).max()
    # each probability is off by unit times itself, or by `least` of the greatest; then O itself
    bound = largest * (unit + problem.seqlen_k * least)
    bound += unit * (largest + bound) + least
    error = np.abs(arrays["O"] - o).max()
    assert 0 < error <= bound
    assert (rounded(arrays["O"], dtype) == arrays["O"]).all()
    np.testing.assert_allclose(arrays["lse"], lse, rtol=1e-10, atol=1e-10)
