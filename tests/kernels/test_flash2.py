"""FlashAttention-2: right numbers, operations that are what it touches, counts by arithmetic."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference
from iosim.kernels.attention import parameters
from iosim.kernels.masks import key_spans, key_tiles, keys_loaded, query_tiles, visited
from iosim.launch import why_not
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile

KERNEL = load_kernel("flash2")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")


def the_launch(problem, schedule, chip):
    (launch,) = KERNEL.launches(problem, schedule, chip)
    return launch


def forms_of(problem, schedule, chip):
    return {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, chip)}


def assert_right(arrays, problem):
    """O, and where it was written the log-sum-exp, against the twin."""
    o, lse = reference.attention(arrays["Q"], arrays["K"], arrays["V"], problem)
    np.testing.assert_allclose(arrays["O"], o, rtol=1e-10, atol=1e-10)
    if arrays["lse"].any():
        np.testing.assert_allclose(arrays["lse"], lse, rtol=1e-10, atol=1e-10)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    order=st.sampled_from(["query", "head"]),
    stages=st.integers(1, 3),
    peak=st.sampled_from([0.0, 1e4]),
    cuts=st.lists(st.integers(1, 30), max_size=3),
)
def test_computes_attention_in_blocks(harness, data, tile, order, stages, peak, cuts):
    problem = data.draw(harness.attention_problems())
    launch = the_launch(problem, Schedule(tile=tile, order=order, stages=stages), GPU)
    arrays = harness.attention_arrays(problem, peak)
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays, problem)
    harness.assert_ranges(launch, computed, cuts)
    harness.assert_work(launch, computed)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    tile=st.sampled_from([(16, 128), (32, 128), (16, 256), (64, 512)]),
    order=st.sampled_from(["query", "head"]),
    cuts=st.lists(st.integers(1, 5), max_size=2),
)
def test_computes_attention_in_grid_steps(harness, data, tile, order, cuts):
    problem = data.draw(harness.attention_problems(longest=70, longest_k=600))
    launch = the_launch(problem, Schedule(tile=tile, order=order), TPU)
    arrays = harness.attention_arrays(problem)
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays, problem)
    harness.assert_ranges(launch, computed, cuts)
    harness.assert_work(launch, computed)
    counts = run_grid(launch, TPU)
    forms = forms_of(problem, Schedule(tile=tile, order=order), TPU)
    assert counts.traffic.vmem_fill_bytes == forms["vmem_fill_bytes"]
    assert counts.traffic.vmem_drain_bytes == forms["vmem_drain_bytes"]
    for name in ("Q", "K", "V"):
        assert counts.operands[name].vmem_fill_bytes >= counts.operands[name].unique_bytes


TRACED = {
    "plain": ({}, (4, 3)),
    "causal": ({"causal": True}, (4, 3)),
    "top-left": ({"causal": True, "align": "top-left"}, (3, 4)),
    "rows without keys": ({"causal": True, "seqlen_k": 5}, (4, 3)),
    "window": ({"window": 3}, (2, 3)),
    "causal window": ({"causal": True, "window": 2, "align": "top-left"}, (5, 2)),
    "one row": ({"seqlen": 1, "seqlen_k": 9, "causal": True}, (8, 4)),
    "tiles beyond the problem": ({}, (32, 64)),
}


@pytest.mark.parametrize("case", TRACED)
@pytest.mark.parametrize("order", ["query", "head"])
def test_reports_what_it_touches_on_a_gpu(trace, harness, case, order):
    mask, tile = TRACED[case]
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 11, "seqlen_k": 9, "head_dim": 4}
    problem = Attention(**{**size, **mask})
    arrays = trace(
        "flash2",
        problem,
        Schedule(tile=tile, order=order),
        "h200",
        harness.attention_arrays(problem),
    )
    assert_right(arrays, problem)


@pytest.mark.parametrize("profile", ["tpu-v5e", "tpu-v4"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 40}])
def test_reports_what_it_touches_on_a_tpu(trace, harness, profile, mask):
    problem = Attention(
        heads=2, kv_heads=1, seqlen=40, seqlen_k=300, head_dim=3, dtype="bf16", align="top-left",
        **mask,
    )  # fmt: skip
    arrays = trace(
        "flash2", problem, Schedule(tile=(16, 128)), profile, harness.attention_arrays(problem)
    )
    assert_right(arrays, problem)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), m=st.integers(1, 30), n=st.integers(1, 30))
def test_tiles_visited_are_those_with_a_visible_pair(harness, data, m, n):
    problem = data.draw(harness.attention_problems())
    first, end = key_spans(problem, m, n)
    params = parameters(problem, Schedule(tile=(m, n)), GPU, {})
    seen = reference.mask(problem)
    rows, keys = range(0, problem.seqlen, m), range(0, problem.seqlen_k, n)
    pairs = np.array([[seen[r : r + m, c : c + n].any() for c in keys] for r in rows])
    for i, row0 in enumerate(rows):
        expected = np.flatnonzero(pairs[i])
        assert list(range(first[i], end[i])) == expected.tolist()
        assert key_tiles(row0, min(m, problem.seqlen - row0), params) == (first[i], end[i])
    for j, key0 in enumerate(keys):
        low, high = query_tiles(key0, min(n, problem.seqlen_k - key0), params)
        assert list(range(low, high)) == np.flatnonzero(pairs[:, j]).tolist()
    assert visited(problem, Schedule(tile=(m, n))) == pairs.sum()
    widths = np.array([min(n, problem.seqlen_k - c) for c in keys])
    assert keys_loaded(problem, Schedule(tile=(m, n))) == (pairs * widths).sum()


def test_counting_a_million_rows_is_quick():
    problem = Attention(seqlen=1 << 20, causal=True, window=4096)
    schedule = Schedule(tile=(1, 64))
    start = time.perf_counter()
    assert visited(problem, schedule) > 0
    assert time.perf_counter() - start < 0.5  # about 0.03 s where nothing else runs


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
@pytest.mark.parametrize("head_dim", [64, 80])
def test_closed_forms_are_what_the_engine_counts(shape, head_dim):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 256, "seqlen_k": 256}
    problem = Attention(**{**size, **SHAPES[shape]}, head_dim=head_dim)
    schedule = Schedule(tile=(64, 48), stages=2, warps=4)
    launch = the_launch(problem, schedule, GPU)
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    forms = forms_of(problem, schedule, GPU)
    assert counts.traffic.l1_fill_bytes == forms["l1_fill_bytes"]
    assert counts.traffic.l1_write_bytes == forms["l1_write_bytes"]
    assert launch.work.flops == forms["flops"] == problem.matrix_flops()
    for name in ("Q", "K", "V"):
        assert counts.operands[name].dram_read_bytes >= counts.operands[name].unique_bytes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flops_are_those_of_the_unmasked_pairs(harness, data):
    problem = data.draw(harness.attention_problems())
    pairs = int(reference.mask(problem).sum())
    flops = forms_of(problem, Schedule(tile=(4, 4)), GPU)["flops"]
    assert flops == 4 * pairs * problem.head_dim * problem.batch * problem.heads


@pytest.mark.parametrize(
    ("shape", "rows", "keys"),
    [
        ({"seqlen": 4, "seqlen_k": 100, "causal": True, "align": "top-left"}, 4, 4),
        ({"seqlen": 1, "seqlen_k": 100, "causal": True, "window": 10}, 1, 10),
        ({"seqlen": 100, "seqlen_k": 40, "causal": True}, 40, 40),
        ({"seqlen": 100, "seqlen_k": 100, "causal": True}, 100, 100),
    ],
)
def test_only_what_the_mask_lets_see_is_compulsory(shape, rows, keys):
    problem = Attention(heads=2, head_dim=64, **shape)
    operands = {o.name: o for o in the_launch(problem, Schedule(tile=(64, 64)), GPU).operands}
    assert operands["Q"].unique_bytes == 2 * rows * 128
    assert operands["K"].unique_bytes == operands["V"].unique_bytes == 2 * keys * 128
    assert operands["O"].unique_bytes == operands["O"].size_bytes


# (head_dim, tile, stages, warps, causal): shared memory without the reserve, registers; Triton 3.6
COMPILED = {
    (64, (64, 32), 2, 4, False): (24576, 93),
    (64, (64, 64), 2, 4, False): (40960, 112),
    (64, (64, 128), 2, 4, False): (73728, 155),
    (64, (128, 32), 2, 4, False): (32768, 152),
    (64, (128, 64), 2, 4, False): (49152, 202),
    (64, (128, 64), 3, 4, False): (65536, 202),
    (64, (128, 64), 2, 4, True): (49152, 225),
    (64, (128, 128), 2, 4, False): (81920, 229),
    (128, (64, 32), 2, 4, False): (49152, 124),
    (128, (64, 64), 2, 4, False): (81920, 150),
    (128, (128, 64), 2, 8, False): (98304, 149),
    (128, (128, 64), 2, 8, True): (98304, 160),
    (128, (128, 128), 2, 8, False): (163840, 198),
    (64, (32, 32), 2, 4, False): (None, 72),
    (64, (32, 64), 2, 4, False): (None, 84),
    (128, (32, 32), 2, 4, False): (None, 98),
    (128, (32, 64), 2, 4, False): (None, 127),
}


@pytest.mark.parametrize("key", COMPILED, ids=str)
def test_footprint_is_near_what_the_compiler_takes(key):
    head_dim, tile, stages, warps, causal = key
    shared, registers = COMPILED[key]
    problem = Attention(head_dim=head_dim, causal=causal)
    footprint = the_launch(problem, Schedule(tile=tile, stages=stages, warps=warps), GPU).footprint
    if shared is not None:  # below 64 rows the compiler keeps one stage fewer
        assert footprint.shared_bytes == shared
    assert footprint.registers == pytest.approx(registers, rel=0.12)


# chip, causal, block_q, block_k_major, block_k: scoped VMEM bytes; libtpu 0.0.42.1, d 128, bf16
SCOPED = [
    ("tpu-v5e", False, 128, 128, 128, 458752),
    ("tpu-v5e", False, 256, 512, 256, 1789952),
    ("tpu-v5e", False, 512, 512, 512, 2875392),
    ("tpu-v5e", False, 512, 1024, 512, 3801088),
    ("tpu-v5e", False, 1024, 1024, 1024, 8130560),
    ("tpu-v5e", True, 512, 512, 512, 2744320),
    ("tpu-v5e", True, 512, 1024, 512, 4390912),
    ("tpu-v5e", True, 1024, 1024, 1024, 8101888),
    ("tpu-v6e", False, 256, 512, 256, 1777664),
    ("tpu-v6e", True, 256, 512, 256, 1818624),
    ("tpu-v6e", True, 1024, 1024, 1024, 8200192),
    ("tpu-v4", False, 512, 512, 512, 2940928),
    ("tpu-v5e", False, 128, 256, 256, 589824),
    ("tpu-v5e", False, 128, 512, 128, 1155072),
    ("tpu-v5e", False, 256, 128, 128, 966656),
    ("tpu-v5e", False, 2048, 1024, 1024, 15638528),
]


@pytest.mark.parametrize("row", SCOPED, ids=str)
def test_vmem_is_near_what_the_compiler_takes(row):
    profile, causal, q, k_major, k, vmem_bytes = row
    chip = load_profile(profile)
    problem = Attention(heads=8, head_dim=128, causal=causal, align="top-left", dtype="bf16")
    footprint = the_launch(problem, Schedule(tile=(q, k_major, k)), chip).footprint
    assert footprint.vmem_bytes == pytest.approx(vmem_bytes, rel=0.2)
    assert why_not(footprint, chip) is None


@pytest.mark.parametrize("side", [2048, 4096])
def test_windows_that_the_compiler_refuses(side):
    problem = Attention(heads=2, seqlen=8192, head_dim=128, dtype="bf16")
    footprint = the_launch(problem, Schedule(tile=(side, side, 512)), TPU).footprint
    assert "scoped limit" in why_not(footprint, TPU)


# heads, N, Nk, causal, block_q, block_k_major: bytes that the compiled program's DMAs move
DMA = [
    (4, 2048, 2048, False, 128, 128, 69206016),
    (4, 2048, 2048, False, 512, 1024, 18874368),
    (4, 2048, 2048, True, 128, 128, 37486592),
    (4, 2048, 2048, True, 256, 512, 20971520),
    (4, 2048, 2048, True, 512, 1024, 10485760),
    (4, 2048, 2048, True, 1024, 1024, 6291456),
    (8, 4096, 4096, True, 512, 512, 81788928),
    (8, 4096, 4096, True, 512, 1024, 83886080),
    (4, 2048, 8192, False, 256, 512, 136314880),
]


@pytest.mark.parametrize("row", DMA, ids=str)
def test_windows_move_what_the_compiler_s_program_moves(row):
    heads, seqlen, seqlen_k, causal, q, k_major, read_bytes = row
    problem = Attention(
        heads=heads, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=128, causal=causal,
        align="top-left", dtype="bf16",
    )  # fmt: skip
    schedule = Schedule(tile=(q, k_major))
    assert forms_of(problem, schedule, TPU)["vmem_fill_bytes"] == read_bytes
    traffic = run_grid(the_launch(problem, schedule, TPU), TPU).traffic
    assert traffic.dram_read_bytes == read_bytes
    assert traffic.dram_write_bytes == heads * seqlen * 256


@pytest.mark.parametrize(
    ("tile", "chip"),
    [((64,), GPU), ((100, 128), TPU), ((128, 100), TPU), ((128, 512, 200), TPU)],
    ids=str,
)
def test_tiles_that_cannot_be(tile, chip):
    with pytest.raises(RequestError, match="tile"):
        KERNEL.launches(Attention(dtype="bf16"), Schedule(tile=tile), chip)


@pytest.mark.parametrize("chip", [GPU, TPU], ids=["gpu", "tpu"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("seqlen", [1, 100, 8192])
def test_default_schedules_fit(chip, head_dim, seqlen):
    problem = Attention(seqlen=seqlen, seqlen_k=8192, head_dim=head_dim, dtype="bf16")
    schedule = KERNEL.default_schedule(problem, chip)
    assert why_not(the_launch(problem, schedule, chip).footprint, chip) is None
