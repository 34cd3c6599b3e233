"""K and V in fp8 or int8 with a scale per row: right numbers, what is touched, what it saves."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference
from iosim.kernels.rounding import FORMATS, quantized, rounded, unit_roundoff
from iosim.launch import why_not
from iosim.ops import MATRIX, VECTOR
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile
from iosim.simulation import simulate

GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")
KERNELS = ["flash2"]  # those that read K and V with scales
KINDS = ["fp8", "int8"]


def scaled(problem, kv_dtype):
    """The same problem with K and V in `kv_dtype`."""
    return dataclasses.replace(problem, kv_dtype=kv_dtype)


def the_launch(kernel, problem, schedule, chip):
    (launch,) = load_kernel(kernel).launches(problem, schedule, chip)
    return launch


def forms_of(kernel, problem, schedule, chip):
    forms = load_kernel(kernel).closed_forms(problem, schedule, chip)
    return {form.quantity: form.value for form in forms}


def stored_arrays(harness, problem):
    """Arrays of the kernels: K and V quantized, their scales beside them."""
    arrays = harness.attention_arrays(problem)
    for name in "KV":
        arrays[name], scales = quantized(arrays[name], problem.kv_dtype)
        arrays[f"{name}_scale"] = scales[:, None, :]
    return arrays


def widened(arrays, name, dtype=None):
    """K or V as the products see them."""
    values = arrays[name] * arrays[f"{name}_scale"][:, 0, :, None]
    return values if dtype is None else rounded(values, dtype)


def assert_right(arrays, problem):
    """O and the log-sum-exp against the twin of the widened K and V, where nothing is rounded."""
    k, v = (widened(arrays, name) for name in "KV")
    o, lse = reference.attention(arrays["Q"], k, v, problem)
    np.testing.assert_allclose(arrays["O"], o, rtol=1e-10, atol=1e-10)
    if arrays["lse"].any():
        np.testing.assert_allclose(arrays["lse"], lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    cuts=st.lists(st.integers(1, 30), max_size=3),
)
def test_computes_attention_of_what_is_stored(harness, kernel, data, kind, tile, cuts):
    problem = scaled(data.draw(harness.attention_problems()), kind)
    launch = the_launch(kernel, problem, Schedule(tile=tile), GPU)
    arrays = stored_arrays(harness, problem)
    computed = harness.compute(harness.exact(launch), arrays)
    assert_right(arrays, problem)
    harness.assert_ranges(launch, computed, cuts)
    ops = np.concatenate(computed)
    for kind_of_op, issued in (
        (MATRIX, launch.work.issued_flops // 2),
        (VECTOR, launch.work.issued_vector_ops),
    ):
        mine = ops[ops["kind"] == kind_of_op]
        assert issued == (mine["m"].astype(np.int64) * mine["n"] * mine["k"]).sum()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), tile=st.tuples(st.integers(1, 30)))
def test_widened_numbers_are_rounded_to_the_dtype(harness, kernel, dtype, data, kind, tile):
    """One rounding more than without scales; against the twin of the widened and rounded K and V.

    The rest is the bound of flash2: P off by u of it and h, then O by u and h (see test_dtypes.py).
    """
    problem = data.draw(harness.attention_problems())
    problem = dataclasses.replace(problem, dtype=dtype, kv_dtype=kind)
    arrays = stored_arrays(harness, problem)
    arrays["Q"] = rounded(arrays["Q"], dtype)
    harness.compute(the_launch(kernel, problem, Schedule(tile=(tile[0], 8)), GPU), arrays)
    k, v = (widened(arrays, name, dtype) for name in "KV")
    o, _ = reference.attention(arrays["Q"], k, v, problem)
    scores = reference.scores(arrays["Q"], k, problem)
    weights = np.abs(v)[np.arange(arrays["Q"].shape[0]) // problem.group]
    a = np.einsum("hnm,hmd->hnd", reference.softmax(scores)[0], weights)
    b = np.einsum("hnm,hmd->hnd", np.isfinite(scores).astype(float), weights)
    u, h = unit_roundoff(dtype), 2.0 ** (FORMATS[dtype].least - FORMATS[dtype].digits)
    bound = (1 + u) * (u * a + h * b) + u * np.abs(o) + h
    assert (np.abs(arrays["O"] - o) <= bound + 1e-12 * a).all()


MASKS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 40},
    "rows without keys": {"causal": True, "seqlen": 60, "seqlen_k": 50},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_reports_what_it_touches_on_a_gpu(trace, harness, kernel, kind, mask):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 11, "seqlen_k": 19, "head_dim": 4}
    problem = Attention(**{**size, **MASKS[mask]}, kv_dtype=kind)
    arrays = stored_arrays(harness, problem)
    assert_right(trace(kernel, problem, Schedule(tile=(4, 3)), "h200", arrays), problem)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["plain", "causal", "window"])
def test_reports_what_it_touches_on_a_tpu(trace, harness, kernel, kind, mask):
    size = {"heads": 2, "kv_heads": 1, "seqlen": 40, "seqlen_k": 300, "head_dim": 3}
    problem = Attention(**{**size, **MASKS[mask]}, dtype="bf16", kv_dtype=kind, align="top-left")
    arrays = stored_arrays(harness, problem)
    assert_right(trace(kernel, problem, Schedule(tile=(16, 128)), "tpu-v5e", arrays), problem)


SHAPES = {
    "whole tiles": {},
    "causal": {"causal": True},
    "ragged": {"seqlen": 200, "seqlen_k": 328},
    "ragged top-left": {"seqlen": 200, "seqlen_k": 328, "causal": True, "align": "top-left"},
    "window": {"window": 70, "seqlen": 328, "seqlen_k": 328},
    "rows without keys": {"causal": True, "seqlen": 328, "seqlen_k": 200},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_closed_forms_are_what_the_engine_counts(kernel, kind, shape):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 256, "seqlen_k": 256, "head_dim": 64}
    problem = Attention(**{**size, **SHAPES[shape]}, kv_dtype=kind)
    schedule = Schedule(tile=(64, 48), stages=2, warps=4)
    launch = the_launch(kernel, problem, schedule, GPU)
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    forms = forms_of(kernel, problem, schedule, GPU)
    assert counts.traffic.l1_fill_bytes == forms["l1_fill_bytes"]
    assert counts.traffic.l1_write_bytes == forms["l1_write_bytes"]
    for name in ("K", "V", "K_scale", "V_scale"):
        row = counts.operands[name]
        assert row.dram_read_bytes >= row.unique_bytes > 0


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    tile=st.sampled_from([(16, 128), (32, 128), (16, 256), (64, 512)]),
    cores=st.integers(1, 3),
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_closed_forms_are_what_a_grid_counts(harness, kernel, data, kind, tile, cores):
    problem = scaled(data.draw(harness.attention_problems(longest=70, longest_k=600)), kind)
    chip = dataclasses.replace(TPU, cores=dataclasses.replace(TPU.cores, count=4, per_device=cores))
    schedule = Schedule(tile=tile)
    counts = run_grid(the_launch(kernel, problem, schedule, chip), chip)
    forms = forms_of(kernel, problem, schedule, chip)
    assert counts.traffic.vmem_fill_bytes == forms["vmem_fill_bytes"]
    assert counts.traffic.vmem_drain_bytes == forms["vmem_drain_bytes"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("profile", ["h200", "tpu-v5e"])
def test_half_the_bytes_of_k_and_v_and_their_scales(kernel, kind, profile):
    """K and V stay in L2 (in one window) here, so that HBM gives each byte of them once."""
    chip = load_profile(profile)
    wide = Attention(heads=4, kv_heads=2, seqlen=512, seqlen_k=512, head_dim=128, dtype="bf16")
    schedule = Schedule(tile=(128, 512) if chip.grid else (64, 64))
    before, after = (
        simulate(kernel, problem, chip, schedule) for problem in (wide, scaled(wide, kind))
    )
    rows = 2 * 512
    for name in "KV":
        assert before.operands[name].unique_bytes == rows * 256
        assert after.operands[name].unique_bytes == rows * 128
        assert after.operands[f"{name}_scale"].unique_bytes == rows * 4
        assert before.operands[name].dram_read_bytes == rows * 256
        assert after.operands[name].dram_read_bytes == rows * 128
        padded = 8 if chip.grid else 1  # a register tile of 8 sublanes for one row of scales
        assert after.operands[f"{name}_scale"].dram_read_bytes == padded * rows * 4
        assert f"{name}_scale" not in before.operands
    assert after.operands["Q"] == before.operands["Q"]
    assert after.footprint_bytes < before.footprint_bytes


@pytest.mark.parametrize("kernel", ["flash1", "standard"])
def test_kernels_without_scales_say_so(kernel):
    problem, algorithm = Attention(kv_dtype="int8"), load_kernel(kernel)
    for call in (
        lambda: algorithm.launches(problem, Schedule(tile=(64, 64), warps=4), GPU),
        lambda: algorithm.default_schedule(problem, GPU),
        lambda: simulate(kernel, problem, GPU),
    ):
        with pytest.raises(RequestError, match=r"reads K and V in the dtype of Q \(fp16\)"):
            call()


@pytest.mark.parametrize(
    ("dtypes", "words"),
    [
        ({"kv_dtype": "fp12"}, "kv_dtype must be one of fp8, int8, fp16"),
        ({"kv_dtype": "bf16"}, "kv_dtype must be one of"),
        ({"dtype": "fp8", "kv_dtype": "int8"}, "no fewer bytes"),
        ({"dtype": "int8", "kv_dtype": "fp8"}, "no fewer bytes"),
    ],
)
def test_types_that_cannot_be(dtypes, words):
    with pytest.raises(RequestError, match=words):
        Attention(**dtypes)


def test_the_type_of_q_is_no_scaled_type():
    for dtype in ("fp16", "fp8"):
        problem = Attention(dtype=dtype, kv_dtype=dtype)
        assert not problem.scaled
        assert problem == Attention(dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", [GPU, load_profile("a100-40gb"), TPU], ids=lambda c: c.name)
def test_default_schedules_fit(chip, kind):
    for kernel in KERNELS:
        for head_dim in (64, 128, 256):
            problem = Attention(head_dim=head_dim, dtype="bf16", kv_dtype=kind)
            schedule = load_kernel(kernel).default_schedule(problem, chip)
            assert why_not(the_launch(kernel, problem, schedule, chip).footprint, chip) is None
