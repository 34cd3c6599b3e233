"""Layernorm of rows: right numbers, operations that are what it touches, counts by arithmetic."""

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

KERNEL = load_kernel("layernorm")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")
#: float64 alone: deviations of some hundred numbers up to 100, times the largest rstd, 1 / √ε
FLOAT64_ERROR = 1e-10

shapes = st.tuples(st.integers(1, 40), st.integers(1, 300))
variants = st.sampled_from(["one-pass", "two-reads"])
inputs = st.sampled_from(["normal", "offset", "constant"])
windows = st.tuples(st.sampled_from([16, 32, 48]), st.sampled_from([128, 256, 384]))


def the_launch(problem, schedule, chip):
    (launch,) = KERNEL.launches(problem, schedule, chip)
    return launch


def forms_of(problem, schedule, chip):
    return {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, chip)}


def arrays_of(problem, kind="normal"):
    """Rows around 0, far from 0 or of equal numbers; γ, β, and room for what is written."""
    rng = np.random.default_rng(problem.rows * 1000 + problem.cols)
    x = rng.standard_normal((1, problem.rows, problem.cols))
    if kind == "offset":
        x += 100 * rng.standard_normal((1, problem.rows, 1))
    if kind == "constant":
        x[:] = x[:, :, :1]
    gamma, beta = rng.standard_normal((2, 1, 1, problem.cols))
    statistic = np.full((1, problem.rows, 1), np.nan)
    return {
        "X": x,
        "gamma": gamma,
        "beta": beta,
        "Y": np.full_like(x, np.nan),
        "mean": statistic,
        "rstd": statistic.copy(),
    }


def assert_right(arrays):
    results = reference.layernorm(arrays["X"], arrays["gamma"], arrays["beta"])
    for name, expected in zip(("Y", "mean", "rstd"), results, strict=True):
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-10, atol=1e-10, err_msg=name)


def test_the_twin_is_the_definition():
    x = np.array([[[1.0, 2.0, 3.0, 6.0]]])
    y, mean, rstd = reference.layernorm(x, np.full((1, 1, 4), 2.0), np.full((1, 1, 4), 5.0))
    assert mean == 3
    assert rstd == pytest.approx((3.5 + 1e-5) ** -0.5)  # (4 + 1 + 0 + 9) / 4
    np.testing.assert_allclose(y, (x - 3) * 2 / (3.5 + 1e-5) ** 0.5 + 5)


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes,
    tile=st.tuples(st.integers(1, 20), st.integers(1, 320)),
    variant=variants,
    stages=st.integers(1, 3),
    kind=inputs,
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
    assert launch.work.issued_vector_ops > 0
    assert launch.work.issued_flops == launch.work.issued_exps == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 100),
    cols=st.integers(1, 600),
    tile=windows,
    variant=variants,
    dtype=st.sampled_from(["bf16", "fp32"]),
    profile=st.sampled_from(["tpu-v5e", "tpu-v4"]),
    cuts=st.lists(st.integers(1, 10), max_size=2),
)
def test_computes_in_grid_steps(harness, rows, cols, tile, variant, dtype, profile, cuts):
    chip = load_profile(profile)
    problem, schedule = (
        Rows(rows=rows, cols=cols, dtype=dtype),
        Schedule(tile=tile, variant=variant),
    )
    launch = the_launch(problem, schedule, chip)
    arrays = arrays_of(problem, "offset")
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays)
    harness.assert_ranges(launch, computed, cuts)
    harness.assert_work(launch, computed)
    assert launch.work.issued_vector_ops > 0
    assert launch.work.issued_flops == launch.work.issued_exps == 0
    traffic, forms = run_grid(launch, chip).traffic, forms_of(problem, schedule, chip)
    assert set(forms) == {"vmem_fill_bytes", "vmem_drain_bytes"}
    assert forms == {name: getattr(traffic, name) for name in forms}


def test_a_constant_row_is_beta(harness):
    for variant in KERNEL.variants:
        problem = Rows(rows=5, cols=37)
        arrays = arrays_of(problem, "constant")
        launch = harness.exact(the_launch(problem, Schedule(tile=(2, 8), variant=variant), GPU))
        harness.compute(launch, arrays)
        np.testing.assert_array_equal(arrays["Y"], np.broadcast_to(arrays["beta"], (1, 5, 37)))
        np.testing.assert_allclose(arrays["rstd"], 1e-5**-0.5, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    tile=st.tuples(st.integers(1, 8), st.integers(1, 100)),
    variant=variants,
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    kind=inputs,
)
def test_rounds_only_what_it_stores(harness, shape, tile, variant, dtype, kind):
    """The error is that of rounding a result once: relative, or half the least step near 0."""
    problem = Rows(rows=shape[0], cols=shape[1], dtype=dtype)
    arrays = arrays_of(problem, kind)
    for name in ("X", "gamma", "beta"):
        arrays[name] = rounded(arrays[name], dtype)
    harness.compute(the_launch(problem, Schedule(tile=tile, variant=variant), GPU), arrays)
    expected, mean, rstd = reference.layernorm(arrays["X"], arrays["gamma"], arrays["beta"])
    form, u = FORMATS[dtype], unit_roundoff(dtype)
    bound = u * np.abs(expected) + 2.0 ** (form.least - form.digits) + FLOAT64_ERROR
    assert (np.abs(arrays["Y"] - expected) <= bound).all()
    np.testing.assert_array_equal(arrays["Y"], rounded(arrays["Y"], dtype))
    np.testing.assert_allclose(arrays["mean"], mean, rtol=1e-10, atol=1e-10)  # not of the dtype
    np.testing.assert_allclose(arrays["rstd"], rstd, rtol=1e-10)


@pytest.mark.parametrize("variant", KERNEL.variants)
@pytest.mark.parametrize("tile", [(1, 4), (4, 5), (3, 13), (16, 64)], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_reports_what_it_touches_on_a_gpu(trace, variant, tile, dtype):
    problem = Rows(rows=11, cols=13, dtype=dtype)
    schedule = Schedule(tile=tile, variant=variant)
    assert_right(trace("layernorm", problem, schedule, "h200", arrays_of(problem)))


@pytest.mark.parametrize("variant", KERNEL.variants)
@pytest.mark.parametrize("profile", ["tpu-v5e", "tpu-v4"])
def test_reports_what_it_touches_on_a_tpu(trace, variant, profile):
    problem = Rows(rows=37, cols=300, dtype="bf16")
    schedule = Schedule(tile=(16, 128), variant=variant)
    assert_right(trace("layernorm", problem, schedule, profile, arrays_of(problem)))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 3000),
    tile=st.tuples(st.integers(1, 12), st.integers(1, 1024)),
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
    assert forms == {"l1_write_bytes": counts.traffic.l1_write_bytes}
    for name in ("X", "gamma", "beta"):
        assert counts.operands[name].dram_read_bytes >= counts.operands[name].unique_bytes


def test_gamma_and_beta_come_once_per_core_while_l1_holds_them():
    """All blocks read them, and what a core has in L1 it does not fetch again."""
    problem = Rows(rows=2000, cols=1024)
    schedule = KERNEL.default_schedule(problem, GPU)
    launch = the_launch(problem, schedule, GPU)
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    for name in ("gamma", "beta"):
        assert counts.operands[name].l1_fill_bytes == GPU.cores.count * 1024 * 2
        assert counts.operands[name].dram_read_bytes == 1024 * 2


def test_one_pass_reads_once_and_two_reads_twice(harness):
    problem = Rows(rows=7, cols=100)
    for variant, reads in (("one-pass", 1), ("two-reads", 2)):
        launch = the_launch(problem, Schedule(tile=(1, 30), variant=variant), GPU)
        ops = np.concatenate([harness.count(launch, block) for block in range(launch.blocks)])
        size = {
            (launch.operands[index].name, kind): int(
                ops["useful_bytes"][(ops["kind"] == kind) & (ops["tensor"] == index)].sum()
            )
            for index in range(len(launch.operands))
            for kind in (LOAD, STORE)
        }
        assert size["X", LOAD] == reads * 7 * 100 * 2
        assert size["gamma", LOAD] == size["beta", LOAD] == size["Y", STORE] == 7 * 100 * 2
        assert size["mean", STORE] == size["rstd", STORE] == 7 * 4


# rows, columns, what the SMs write; Nsight Compute, PyTorch's kernel
WRITTEN = [(8192, 4096, 67632992), (2048, 32768, 134348800)]


@pytest.mark.parametrize(("rows", "cols", "written"), WRITTEN)
def test_a_statistic_of_a_row_takes_a_sector(rows, cols, written):
    schedule = Schedule(tile=(1, 512), variant="two-reads")
    forms = forms_of(Rows(rows=rows, cols=cols), schedule, GPU)
    assert forms["l1_write_bytes"] == rows * cols * 2 + 64 * rows
    assert forms["l1_write_bytes"] == pytest.approx(written, rel=1e-5)
