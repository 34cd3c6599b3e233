"""The backward pass: right gradients, operations that are what it touches, counts by arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference
from iosim.kernels.flash2_bwd_forms import key_rows, query_rows
from iosim.kernels.reference_gradients import gradients, of_kv_heads
from iosim.kernels.rounding import FORMATS, rounded, unit_roundoff
from iosim.launch import why_not
from iosim.ops import ATOMIC, EXP, MATRIX, VECTOR
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile
from iosim.simulation import complete, simulate

KERNEL = load_kernel("flash2-bwd")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")
VARIANTS = ("atomics", "two-pass", "reread-dq")


def planned(problem, schedule, chip):
    return KERNEL.launches(problem, schedule, chip)


def forms_of(problem, schedule, chip):
    return {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, chip)}


def backward_arrays(harness, problem, peak=0.0, dtype=""):
    """Random Q, K, V, dO, what a forward pass leaves, and room for the results."""
    arrays = harness.attention_arrays(problem, peak)
    q, k, v = (arrays[name] for name in "QKV")
    do = np.random.default_rng(problem.seqlen).standard_normal(q.shape)
    if dtype:
        q, k, v, do = (rounded(x, dtype) for x in (q, k, v, do))
    o, lse = reference.attention(q, k, v, problem)
    logits = reference.scores(q, k, problem)
    top = logits.max(axis=-1)
    total = np.exp(logits - np.where(np.isfinite(top), top, 0.0)[..., None]).sum(axis=-1)
    return {
        "Q": q,
        "K": k,
        "V": v,
        "O": rounded(o, dtype) if dtype else o,
        "dO": do,
        "lse": lse[..., None],
        "l": total[..., None],
        "m": top[..., None],
        "dQ": np.zeros_like(q),
        "dK": np.full_like(k, np.nan),
        "dV": np.full_like(v, np.nan),
        "delta": np.full((*q.shape[:2], 1), np.nan),
        "dQ_accum": np.full_like(q, np.nan),
    }


def assert_right(arrays, problem):
    """dQ, dK and dV against the twin, as errors over the greatest gradient."""
    expected = gradients(*(arrays[name] for name in ("Q", "K", "V", "dO")), problem)
    for name, value in (("dQ", expected.dq), ("dK", expected.dk), ("dV", expected.dv)):
        most = max(1.0, np.abs(value).max())
        np.testing.assert_allclose(arrays[name], value, rtol=1e-10, atol=1e-10 * most, err_msg=name)


def compute_all(harness, launches, arrays):
    """The operations of every block of every launch, computed one after the other."""
    return [harness.compute(harness.exact(launch), arrays) for launch in launches]


def assert_counts_what_it_computes(harness, launch, computed, cuts):
    """The counting version gives the same operations, in whatever ranges they are asked for."""
    for block, ops in enumerate(computed):
        edges = sorted({cut % max(launch.steps, 1) for cut in cuts} - {0})
        assert harness.count(launch, block, edges).tobytes() == ops.tobytes()


def assert_work(launch, blocks):
    """`issued_*` are the sums over the operations."""
    ops = np.concatenate(blocks)
    amount = {
        kind: int((mine["m"].astype(np.int64) * mine["n"] * mine["k"]).sum())
        for kind in (MATRIX, EXP, VECTOR)
        for mine in [ops[ops["kind"] == kind]]
    }
    assert launch.work.issued_flops == 2 * amount[MATRIX]
    assert launch.work.issued_exps == amount[EXP]
    assert launch.work.issued_vector_ops == amount[VECTOR]
    assert launch.work.flops <= launch.work.issued_flops
    assert launch.work.exps <= launch.work.issued_exps


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    variant=st.sampled_from(VARIANTS),
    tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    order=st.sampled_from(["query", "head"]),
    stages=st.integers(1, 3),
    peak=st.sampled_from([0.0, 1e3]),
    cuts=st.lists(st.integers(1, 60), max_size=3),
)
def test_computes_gradients_in_blocks(harness, data, variant, tile, order, stages, peak, cuts):
    problem = data.draw(harness.attention_problems())
    schedule = Schedule(tile=tile, order=order, stages=stages, variant=variant)
    launches = planned(problem, schedule, GPU)
    arrays = backward_arrays(harness, problem, peak)
    computed = compute_all(harness, launches, arrays)
    assert_right(arrays, problem)
    for launch, blocks in zip(launches, computed, strict=True):
        assert_counts_what_it_computes(harness, launch, blocks, cuts)
        assert_work(launch, blocks)
    assert sum(launch.work.flops for launch in launches) == problem.matrix_flops(products=5)


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    tile=st.sampled_from([(16, 128), (32, 128), (16, 256), (64, 512)]),
    order=st.sampled_from(["query", "head"]),
    profile=st.sampled_from(["tpu-v5e", "tpu-v4"]),
    cuts=st.lists(st.integers(1, 9), max_size=2),
)
def test_computes_gradients_in_grid_steps(harness, data, tile, order, profile, cuts):
    problem = data.draw(harness.attention_problems(longest=70, longest_k=400))
    chip = load_profile(profile)
    schedule = Schedule(tile=tile, order=order)
    launches = planned(problem, schedule, chip)
    assert [launch.name for launch in launches] == ["delta", "dkdv", "dq"]
    arrays = backward_arrays(harness, problem)
    computed = compute_all(harness, launches, arrays)
    assert_right(arrays, problem)
    moved = []
    for launch, blocks in zip(launches, computed, strict=True):
        assert_counts_what_it_computes(harness, launch, blocks, cuts)
        assert_work(launch, blocks)
        moved.append(run_grid(launch, chip).traffic)
    forms = forms_of(problem, schedule, chip)
    assert sum(t.vmem_fill_bytes for t in moved) == forms["vmem_fill_bytes"]
    assert sum(t.vmem_drain_bytes for t in moved) == forms["vmem_drain_bytes"]
