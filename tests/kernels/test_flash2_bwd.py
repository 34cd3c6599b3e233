"""The backward pass: right gradients, operations that are what it touches, counts by arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.kernels import load_kernel, reference
from iosim.kernels.masks import query_spans
from iosim.kernels.reference_gradients import gradients, of_kv_heads
from iosim.kernels.rounding import FORMATS, rounded, unit_roundoff
from iosim.ops import ATOMIC
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile

KERNEL = load_kernel("flash2-bwd")
GPU = load_profile("h200")
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
        harness.assert_ranges(launch, blocks, cuts)
        harness.assert_work(launch, blocks)
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
        harness.assert_ranges(launch, blocks, cuts)
        harness.assert_work(launch, blocks)
        moved.append(run_grid(launch, chip).traffic)
    forms = forms_of(problem, schedule, chip)
    assert sum(t.vmem_fill_bytes for t in moved) == forms["vmem_fill_bytes"]
    assert sum(t.vmem_drain_bytes for t in moved) == forms["vmem_drain_bytes"]


TRACED = {
    "plain": ({}, (4, 3)),
    "causal": ({"causal": True}, (4, 3)),
    "top-left": ({"causal": True, "align": "top-left"}, (3, 4)),
    "keys without rows": ({"causal": True, "align": "top-left", "seqlen_k": 19}, (4, 3)),
    "rows without keys": ({"causal": True, "seqlen_k": 5}, (4, 3)),
    "window": ({"window": 3}, (2, 3)),
    "causal window": ({"causal": True, "window": 2, "align": "top-left"}, (5, 2)),
    "one row": ({"seqlen": 1, "seqlen_k": 9, "causal": True}, (8, 4)),
    "tiles beyond the problem": ({}, (32, 64)),
}


@pytest.mark.parametrize("case", TRACED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_reports_what_it_touches_on_a_gpu(trace, harness, case, variant):
    mask, tile = TRACED[case]
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 11, "seqlen_k": 9, "head_dim": 4}
    problem = Attention(**{**size, **mask})
    schedule = Schedule(tile=tile, order="head", variant=variant)
    arrays = backward_arrays(harness, problem)
    assert_right(trace("flash2-bwd", problem, schedule, "h200", arrays), problem)


@pytest.mark.parametrize("profile", ["tpu-v5e", "tpu-v4"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 40}])
def test_reports_what_it_touches_on_a_tpu(trace, harness, profile, mask):
    problem = Attention(
        heads=2, kv_heads=1, seqlen=40, seqlen_k=300, head_dim=3, dtype="bf16", align="top-left",
        **mask,
    )  # fmt: skip
    arrays = backward_arrays(harness, problem)
    arrays = trace("flash2-bwd", problem, Schedule(tile=(16, 128)), profile, arrays)
    assert_right(arrays, problem)


SHAPES = {
    "whole tiles": {},
    "causal": {"causal": True},
    "ragged": {"seqlen": 200, "seqlen_k": 328},
    "ragged causal": {"seqlen": 328, "seqlen_k": 200, "causal": True},
    "ragged top-left": {"seqlen": 200, "seqlen_k": 328, "causal": True, "align": "top-left"},
    "window": {"window": 70, "seqlen": 328, "seqlen_k": 328},
    "causal window": {"window": 100, "causal": True, "seqlen": 328, "seqlen_k": 200},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("head_dim", "spills", "stages"), [(64, 0, 2), (80, 3, 1)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_closed_forms_are_what_the_engine_counts(shape, head_dim, spills, stages, variant):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 256, "seqlen_k": 256}
    problem = Attention(**{**size, **SHAPES[shape]}, head_dim=head_dim)
    schedule = Schedule(tile=(64, 48), stages=stages, warps=4, spills=spills, variant=variant)
    memory = CachedMemory(GPU)
    launches = planned(problem, schedule, GPU)
    counts = [
        run_blocks(launch, GPU, memory, clock_hz=1.7e9, seed=0, soil=False) for launch in launches
    ]
    forms = forms_of(problem, schedule, GPU)
    assert sum(c.traffic.l1_fill_bytes for c in counts) == forms["l1_fill_bytes"]
    assert sum(c.traffic.l1_write_bytes for c in counts) == forms["l1_write_bytes"]
    assert forms["flops"] == problem.matrix_flops(products=5)
    moved = {}
    for run in counts:
        for name, row in run.operands.items():
            moved[name] = moved.get(name, 0) + row.dram_read_bytes
            assert moved[name] >= row.unique_bytes or name in ("dQ", "dK", "dV")


@pytest.mark.parametrize("variant", ["atomics", "two-pass"])
def test_a_visit_takes_five_or_seven_products(variant):
    problem = Attention(heads=4, kv_heads=2, seqlen=256, head_dim=64)
    launches = planned(problem, Schedule(tile=(64, 64), variant=variant), GPU)
    issued = sum(launch.work.issued_flops for launch in launches)
    assert issued == problem.matrix_flops(products=5 if variant == "atomics" else 7)
    assert sum(launch.work.flops for launch in launches) == problem.matrix_flops(products=5)


def test_additions_are_reported_once_and_as_additions(harness):
    problem = Attention(heads=2, kv_heads=1, seqlen=64, head_dim=16, causal=True)
    launches = planned(problem, Schedule(tile=(16, 16), stages=1), GPU)
    assert [launch.name for launch in launches] == ["delta", "dkdv", "convert"]
    every = [np.concatenate([harness.count(run, b) for b in range(run.blocks)]) for run in launches]
    atomics = [ops[ops["kind"] == ATOMIC] for ops in every]
    assert [len(ops) > 0 for ops in atomics] == [False, True, False]
    added = int((atomics[1]["rows"].astype(np.int64) * atomics[1]["row_bytes"]).sum())
    assert added == 2 * (4 + 3 + 2 + 1) * 16 * 16 * 4


@pytest.mark.parametrize(
    ("read", "written", "moved", "message"),
    [
        ({0, 1}, {0, 1}, False, ""),
        ({0}, {0, 1}, False, "added to but not read"),
        ({0, 1}, {0}, False, "added to but not written"),
        ({0, 1, 2}, {0, 1}, False, "read but not reported"),
        ({0, 1}, {0, 1}, True, "moved besides"),
    ],
)
def test_the_harness_knows_additions(harness, read, written, moved, message):
    problem = Attention(heads=1, seqlen=16, head_dim=16)
    (_, dkdv, _) = planned(problem, Schedule(tile=(16, 16)), GPU)
    operand = dkdv.operands[8]
    tracked = harness.Tracked(np.zeros((1, 16, 16)))
    tracked.read, tracked.written = set(read), set(written)
    ops = np.zeros(1 + moved, dtype=harness.OP_DTYPE)
    ops["tensor"], ops["address"], ops["rows"], ops["row_bytes"] = 8, operand.address, 1, 8
    ops["kind"][0] = ATOMIC
    if not message:
        harness.check_operand(8, operand, tracked, ops, GPU, 4)
        return
    with pytest.raises(AssertionError, match=message):
        harness.check_operand(8, operand, tracked, ops, GPU, 4)


def rounding_errors(arrays, problem, dtype, visits):
    """Greatest errors of dQ, dK and dV when P, dS, O and the results are rounded to `dtype`.

    Rounding x errs by u |x| + e at most, e being half of the least number. O errs by that and takes
    delta = rowsum(dO ∘ O) with it; P and dS err once more where they are rounded, and so do sums of
    their products. A dQ that is rewritten `visits` times errs at each, by its greatest partial sum.
    """
    u, e = unit_roundoff(dtype), 2.0 ** (FORMATS[dtype].least - FORMATS[dtype].digits)
    q, k, do = (np.abs(arrays[name]) for name in ("Q", "K", "dO"))
    true = gradients(*(arrays[name] for name in ("Q", "K", "V", "dO")), problem)
    shared = np.arange(q.shape[0]) // problem.group
    scale = 1 / np.sqrt(problem.head_dim)
    o, _ = reference.attention(*(arrays[name] for name in "QKV"), problem)
    delta = (do * (u * np.abs(o) + e)).sum(axis=-1)[..., None]
    seen = reference.mask(problem)
    p = np.where(seen, u * true.p + e, 0)
    ds = np.where(seen, true.p * delta + u * (np.abs(true.ds) + true.p * delta) + e, 0)

    def stored(value, error):
        return (error + u * (np.abs(value) + error) + e) * (1 + 1e-9) + 1e-12

    dq = scale * np.einsum("hnm,hmd->hnd", ds, k[shared])
    most = scale * np.einsum("hnm,hmd->hnd", np.abs(true.ds) + ds, k[shared])
    dk = scale * of_kv_heads(np.einsum("hnm,hnd->hmd", ds, q), problem)
    dv = of_kv_heads(np.einsum("hnm,hnd->hmd", p, do), problem)
    if visits:
        dq = (1 + u) ** visits * (dq + visits * (u * most + e)) + 1e-12
    else:
        dq = stored(true.dq, dq)
    return {"dQ": dq, "dK": stored(true.dk, dk), "dV": stored(true.dv, dv)}, true


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    variant=st.sampled_from(VARIANTS),
    dtype=st.sampled_from(["fp16", "bf16"]),
    tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    peak=st.sampled_from([0.0, 20.0]),
)
def test_rounding_errs_no_more_than_the_dtype(harness, data, variant, dtype, tile, peak):
    problem = data.draw(harness.attention_problems())
    problem = Attention(**{**vars(problem), "dtype": dtype, "kv_dtype": ""})
    arrays = backward_arrays(harness, problem, peak, dtype)
    for launch in planned(problem, Schedule(tile=tile, variant=variant), GPU):
        harness.compute(launch, arrays)
    visits = -(-problem.seqlen_k // tile[1]) if variant == "reread-dq" else 0
    bounds, true = rounding_errors(arrays, problem, dtype, visits)
    for name, value in (("dQ", true.dq), ("dK", true.dk), ("dV", true.dv)):
        assert (np.abs(arrays[name] - value) <= bounds[name]).all(), name
        np.testing.assert_array_equal(arrays[name], rounded(arrays[name], dtype))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("variant", ["atomics", "two-pass"])
def test_p_and_ds_are_rounded_and_nothing_else_before_the_results(harness, dtype, variant):
    problem = Attention(heads=4, kv_heads=2, seqlen=20, head_dim=8, causal=True, dtype=dtype)
    arrays = backward_arrays(harness, problem, dtype=dtype)
    for launch in planned(problem, Schedule(tile=(8, 7), variant=variant), GPU):
        harness.compute(launch, arrays)
    q, k, v, do, o = (arrays[name] for name in ("Q", "K", "V", "dO", "O"))
    shared, scale = np.arange(4) // 2, 1 / np.sqrt(8)
    p = np.exp(reference.scores(q, k, problem) - arrays["lse"])
    delta = (do * o).sum(axis=-1)[..., None]
    ds = rounded(p * (np.einsum("hnd,hmd->hnm", do, v[shared]) - delta), dtype)
    dv = np.einsum("hnm,hnd->hmd", rounded(p, dtype), do)
    dk = scale * of_kv_heads(np.einsum("hnm,hnd->hmd", ds, q), problem)
    dq = scale * np.einsum("hnm,hmd->hnd", ds, k[shared])
    for name, value in (("dQ", dq), ("dK", dk), ("dV", of_kv_heads(dv, problem))):
        np.testing.assert_array_equal(arrays[name], rounded(value, dtype), err_msg=name)


WALKS = {  # masks that skip steps at the start, at the end and at both of a walk over windows
    "causal": {"causal": True},
    "causal, top-left, more keys": {"causal": True, "align": "top-left", "seqlen_k": 900},
    "causal, fewer keys": {"causal": True, "seqlen_k": 300},
    "window": {"window": 150, "seqlen_k": 700},
    "causal window": {"causal": True, "window": 200, "seqlen": 700},
    "rows without keys at the end": {"window": 100, "align": "top-left", "seqlen": 800},
    "nothing skipped": {"seqlen": 70, "seqlen_k": 130},
}


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("order", ["query", "head"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("profile", ["tpu-v5e", "tpu-v5p"])
def test_closed_forms_are_what_a_grid_moves(walk, order, kv_heads, profile):
    chip = load_profile(profile)  # the second has two cores, each with windows of its own
    size = {"heads": 4, "kv_heads": kv_heads, "seqlen": 500, "seqlen_k": 500, "head_dim": 64}
    problem = Attention(**{**size, **WALKS[walk]}, dtype="bf16")
    schedule = Schedule(tile=(32, 128), order=order)
    moved = [run_grid(launch, chip).traffic for launch in planned(problem, schedule, chip)]
    forms = forms_of(problem, schedule, chip)
    assert sum(t.vmem_fill_bytes for t in moved) == forms["vmem_fill_bytes"]
    assert sum(t.vmem_drain_bytes for t in moved) == forms["vmem_drain_bytes"]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), m=st.integers(1, 30), n=st.integers(1, 30))
def test_query_tiles_of_a_key_tile(harness, data, m, n):
    problem = data.draw(harness.attention_problems())
    first, end = query_spans(problem, m, n)
    seen = reference.mask(problem)
    for j, key0 in enumerate(range(0, problem.seqlen_k, n)):
        rows = range(0, problem.seqlen, m)
        pairs = [i for i, r in enumerate(rows) if seen[r : r + m, key0 : key0 + n].any()]
        assert list(range(first[j], end[j])) == pairs
