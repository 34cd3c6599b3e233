"""Block-sparse attention: right numbers, lists that a brute-force mask gives, counts by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference
from iosim.kernels.block_sparse_sizes import key_lists, keys_listed, list_bytes, seen
from iosim.kernels.rounding import FORMATS, rounded, unit_roundoff
from iosim.launch import why_not
from iosim.ops import LOAD
from iosim.problem import Attention, Schedule
from iosim.problem_variants import BlockSparse
from iosim.profiles import load_profile

KERNEL, DENSE = load_kernel("block-sparse"), load_kernel("flash2")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")
DIVISORS = {1: (1,), 4: (1, 2, 4), 6: (1, 2, 3, 6), 9: (3, 9), 128: (16, 32, 128)}


@st.composite
def sparse_problems(draw, sides=(1, 4, 6, 9), longest: int = 30, longest_k: int = 30):
    """Small problems with every kind of mask, grouping and density, empty rows and columns too."""
    kv_heads = draw(st.integers(1, 2))
    return BlockSparse(
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        seqlen=draw(st.integers(1, longest)),
        seqlen_k=draw(st.integers(1, longest_k)),
        head_dim=draw(st.sampled_from([1, 3, 8])),
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.sampled_from([0, 0, 1, 2, 5, 30])),
        mask_block=draw(st.sampled_from(sides)),
        density=draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0])),
        pattern_seed=draw(st.integers(0, 5)),
        dtype="bf16",
    )


def the_launch(problem, schedule, chip, kernel=KERNEL):
    (launch,) = kernel.launches(problem, schedule, chip)
    return launch


def forms_of(problem, schedule, chip, kernel=KERNEL):
    return {form.quantity: form.value for form in kernel.closed_forms(problem, schedule, chip)}


def tiles_by_brute_force(problem, m, n):
    """[query tiles, key tiles]: where a row of the one sees a key of the other."""
    pairs = reference.mask(problem)
    rows, keys = range(0, problem.seqlen, m), range(0, problem.seqlen_k, n)
    return np.array([[pairs[r : r + m, c : c + n].any() for c in keys] for r in rows])


def sparse_arrays(harness, problem, m, n):
    """Q, K, V, room for what is written, and the lists as they lie in memory."""
    visits = tiles_by_brute_force(problem, m, n)
    pointers = [0, *np.cumsum(visits.sum(axis=1))]
    lists = np.array([*pointers, *np.nonzero(visits)[1]], dtype=np.float64)
    return {**harness.attention_arrays(problem), "blocks": lists.reshape(1, 1, -1)}


def assert_right(arrays, problem):
    o, lse = reference.attention(arrays["Q"], arrays["K"], arrays["V"], problem)
    np.testing.assert_allclose(arrays["O"], o, rtol=1e-10, atol=1e-10)
    if arrays["lse"].any():
        np.testing.assert_allclose(arrays["lse"], lse, rtol=1e-10, atol=1e-10)


def loaded_bytes(ops, tensor: int) -> int:
    mine = ops[(ops["kind"] == LOAD) & (ops["tensor"] == tensor)]
    return int((mine["rows"].astype(np.int64) * mine["row_bytes"]).sum())


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    order=st.sampled_from(["query", "head"]),
    cuts=st.lists(st.integers(1, 30), max_size=3),
)
def test_computes_attention_in_blocks(harness, data, order, cuts):
    problem = data.draw(sparse_problems())
    sides = st.sampled_from(DIVISORS[problem.mask_block])
    m, n = data.draw(sides), data.draw(sides)
    launch = the_launch(problem, Schedule(tile=(m, n), order=order), GPU)
    arrays = sparse_arrays(harness, problem, m, n)
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays, problem)
    harness.assert_ranges(launch, computed, cuts)
    heads = problem.batch * problem.heads
    numbers, queries = arrays["blocks"].size, launch.blocks // heads
    assert launch.operands[5].size_bytes == 4 * numbers
    twice = queries - 1  # pointers where one list ends and the next begins
    assert loaded_bytes(np.concatenate(computed), 5) == 4 * heads * (numbers + twice)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    order=st.sampled_from(["query", "head"]),
    cuts=st.lists(st.integers(1, 5), max_size=2),
    chip=st.sampled_from([TPU, load_profile("tpu-v4")]),
)
def test_computes_attention_in_grid_steps(harness, data, order, cuts, chip):
    problem = data.draw(sparse_problems(sides=(128,), longest=200, longest_k=700))
    schedule = Schedule(tile=(data.draw(st.sampled_from(DIVISORS[128])), 128), order=order)
    launch = the_launch(problem, schedule, chip)
    arrays = sparse_arrays(harness, problem, *schedule.tile)
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays, problem)
    harness.assert_ranges(launch, computed, cuts)
    traffic = run_grid(launch, chip).traffic
    forms = forms_of(problem, schedule, chip)
    assert traffic.vmem_fill_bytes == forms["vmem_fill_bytes"]
    assert traffic.vmem_drain_bytes == forms["vmem_drain_bytes"]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_lists_pairs_and_compulsory_rows_are_those_of_the_mask(data):
    problem = data.draw(sparse_problems())
    sides = st.sampled_from(DIVISORS[problem.mask_block])
    m, n = data.draw(sides), data.draw(sides)
    lists = key_lists(problem, Schedule(tile=(m, n)))
    visits = tiles_by_brute_force(problem, m, n)
    rest = 0
    for row, begin, end, idle in zip(
        visits, lists.pointers[:-1], lists.pointers[1:], lists.rest, strict=True
    ):
        assert lists.indices[begin:end].tolist() == np.flatnonzero(row).tolist()
        rest = np.flatnonzero(row)[-1] if row.any() else rest
        assert idle == rest
    widths = np.minimum(n, problem.seqlen_k - np.arange(visits.shape[1]) * n)
    assert keys_listed(problem, lists, n) == (visits * widths).sum()
    pairs = reference.mask(problem)
    assert problem.keys_of_rows().tolist() == pairs.sum(axis=1).tolist()
    assert problem.pairs == pairs.sum()
    assert seen(problem) == (pairs.any(axis=1).sum(), pairs.any(axis=0).sum())
    touched = list_bytes(lists, 32)
    assert touched >= 4 * (lists.indices.size + 2 * lists.lengths.size)


#: case: what differs from the problem below, tile
TRACED = {
    "random": ({}, (4, 2)),
    "all": ({"density": 1.0}, (2, 4)),
    "nothing": ({"density": 0.0}, (4, 4)),
    "causal": ({"causal": True, "density": 0.7}, (4, 2)),
    "window": ({"window": 5, "density": 0.7}, (2, 2)),
    "rows without keys": ({"causal": True, "seqlen_k": 5, "density": 1.0}, (4, 4)),
    "long lists": ({"mask_block": 2, "seqlen": 3, "seqlen_k": 90, "density": 0.9}, (2, 1)),
}


@pytest.mark.parametrize("case", TRACED)
@pytest.mark.parametrize("order", ["query", "head"])
def test_reports_what_it_touches_on_a_gpu(trace, harness, case, order):
    differs, tile = TRACED[case]
    size = {"heads": 4, "kv_heads": 2, "seqlen": 11, "seqlen_k": 13, "head_dim": 4, "mask_block": 4}
    problem = BlockSparse(**{**size, **differs})
    schedule = Schedule(tile=tile, order=order)
    arrays = sparse_arrays(harness, problem, *tile)
    assert_right(trace("block-sparse", problem, schedule, "h200", arrays), problem)


@pytest.mark.parametrize("profile", ["tpu-v5e", "tpu-v4"])
@pytest.mark.parametrize("differs", [{}, {"causal": True}, {"density": 0.2, "pattern_seed": 3}])
def test_reports_what_it_touches_on_a_tpu(trace, harness, profile, differs):
    problem = BlockSparse(
        heads=2, kv_heads=1, seqlen=150, seqlen_k=300, head_dim=2, dtype="bf16", align="top-left",
        **{"density": 0.6, **differs},
    )  # fmt: skip
    arrays = sparse_arrays(harness, problem, 64, 128)
    arrays = trace("block-sparse", problem, Schedule(tile=(64, 128)), profile, arrays)
    assert_right(arrays, problem)


SHAPES = {
    "whole blocks": {},
    "causal": {"causal": True, "density": 0.6},
    "ragged": {"seqlen": 203, "seqlen_k": 331},
    "ragged causal": {"seqlen": 328, "seqlen_k": 200, "causal": True, "density": 0.8},
    "window": {"window": 70, "seqlen": 328, "seqlen_k": 328, "density": 1.0},
    "long lists": {"seqlen": 64, "seqlen_k": 9000, "density": 0.9},
    "nothing": {"density": 0.0},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spills", [0, 3])
def test_closed_forms_are_what_the_engine_counts(shape, spills):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 256, "seqlen_k": 256, "head_dim": 80}
    problem = BlockSparse(**{**size, "density": 0.5, **SHAPES[shape]})
    schedule = Schedule(tile=(64, 32), stages=2, warps=4, spills=spills)
    launch = the_launch(problem, schedule, GPU)
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    forms = forms_of(problem, schedule, GPU)
    assert counts.traffic.l1_fill_bytes == forms["l1_fill_bytes"]
    assert counts.traffic.l1_write_bytes == forms["l1_write_bytes"]
    assert launch.work.flops == forms["flops"]
    assert forms["flops"] == 4 * reference.mask(problem).sum() * 80 * 8
    for name in ("Q", "K", "V", "blocks"):
        assert counts.operands[name].dram_read_bytes >= counts.operands[name].unique_bytes


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(), causal=st.booleans(), window=st.sampled_from([0, 40]), m=st.sampled_from([4, 8])
)
def test_a_mask_that_hides_nothing_is_flash2(harness, data, causal, window, m):
    size = {"heads": 2, "seqlen": data.draw(st.integers(1, 70)), "seqlen_k": 60, "head_dim": 8}
    dense = Attention(**size, causal=causal, window=window)
    sparse = BlockSparse(**size, causal=causal, window=window, mask_block=16, density=1.0)
    schedule = Schedule(tile=(m, 16), stages=2, warps=4)
    one, other = sparse_arrays(harness, sparse, m, 16), harness.attention_arrays(dense)
    harness.compute(the_launch(sparse, schedule, GPU), one)
    harness.compute(the_launch(dense, schedule, GPU, DENSE), other)
    assert (one["O"] == other["O"]).all()
    assert (one["lse"] == other["lse"]).all()
    mine, theirs = forms_of(sparse, schedule, GPU), forms_of(dense, schedule, GPU, DENSE)
    lists = 2 * list_bytes(key_lists(sparse, schedule), 32)
    assert mine == {**theirs, "l1_fill_bytes": theirs["l1_fill_bytes"] + lists}


def test_a_mask_that_hides_all_reads_no_keys():
    problem = BlockSparse(heads=2, seqlen=512, density=0.0, dtype="bf16")
    launch = the_launch(problem, KERNEL.default_schedule(problem, GPU), GPU)
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    assert [counts.operands[name].l1_fill_bytes for name in ("K", "V")] == [0, 0]
    assert [counts.operands[name].unique_bytes for name in ("Q", "K", "V")] == [0, 0, 0]
    grid = run_grid(the_launch(problem, Schedule(tile=(128, 128)), TPU), TPU)
    assert grid.operands["K"].fetches == 2  # a window always points somewhere: once per head


@pytest.mark.parametrize("order", ["query", "head"])
def test_traffic_follows_the_blocks_that_are_seen(order):
    """Every further seen block costs the same bytes of K and V, whichever it is."""
    rng = np.random.default_rng(7)
    filled = []
    for share in (0, 10, 20, 40, 64):
        mask = np.zeros(64, dtype=bool)
        mask[rng.permutation(64)[:share]] = True
        blocks = tuple(tuple(row) for row in mask.reshape(8, 8).tolist())
        problem = BlockSparse(
            heads=2, seqlen=512, head_dim=64, mask_block=64, blocks=blocks, dtype="bf16"
        )
        schedule = Schedule(tile=(64, 32), stages=2, warps=4, order=order)
        launch = the_launch(problem, schedule, GPU)
        counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
        filled.append(counts.operands["K"].l1_fill_bytes + counts.operands["V"].l1_fill_bytes)
    assert filled == [share * 2 * (2 * 64 * 64 * 2) for share in (0, 10, 20, 40, 64)]


def big_bird(side: int) -> tuple[tuple[bool, ...], ...]:
    """Blocks of a window of three, a first row and column that see all, and one at random."""
    rng = np.random.default_rng(0)
    row, column = np.indices((side, side))
    mask = (abs(row - column) <= 1) | (row == 0) | (column == 0)
    mask[np.arange(side), rng.integers(0, side, side)] = True
    return tuple(tuple(line) for line in mask.tolist())


def test_an_explicit_mask(harness):
    problem = BlockSparse(heads=2, seqlen=96, head_dim=8, mask_block=8, blocks=big_bird(12))
    launch = the_launch(problem, Schedule(tile=(8, 4)), GPU)
    arrays = sparse_arrays(harness, problem, 8, 4)
    harness.compute(harness.exact(launch), arrays)
    assert_right(arrays, problem)
    assert problem.pairs == 64 * np.array(big_bird(12)).sum()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp8"])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_that_of_two_roundings(harness, dtype, causal):
    """A weight is rounded before it meets V, and O once; sums and the log-sum-exp are not."""
    problem = BlockSparse(
        heads=2, seqlen=64, head_dim=16, mask_block=16, density=0.6, dtype=dtype, causal=causal
    )
    arrays = sparse_arrays(harness, problem, 16, 8)
    for name in ("Q", "K", "V"):
        arrays[name] = rounded(arrays[name], dtype)
    harness.compute(the_launch(problem, Schedule(tile=(16, 8)), GPU), arrays)
    o, lse = reference.attention(arrays["Q"], arrays["K"], arrays["V"], problem)
    size, _ = reference.attention(arrays["Q"], arrays["K"], abs(arrays["V"]), problem)
    u, form = unit_roundoff(dtype), FORMATS[dtype]
    least = 2.0 ** (form.least - form.digits)  # of a number too small for full precision
    slack = least * (1 + abs(arrays["V"]).sum(axis=1, keepdims=True))
    error = abs(arrays["O"] - o)
    assert (error <= u * (1 + u) * size + u * abs(o) + slack).all()
    assert error.max() > u / 64  # it does round
    np.testing.assert_allclose(arrays["lse"], lse, rtol=1e-10)


@pytest.mark.parametrize("chip", ["h200", "a100-80gb", "tpu-v4", "tpu-v5e", "tpu-v6e"])
@pytest.mark.parametrize("mask_block", [128, 256, 384])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_schedules_fit(chip, mask_block, head_dim):
    profile = load_profile(chip)
    problem = BlockSparse(head_dim=head_dim, mask_block=mask_block, dtype="bf16")
    schedule = KERNEL.default_schedule(problem, profile)
    assert why_not(the_launch(problem, schedule, profile).footprint, profile) is None


def test_the_default_tile_divides_odd_blocks():
    problem = BlockSparse(mask_block=96)
    assert KERNEL.default_schedule(problem, GPU).tile == (32, 32)


def test_what_cannot_be_is_refused():
    problem = BlockSparse(mask_block=96)
    with pytest.raises(RequestError, match=r"tile 64x32 does not divide mask blocks of 96.*32x32"):
        KERNEL.launches(problem, Schedule(tile=(64, 32)), GPU)
    with pytest.raises(RequestError, match="multiple of 128 rows, not 96"):
        KERNEL.default_schedule(problem, TPU)
    with pytest.raises(RequestError, match="BlockSparse"):
        KERNEL.launches(Attention(), Schedule(tile=(64, 64)), GPU)
    with pytest.raises(RequestError, match="dtype of Q"):
        KERNEL.launches(replace(problem, kv_dtype="int8"), Schedule(tile=(32, 32)), GPU)
