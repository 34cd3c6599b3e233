"""Softmax of rows: right numbers, operations that are what it touches, counts by arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.kernels import load_kernel, reference
from iosim.kernels.rounding import FORMATS, rounded, unit_roundoff
from iosim.ops import LOAD, STORE
from iosim.problem import Rows, Schedule
from iosim.profiles import load_profile

KERNEL = load_kernel("softmax")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")
FLOAT64_ERROR = 1e-12  # of sums of some hundred numbers in float64

shapes = st.tuples(st.integers(1, 40), st.integers(1, 300))
variants = st.sampled_from(["one-pass", "online"])
logits = st.sampled_from(["normal", "huge", "hidden"])
windows = st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([128, 256, 384]))


def the_launch(problem, schedule, chip):
    (launch,) = KERNEL.launches(problem, schedule, chip)
    return launch


def forms_of(problem, schedule, chip):
    return {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, chip)}


def arrays_of(problem, kind="normal"):
    """Logits, ±1e4 or with places and whole rows of -inf, and room for the output."""
    rng = np.random.default_rng(problem.rows * 1000 + problem.cols)
    x = rng.standard_normal((1, problem.rows, problem.cols))
    if kind == "huge":
        x = np.clip(x * 1e4, -1e4, 1e4)
    if kind == "hidden":
        x[rng.random(x.shape) < 0.5] = -np.inf
        x[:, rng.random(problem.rows) < 0.3] = -np.inf
    return {"X": x, "Y": np.full_like(x, np.nan)}


def assert_right(arrays):
    expected, _ = reference.softmax(arrays["X"])
    np.testing.assert_allclose(arrays["Y"], expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes,
    tile=st.tuples(st.integers(1, 20), st.integers(1, 320)),
    variant=variants,
    stages=st.integers(1, 3),
    kind=logits,
    cuts=st.lists(st.integers(1, 600), max_size=3),
)
def test_computes_in_blocks(harness, shape, tile, variant, stages, kind, cuts):
    problem = Rows(rows=shape[0], cols=shape[1])
    launch = the_launch(problem, Schedule(tile=tile, stages=stages, variant=variant), GPU)
    arrays = arrays_of(problem, kind)
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays)
    harness.assert_ranges(launch, computed, cuts)
    harness.assert_work(launch, computed)
    assert launch.work.issued_flops == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 100),
    cols=st.integers(1, 600),
    tile=windows,
    variant=variants,
    dtype=st.sampled_from(["bf16", "fp32"]),
    kind=logits,
    cuts=st.lists(st.integers(1, 10), max_size=2),
)
def test_computes_in_grid_steps(harness, rows, cols, tile, variant, dtype, kind, cuts):
    problem, schedule = (
        Rows(rows=rows, cols=cols, dtype=dtype),
        Schedule(tile=tile, variant=variant),
    )
    launch = the_launch(problem, schedule, TPU)
    arrays = arrays_of(problem, kind)
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays)
    harness.assert_ranges(launch, computed, cuts)
    harness.assert_work(launch, computed)
    assert launch.work.issued_flops == 0
    traffic, forms = run_grid(launch, TPU).traffic, forms_of(problem, schedule, TPU)
    assert set(forms) == {"vmem_fill_bytes", "vmem_drain_bytes"}
    assert forms == {name: getattr(traffic, name) for name in forms}


def test_a_row_of_minus_infinity_is_zero(harness):
    for variant in KERNEL.variants:
        problem = Rows(rows=3, cols=10)
        arrays = arrays_of(problem)
        arrays["X"][0, 1] = -np.inf
        launch = the_launch(problem, Schedule(tile=(2, 4), variant=variant), GPU)
        harness.compute(launch, arrays)
        assert (arrays["Y"][0, 1] == 0).all()
        np.testing.assert_allclose(arrays["Y"][0, [0, 2]].sum(axis=-1), 1, rtol=1e-2)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    tile=st.tuples(st.integers(1, 8), st.integers(1, 100)),
    variant=variants,
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    kind=logits,
)
def test_rounds_only_what_it_stores(harness, shape, tile, variant, dtype, kind):
    """The error is that of rounding a result once: relative, or half the least step near 0."""
    problem = Rows(rows=shape[0], cols=shape[1], dtype=dtype)
    arrays = arrays_of(problem, kind)
    arrays["X"] = rounded(arrays["X"], dtype)
    harness.compute(the_launch(problem, Schedule(tile=tile, variant=variant), GPU), arrays)
    expected, _ = reference.softmax(arrays["X"])
    form = FORMATS[dtype]
    bound = unit_roundoff(dtype) * expected + 2.0 ** (form.least - form.digits) + FLOAT64_ERROR
    assert (np.abs(arrays["Y"] - expected) <= bound).all()
    np.testing.assert_array_equal(arrays["Y"], rounded(arrays["Y"], dtype))


@pytest.mark.parametrize("variant", KERNEL.variants)
@pytest.mark.parametrize("tile", [(1, 4), (4, 5), (3, 13), (16, 64)], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_reports_what_it_touches_on_a_gpu(trace, variant, tile, dtype):
    problem = Rows(rows=11, cols=13, dtype=dtype)
    schedule = Schedule(tile=tile, variant=variant)
    assert_right(trace("softmax", problem, schedule, "h200", arrays_of(problem, "hidden")))


@pytest.mark.parametrize("variant", KERNEL.variants)
@pytest.mark.parametrize("profile", ["tpu-v5e", "tpu-v4"])
def test_reports_what_it_touches_on_a_tpu(trace, variant, profile):
    problem = Rows(rows=37, cols=300, dtype="bf16")
    schedule = Schedule(tile=(16, 128), variant=variant)
    assert_right(trace("softmax", problem, schedule, profile, arrays_of(problem)))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 3000),
    tile=st.tuples(st.integers(1, 8), st.integers(1, 1024)),
    variant=variants,
    stages=st.integers(1, 3),
    dtype=st.sampled_from(["fp16", "fp32"]),
)
def test_closed_forms_are_what_the_engine_counts(rows, cols, tile, variant, stages, dtype):
    problem = Rows(rows=rows, cols=cols, dtype=dtype)
    schedule = Schedule(tile=tile, stages=stages, warps=4, variant=variant)
    launch = the_launch(problem, schedule, GPU)
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    forms = forms_of(problem, schedule, GPU)
    assert forms == {name: getattr(counts.traffic, name) for name in forms}
    assert "l1_write_bytes" in forms
    assert ("l1_fill_bytes" in forms) or stages == 1 or variant == "one-pass"
    assert counts.operands["X"].dram_read_bytes >= counts.operands["X"].unique_bytes


def test_one_pass_reads_once_and_online_twice(harness):
    problem = Rows(rows=7, cols=100)
    for variant, reads in (("one-pass", 1), ("online", 2)):
        launch = the_launch(problem, Schedule(tile=(2, 30), variant=variant), GPU)
        ops = np.concatenate([harness.count(launch, block) for block in range(launch.blocks)])
        moved = {
            kind: int(ops["useful_bytes"][ops["kind"] == kind].sum()) for kind in (LOAD, STORE)
        }
        assert moved == {LOAD: reads * 7 * 100 * 2, STORE: 7 * 100 * 2}
        assert launch.steps == (1 if variant == "one-pass" else 8)
