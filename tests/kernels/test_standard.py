"""Standard attention: three launches give the right numbers, and report what they touch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.kernels import load_kernel, reference
from iosim.launch import why_not
from iosim.ops import LOAD, STORE
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile

KERNEL = load_kernel("standard")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")


def forms_of(problem, schedule, chip):
    return {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, chip)}


def run(harness, problem, schedule, chip, arrays, cuts=()):
    """Computes all launches; the operations of each, which the counting version gives too."""
    every = []
    for launch in KERNEL.launches(problem, schedule, chip):
        computed = harness.compute(harness.exact(launch), arrays)
        harness.assert_ranges(launch, computed, cuts)
        harness.assert_work(launch, computed)
        every.append(np.concatenate(computed))
    return every


def assert_right(arrays, problem):
    """S, P and O against the twin; S is -inf where masked, a row without keys of P is 0."""
    logits = reference.scores(arrays["Q"], arrays["K"], problem)
    np.testing.assert_allclose(arrays["S"], logits, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(arrays["P"], reference.softmax(logits)[0], rtol=1e-10, atol=1e-10)
    o, _ = reference.attention(arrays["Q"], arrays["K"], arrays["V"], problem)
    np.testing.assert_allclose(arrays["O"], o, rtol=1e-10, atol=1e-10)


@settings(max_examples=100, deadline=None)
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
    arrays = harness.attention_arrays(problem, peak)
    run(harness, problem, Schedule(tile=tile, order=order, stages=stages), GPU, arrays, cuts)
    assert_right(arrays, problem)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    tile=st.sampled_from([(16, 128), (32, 128), (16, 256), (64, 512)]),
    order=st.sampled_from(["query", "head"]),
)
def test_computes_attention_in_grid_steps(harness, data, tile, order):
    problem = data.draw(harness.attention_problems(longest=70, longest_k=600))
    schedule = Schedule(tile=tile, order=order)
    arrays = harness.attention_arrays(problem)
    run(harness, problem, schedule, TPU, arrays)
    assert_right(arrays, problem)
    counts = [run_grid(launch, TPU) for launch in KERNEL.launches(problem, schedule, TPU)]
    forms = forms_of(problem, schedule, TPU)
    filled = sum(count.traffic.vmem_fill_bytes for count in counts)
    assert forms.get("vmem_fill_bytes", filled) == filled
    assert ("vmem_fill_bytes" in forms) == (problem.seqlen_k > tile[1])
    assert sum(count.traffic.vmem_drain_bytes for count in counts) == forms["vmem_drain_bytes"]


@pytest.mark.parametrize("mask", [{}, {"causal": True, "seqlen_k": 5}, {"window": 3}], ids=str)
@pytest.mark.parametrize("tile", [(4, 3), (32, 64)], ids=str)
def test_reports_what_it_touches_on_a_gpu(trace, harness, mask, tile):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 11, "seqlen_k": 9, "head_dim": 4}
    problem = Attention(**{**size, **mask})
    arrays = trace(
        "standard", problem, Schedule(tile=tile), "h200", harness.attention_arrays(problem)
    )
    assert_right(arrays, problem)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
def test_reports_what_it_touches_on_a_tpu(trace, harness, mask):
    problem = Attention(
        heads=2, kv_heads=1, seqlen=20, seqlen_k=200, head_dim=3, dtype="bf16", **mask
    )
    arrays = trace(
        "standard", problem, Schedule(tile=(16, 128)), "tpu-v5e", harness.attention_arrays(problem)
    )
    assert_right(arrays, problem)


SHAPES = {
    "whole tiles": {},
    "causal": {"causal": True},
    "ragged": {"seqlen": 200, "seqlen_k": 328},
    "rows across sectors": {"seqlen": 72, "seqlen_k": 106, "heads": 4},
    "a block per row": {"heads": 1, "kv_heads": 1, "seqlen": 40, "seqlen_k": 2072},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_closed_forms_are_what_the_engine_counts(shape):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 256, "seqlen_k": 256, "head_dim": 64}
    problem = Attention(**{**size, **SHAPES[shape]})
    schedule = Schedule(tile=(64, 48), stages=2, warps=4)
    memory = CachedMemory(GPU)
    counts = [
        run_blocks(launch, GPU, memory, clock_hz=1.7e9, seed=0, soil=False)
        for launch in KERNEL.launches(problem, schedule, GPU)
    ]
    forms = forms_of(problem, schedule, GPU)
    assert sum(count.traffic.l1_fill_bytes for count in counts) == forms["l1_fill_bytes"]
    assert sum(count.traffic.l1_write_bytes for count in counts) == forms["l1_write_bytes"]


def test_scores_move_four_times(harness):
    """S and P: written, read, written, read. The mask changes nothing of it."""
    square = 4 * 128 * 128 * 2
    for causal in (False, True):
        problem = Attention(batch=2, heads=2, seqlen=128, head_dim=64, causal=causal)
        launches = KERNEL.launches(problem, Schedule(tile=(64, 64), stages=2), GPU)
        moved = {}
        for launch in launches:
            for block in range(launch.blocks):
                for op in harness.count(launch, block):
                    if op["kind"] in (LOAD, STORE):
                        key = (launch.operands[op["tensor"]].name, int(op["kind"]))
                        moved[key] = moved.get(key, 0) + int(op["useful_bytes"])
        for name in ("S", "P"):
            assert moved[name, LOAD] == moved[name, STORE] == square
        scratch = [o for launch in launches for o in launch.operands if o.role == "scratch"]
        assert {o.unique_bytes for o in scratch} == {0}


def test_work_is_asked_for_and_issued():
    problem = Attention(batch=2, heads=3, seqlen=256, head_dim=64, causal=True)
    works = [launch.work for launch in KERNEL.launches(problem, Schedule(tile=(64, 64)), GPU)]
    assert sum(work.flops for work in works) == problem.matrix_flops()
    assert sum(work.exps for work in works) == problem.exps
    assert sum(work.issued_flops for work in works) == 4 * 256 * 256 * 64 * 6
    assert sum(work.issued_exps for work in works) == 256 * 256 * 6


# keys of a row: blocks of the softmax of 16 · 1024 rows, threads, registers; PyTorch 2.11
SOFTMAX = [(1024, 4096, 128, 48), (2048, 4096, 128, 80), (4096, 16384, 1024, 30)]


@pytest.mark.parametrize("row", SOFTMAX, ids=str)
def test_softmax_is_cut_as_in_pytorch(row):
    keys, blocks, threads, registers = row
    problem = Attention(heads=16, seqlen=1024, seqlen_k=keys, head_dim=64)
    _, softmax, _ = KERNEL.launches(problem, Schedule(tile=(64, 64)), GPU)
    assert (softmax.blocks, softmax.footprint.threads) == (blocks, threads)
    assert softmax.footprint.registers == pytest.approx(registers, rel=0.1)


def test_a_row_that_no_block_can_hold_is_read_three_times(harness):
    problem = Attention(heads=1, seqlen=2, seqlen_k=120_000, head_dim=16)
    _, softmax, _ = KERNEL.launches(problem, Schedule(tile=(64, 64)), GPU)
    ops = harness.count(softmax, 0)
    assert [int(kind) for kind in ops["kind"]].count(LOAD) == 3
    shorter = Attention(heads=1, seqlen=2, seqlen_k=100_000, head_dim=16)
    _, softmax, _ = KERNEL.launches(shorter, Schedule(tile=(64, 64)), GPU)
    assert softmax.footprint.shared_bytes == 200_000
    assert [int(kind) for kind in harness.count(softmax, 0)["kind"]].count(LOAD) == 1


@pytest.mark.parametrize("chip", [GPU, TPU], ids=["gpu", "tpu"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("seqlen", [1, 100, 8192])
def test_default_schedules_fit(chip, head_dim, seqlen):
    problem = Attention(seqlen=seqlen, seqlen_k=8192, head_dim=head_dim, dtype="bf16")
    schedule = KERNEL.default_schedule(problem, chip)
    for launch in KERNEL.launches(problem, schedule, chip):
        assert why_not(launch.footprint, chip) is None
