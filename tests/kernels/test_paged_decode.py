"""Paged decoding: the same numbers wherever the pages lie, every page read once, counts by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference, rounding
from iosim.launch import why_not
from iosim.ops import LOAD, OP_DTYPE
from iosim.problem import Attention, Schedule
from iosim.problem_variants import PagedDecode
from iosim.profiles import load_profile, profile_names
from iosim.simulation import simulate

KERNEL = load_kernel("paged-decode")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")


def planned(problem, schedule, chip=GPU):
    return KERNEL.launches(problem, schedule, chip)


def into_pages(values, problem, grid):
    """[batch · kv_heads, seqlen_k, d] as the pool of pages that the chip has; the rest is NaN."""
    table, size, heads = problem.page_table(), problem.page_size, problem.kv_heads
    pool = np.full((table.size, size, heads, values.shape[-1]), np.nan)
    for sequence in range(problem.batch):
        for key in range(problem.seqlen_k):
            page = table[sequence, key // size]
            mine = values[sequence * heads : (sequence + 1) * heads, key]
            pool[page, key % size] = mine
    if grid:
        return pool.transpose(2, 0, 1, 3).reshape(heads * table.size, size, -1).copy()
    return pool.reshape(table.size, size * heads, -1)


def arrays_of(harness, problem, splits, grid=False):
    """Q and O with the rows of a KV head together, K and V in pages, the table."""
    plain = harness.attention_arrays(problem)
    count, rows = problem.batch * problem.kv_heads, problem.group * problem.seqlen
    arrays = {
        "Q": plain["Q"].reshape(count, rows, problem.head_dim),
        "K": into_pages(plain["K"], problem, grid),
        "V": into_pages(plain["V"], problem, grid),
        "O": np.full((count, rows, problem.head_dim), np.nan),
        "O_part": np.full((count * splits, rows, problem.head_dim), np.nan),
        "lse_part": np.full((count * splits, rows), np.nan),
        "pages": problem.page_table(),
    }
    return arrays, plain


def expected(plain, problem):
    o, _ = reference.attention(plain["Q"], plain["K"], plain["V"], problem)
    return o.reshape(-1, problem.group * problem.seqlen, problem.head_dim)


@st.composite
def paged(draw, harness, longest_k=40, sizes=(1, 2, 4, 8)):
    problem = draw(harness.attention_problems(longest=4, longest_k=longest_k))
    fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(Attention)}
    return PagedDecode(
        **fields, page_size=draw(st.sampled_from(sizes)), pattern_seed=draw(st.integers(0, 9))
    )


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    tile=st.tuples(st.integers(1, 20), st.sampled_from([1, 2, 4, 8, 16])),
    splits=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 30), max_size=3),
)
def test_computes_attention_wherever_the_pages_lie(harness, data, tile, splits, cuts):
    problem = data.draw(paged(harness))
    schedule = Schedule(tile=tile, splits=splits)
    arrays, plain = arrays_of(harness, problem, splits)
    for launch in planned(problem, schedule):
        computed = harness.compute(harness.exact(launch), arrays)
        harness.assert_ranges(launch, computed, cuts)
        harness.assert_work(launch, computed)
    np.testing.assert_allclose(arrays["O"], expected(plain, problem), rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), tile=st.sampled_from([(16, 128), (32, 256)]))
def test_computes_attention_in_grid_steps(harness, data, tile):
    problem = data.draw(paged(harness, longest_k=500, sizes=(16, 32, 128, 256)))
    (launch,) = planned(problem, Schedule(tile=tile), TPU)
    arrays, plain = arrays_of(harness, problem, 1, grid=True)
    computed = harness.compute(harness.exact(launch), arrays)
    harness.assert_work(launch, computed)
    np.testing.assert_allclose(arrays["O"], expected(plain, problem), rtol=1e-10, atol=1e-10)
    moved = run_grid(launch, TPU)
    for form in KERNEL.closed_forms(problem, Schedule(tile=tile), TPU)[1:]:
        assert getattr(moved.traffic, form.quantity) == form.value, form.quantity
    assert moved.operands["K"].vmem_fill_bytes >= moved.operands["K"].unique_bytes


SIZE = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 3, "seqlen_k": 29, "head_dim": 4}
TRACED = {
    "plain": {"page_size": 4},
    "pages of one key": {"page_size": 1},
    "pages longer than tiles": {"page_size": 16},
    "causal": {"causal": True, "page_size": 4},
    "window": {"causal": True, "window": 5, "page_size": 2},
    "in order": {"pattern_seed": 0, "page_size": 8},
}


@pytest.mark.parametrize("case", TRACED)
def test_reports_what_it_touches_on_a_gpu(trace, harness, case):
    problem = PagedDecode(**{**SIZE, **TRACED[case]})
    arrays, plain = arrays_of(harness, problem, 3)
    arrays = trace("paged-decode", problem, Schedule(tile=(4, 8), splits=3), "h200", arrays)
    np.testing.assert_allclose(arrays["O"], expected(plain, problem), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_keys_and_values_with_scales(trace, harness, dtype):
    problem = PagedDecode(**SIZE, page_size=4, kv_dtype=dtype)
    arrays, plain = arrays_of(harness, problem, 2)
    for name in "KV":
        stored, scales = rounding.quantized(plain[name], dtype)
        plain[name] = stored * scales[..., None]
        arrays[name] = into_pages(stored, problem, grid=False)
        pool = into_pages(scales[..., None], problem, grid=False)
        pool = pool.reshape(-1, problem.page_size, problem.kv_heads)
        arrays[f"{name}_scale"] = pool.transpose(0, 2, 1).copy()
    done = trace("paged-decode", problem, Schedule(tile=(8, 8), splits=2), "h200", arrays)
    np.testing.assert_allclose(done["O"], expected(plain, problem), rtol=1e-10, atol=1e-10)


SHAPES = {
    "whole pages": {},
    "last page not full": {"seqlen_k": 1001},
    "several rows": {"seqlen": 5, "causal": True},
    "window": {"causal": True, "window": 300},
    "long pages": {"page_size": 256},
    "pages of one key": {"page_size": 1, "seqlen_k": 300},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [1, 5])
def test_closed_forms_are_what_the_engine_counts(shape, splits):
    size = {"batch": 3, "heads": 8, "kv_heads": 2, "seqlen_k": 1024, "head_dim": 64}
    problem = PagedDecode(**{**size, **SHAPES[shape]})
    schedule = Schedule(tile=(16, 64), stages=3, warps=4, splits=splits, spills=0)
    memory = CachedMemory(GPU)
    runs = [
        run_blocks(launch, GPU, memory, clock_hz=1.7e9, seed=0, soil=False).traffic
        for launch in planned(problem, schedule)
    ]
    for form in KERNEL.closed_forms(problem, schedule, GPU)[1:]:
        assert sum(getattr(run, form.quantity) for run in runs) == form.value, form.quantity


def test_every_key_is_read_from_its_own_page():
    problem = PagedDecode(heads=2, kv_heads=1, seqlen_k=40, head_dim=16, page_size=8)
    first, _ = planned(problem, Schedule(tile=(16, 8), stages=2, splits=1, warps=4))
    table = problem.page_table()[0]
    k = next(operand for operand in first.operands if operand.name == "K")
    out = np.zeros(200, dtype=OP_DTYPE)
    count, _ = first.program(0, 0, first.steps, first.params, out, None)
    loads = [op for op in out[:count] if op["kind"] == LOAD and op["tensor"] == 1]
    assert [int(op["address"] - k.address) // (8 * 32) for op in loads] == table.tolist()


def test_pages_cost_hbm_nothing_but_the_table():
    size = {"batch": 4, "heads": 8, "kv_heads": 2, "seqlen_k": 4096, "head_dim": 128}
    schedule = Schedule(tile=(16, 64), splits=4)
    flat = simulate("flash-decode", Attention(**size, seqlen=1), GPU, schedule)
    for page_size in (16, 64):
        result = simulate("paged-decode", PagedDecode(**size, page_size=page_size), GPU, schedule)
        extra = result.traffic.dram_read_bytes - flat.traffic.dram_read_bytes
        assert 0 <= extra <= 2 * result.operands["pages"].unique_bytes + 64


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("page_size", [1, 16, 48, 128, 1024])
def test_default_schedules_fit_pages_and_chip(profile, page_size):
    chip = load_profile(profile)
    problem = PagedDecode(heads=16, kv_heads=2, page_size=page_size, dtype="bf16")
    schedule = KERNEL.default_schedule(problem, chip)
    try:
        launches = planned(problem, schedule, chip)
    except RequestError as error:
        assert chip.grid is not None
        assert "pages" in str(error)  # noqa: PT017
        return
    assert all(why_not(launch.footprint, chip) is None for launch in launches)


def test_refusals_say_what_is_possible():
    with pytest.raises(RequestError, match="one must divide the other"):
        planned(PagedDecode(page_size=48), Schedule(tile=(16, 64)))
    with pytest.raises(RequestError, match="needs a problem with pages"):
        planned(Attention(), Schedule(tile=(16, 64)))
    with pytest.raises(RequestError, match="no form for scales"):
        planned(PagedDecode(dtype="bf16", kv_dtype="int8"), Schedule(tile=(16, 128)), TPU)
