"""The matrix product: right results, true operations, and closed forms that the engine meets."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference
from iosim.launch import require_fit
from iosim.ops import LOAD, MATRIX, STORE
from iosim.problem import Gemm, Schedule, Stream
from iosim.profiles import load_profile
from iosim.simulation import complete

COUNTERS = Path(__file__).resolve().parents[2] / "reports" / "accuracy" / "h200.jsonl"
KERNEL = load_kernel("gemm")
GPU_TILES = [(16, 16, 16), (32, 16, 8), (8, 24, 40), (64, 64, 64)]


def planned(problem, chip, **schedule):
    """The schedule, complete, and the launch."""
    full = complete(KERNEL, problem, chip, Schedule(**schedule))
    (launch,) = KERNEL.launches(problem, full, chip)
    return full, launch


def closed_forms(problem, schedule, chip):
    return {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, chip)}


def arrays_of(problem):
    rng = np.random.default_rng(problem.m)
    return {
        "A": rng.standard_normal((problem.m, problem.k)),
        "B": rng.standard_normal((problem.k, problem.n)),
        "C": np.full((problem.m, problem.n), np.nan),
    }


def rows_of(family):
    """The rows of one family of the counters. Skips where there is no such file."""
    rows = [json.loads(line) for line in COUNTERS.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.get("family") == family]


sizes = st.integers(1, 70)


@settings(max_examples=40, deadline=None)
@given(m=sizes, n=sizes, k=sizes, tile=st.sampled_from(GPU_TILES), group=st.integers(1, 5))
def test_computes_the_product(harness, m, n, k, tile, group):
    problem = Gemm(m=m, n=n, k=k)
    _, launch = planned(problem, load_profile("h200"), tile=tile, group=group)
    arrays = arrays_of(problem)
    ops = np.concatenate(harness.compute(launch, arrays))
    np.testing.assert_allclose(
        arrays["C"], reference.matmul(arrays["A"], arrays["B"]), rtol=1e-12, atol=1e-12
    )
    flops = ops[ops["kind"] == MATRIX]
    issued = 2 * (flops["m"].astype(np.int64) * flops["n"] * flops["k"]).sum()
    assert issued == launch.work.issued_flops >= launch.work.flops == 2 * m * n * k


@settings(max_examples=10, deadline=None)
@given(m=sizes, n=st.integers(1, 300), k=st.integers(1, 300))
def test_computes_the_product_on_a_grid(harness, m, n, k):
    problem = Gemm(m=m, n=n, k=k, dtype="bf16")
    _, launch = planned(problem, load_profile("tpu-v5e"), tile=(16, 128, 128))
    arrays = arrays_of(problem)
    harness.compute(launch, arrays)
    np.testing.assert_allclose(
        arrays["C"], reference.matmul(arrays["A"], arrays["B"]), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    ("profile", "dtype", "shape", "tile", "group", "stages"),
    [
        ("h200", "fp16", (33, 20, 41), (16, 8, 16), 2, 3),
        ("h200", "fp16", (16, 16, 16), (16, 16, 16), 1, 1),
        ("h200", "fp32", (9, 31, 5), (8, 16, 2), 8, 2),
        ("tpu-v5e", "bf16", (19, 131, 130), (16, 128, 128), 8, 2),
        ("tpu-v5e", "fp32", (3, 5, 129), (8, 128, 128), 8, 2),
        ("tpu-v4", "int8", (33, 7, 9), (32, 128, 128), 8, 2),
    ],
)
def test_touches_what_it_reports(trace, profile, dtype, shape, tile, group, stages):
    m, n, k = shape
    problem = Gemm(m=m, n=n, k=k, dtype=dtype)
    schedule, _ = planned(problem, load_profile(profile), tile=tile, group=group, stages=stages)
    arrays = arrays_of(problem)
    result = trace("gemm", problem, schedule, profile, arrays)
    np.testing.assert_allclose(result["C"], reference.matmul(arrays["A"], arrays["B"]), rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    n=sizes, k=st.integers(1, 200), cuts=st.lists(st.integers(1, 12), unique=True), block=st.data()
)
def test_any_range_of_steps(harness, n, k, cuts, block):
    _, launch = planned(Gemm(m=40, n=n, k=k), load_profile("h200"), tile=(16, 16, 16))
    at = block.draw(st.integers(0, launch.blocks - 1))
    cuts = sorted(cut for cut in cuts if cut < launch.steps)
    assert harness.count(launch, at, cuts).tobytes() == harness.count(launch, at).tobytes()


def order_of(harness, launch, tile_m, tile_n, pitch_bytes):
    """(tile row, tile column) of every block, from the address of its store; 2-byte elements."""
    c = next(operand.address for operand in launch.operands if operand.name == "C")
    order = []
    for block in range(launch.blocks):
        ops = harness.count(launch, block)
        at = int(ops["address"][ops["kind"] == STORE][0]) - c
        order.append((at // pitch_bytes // tile_m, at % pitch_bytes // 2 // tile_n))
    return order


def test_order_of_blocks(harness):
    problem, tile = Gemm(m=80, n=48, k=16), (16, 16, 16)
    _, launch = planned(problem, load_profile("h200"), tile=tile, group=2)
    columns = range(3)
    assert order_of(harness, launch, 16, 16, 48 * 2) == [
        *((row, column) for column in columns for row in (0, 1)),
        *((row, column) for column in columns for row in (2, 3)),
        *((4, column) for column in columns),
    ]


def test_a_grid_runs_row_by_row(harness):
    problem, tile = Gemm(m=80, n=384, k=16, dtype="bf16"), (16, 128, 128)
    _, launch = planned(problem, load_profile("tpu-v5e"), tile=tile, group=2)
    expected = [(row, column) for row in range(5) for column in range(3)]
    assert order_of(harness, launch, 16, 128, 384 * 2) == expected


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 200),
    n=st.integers(1, 200),
    k=st.integers(1, 200),
    tile=st.sampled_from(GPU_TILES),
    dtype=st.sampled_from(["fp16", "fp8", "fp32"]),
    group=st.integers(1, 4),
)
def test_closed_forms_are_what_the_engine_counts(m, n, k, tile, dtype, group):
    chip, problem = load_profile("h200"), Gemm(m=m, n=n, k=k, dtype=dtype)
    schedule, launch = planned(problem, chip, tile=tile, group=group, stages=2)
    counts = run_blocks(
        launch, chip, CachedMemory(chip), clock_hz=chip.cores.clock_hz, seed=1, soil=False
    )
    forms = closed_forms(problem, schedule, chip)
    assert forms.pop("flops") == launch.work.flops
    assert forms == {name: getattr(counts.traffic, name) for name in forms}
    assert set(forms) == {"l1_fill_bytes", "l1_write_bytes"}


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 100),
    n=st.integers(1, 500),
    k=st.integers(1, 500),
    profile=st.sampled_from(["tpu-v5e", "tpu-v4"]),
    dtype=st.sampled_from(["bf16", "fp32"]),
)
def test_closed_forms_are_what_the_grid_counts(m, n, k, profile, dtype):
    chip, problem = load_profile(profile), Gemm(m=m, n=n, k=k, dtype=dtype)
    schedule, launch = planned(problem, chip, tile=(32, 128, 128))
    counts = run_grid(launch, chip)
    forms = closed_forms(problem, schedule, chip)
    assert forms.pop("flops") == launch.work.flops
    assert forms == {name: getattr(counts.traffic, name) for name in forms}
    assert ("vmem_fill_bytes" in forms) == (launch.steps > 1)


def test_loads_run_past_l1_where_they_are_pipelined(harness):
    for stages, bypass in ((1, 0), (2, 1), (4, 1)):
        _, launch = planned(Gemm(m=16, n=16, k=16), load_profile("h200"), stages=stages)
        ops = harness.count(launch, 0)
        assert set((ops["flags"][ops["kind"] == LOAD] & 1).tolist()) == {bypass}


def test_counters_agree_with_the_closed_forms():
    chip = load_profile("h200")
    for row in rows_of("gemm"):
        p = row["params"]
        problem = Gemm(m=p["M"], n=p["N"], k=p["K"])
        schedule, launch = planned(
            problem, chip, tile=(p["BM"], p["BN"], p["BK"]), group=p["G"], stages=p["stages"],
            warps=p["warps"],
        )  # fmt: skip
        forms = closed_forms(problem, schedule, chip)
        assert launch.blocks == row["grid"]
        assert launch.footprint.threads == row["block"]
        assert launch.footprint.shared_bytes + 1024 == row["smem_per_block"]
        assert launch.footprint.registers == pytest.approx(row["registers"], rel=0.13)
        for field in ("l1_fill_bytes", "l1_write_bytes"):
            assert forms[field] == pytest.approx(row[field], rel=0.005), (row["id"], field)


@pytest.mark.parametrize(
    ("profile", "schedule", "text"),
    [
        ("h200", Schedule(tile=(64, 64), stages=2, warps=4), "m × n × k, not 64x64"),
        ("tpu-v5e", Schedule(tile=(512, 100, 512)), "multiples of 16 × 128 × 128, not 512x100x512"),
    ],
)
def test_wrong_tiles_are_named(profile, schedule, text):
    with pytest.raises(RequestError, match=text):
        KERNEL.launches(Gemm(dtype="bf16"), schedule, load_profile(profile))


def test_another_problem_is_refused():
    with pytest.raises(RequestError, match="gemm needs a matrix product"):
        KERNEL.default_schedule(Stream(), load_profile("h200"))


@pytest.mark.parametrize("profile", ["h200", "a100", "tpu-v5e", "tpu-v6e"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_default_schedule_fits(profile, dtype):
    chip = load_profile(profile)
    for side in (1, 200, 4096):
        _, launch = planned(Gemm(m=side, n=side, k=side, dtype=dtype), chip)
        require_fit(launch, chip)
