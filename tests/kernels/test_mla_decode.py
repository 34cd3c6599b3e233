"""Latent attention: one tensor is key and value, read once; the numbers, the bytes, the sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.errors import RequestError
from iosim.kernels import load_kernel, reference, rounding
from iosim.launch import why_not
from iosim.problem import Attention, Schedule
from iosim.problem_variants import LatentDecode
from iosim.profiles import load_profile, profile_names

KERNEL = load_kernel("mla-decode")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")


def planned(problem, schedule, chip=GPU):
    return KERNEL.launches(problem, schedule, chip)


@st.composite
def latent(draw, longest_k=40):
    head_dim = draw(st.sampled_from([2, 5, 8]))
    return LatentDecode(
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 5)),
        seqlen=draw(st.integers(1, 4)),
        seqlen_k=draw(st.integers(1, longest_k)),
        head_dim=head_dim,
        latent_dim=draw(st.integers(1, head_dim)),
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.sampled_from([0, 0, 1, 5, 30])),
        dtype="bf16",
    )


def arrays_of(problem, splits):
    rng = np.random.default_rng(problem.seqlen_k)
    rows = problem.heads * problem.seqlen
    return {
        "Q": rng.standard_normal((problem.batch, rows, problem.head_dim)),
        "KV": rng.standard_normal((problem.batch, problem.seqlen_k, problem.head_dim)),
        "O": np.full((problem.batch, rows, problem.latent_dim), np.nan),
        "O_part": np.full((problem.batch * splits, rows, problem.latent_dim), np.nan),
        "lse_part": np.full((problem.batch * splits, rows), np.nan),
    }


def expected(arrays, problem):
    heads = problem.batch * problem.heads
    q = arrays["Q"].reshape(heads, problem.seqlen, problem.head_dim)
    o = reference.latent_attention(q, arrays["KV"], problem.latent_dim, problem)
    return o.reshape(arrays["O"].shape)


@settings(max_examples=120, deadline=None)
@given(
    problem=latent(),
    tile=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    splits=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 30), max_size=3),
)
def test_computes_latent_attention(harness, problem, tile, splits, cuts):
    arrays = arrays_of(problem, splits)
    for launch in planned(problem, Schedule(tile=tile, splits=splits)):
        computed = harness.compute(harness.exact(launch), arrays)
        harness.assert_ranges(launch, computed, cuts)
        harness.assert_work(launch, computed)
    np.testing.assert_allclose(arrays["O"], expected(arrays, problem), rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(problem=latent(longest_k=500), tile=st.sampled_from([(16, 128), (32, 256)]))
def test_computes_latent_attention_in_grid_steps(harness, problem, tile):
    (launch,) = planned(problem, Schedule(tile=tile), TPU)
    arrays = arrays_of(problem, 1)
    computed = harness.compute(harness.exact(launch), arrays)
    harness.assert_work(launch, computed)
    np.testing.assert_allclose(arrays["O"], expected(arrays, problem), rtol=1e-10, atol=1e-10)
    moved = run_grid(launch, TPU)
    for form in KERNEL.closed_forms(problem, Schedule(tile=tile), TPU)[1:]:
        assert getattr(moved.traffic, form.quantity) == form.value, form.quantity
    assert moved.operands["KV"].vmem_fill_bytes >= moved.operands["KV"].unique_bytes


SIZE = {"batch": 2, "heads": 3, "seqlen": 2, "seqlen_k": 29, "head_dim": 6, "latent_dim": 4}


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 5}], ids=str)
def test_reports_what_it_touches_on_a_gpu(trace, mask):
    problem = LatentDecode(**SIZE, **mask)
    schedule = Schedule(tile=(4, 8), splits=3)
    arrays = trace("mla-decode", problem, schedule, "h200", arrays_of(problem, 3))
    np.testing.assert_allclose(arrays["O"], expected(arrays, problem), rtol=1e-10, atol=1e-10)


def test_reports_what_it_touches_in_a_grid(trace):
    problem = LatentDecode(**{**SIZE, "seqlen_k": 300}, dtype="bf16")
    arrays = arrays_of(problem, 1)
    arrays = trace("mla-decode", problem, Schedule(tile=(16, 128)), "tpu-v5e", arrays)
    np.testing.assert_allclose(arrays["O"], expected(arrays, problem), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_cache_with_scales(trace, dtype):
    problem = LatentDecode(**SIZE, kv_dtype=dtype)
    arrays = arrays_of(problem, 2)
    arrays["KV"], scales = rounding.quantized(arrays["KV"], dtype)
    arrays["KV_scale"] = scales[:, None, :]
    done = trace("mla-decode", problem, Schedule(tile=(8, 8), splits=2), "h200", arrays)
    wide = {**done, "KV": done["KV"] * scales[..., None]}
    np.testing.assert_allclose(done["O"], expected(wide, problem), rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(problem=latent(), dtype=st.sampled_from(["fp16", "bf16"]), splits=st.integers(1, 3))
def test_rounds_as_the_hardware_does(harness, problem, dtype, splits):
    """Probabilities and O are rounded: each adds a unit roundoff of the greatest value at most."""
    problem = LatentDecode(**{**vars(problem), "dtype": dtype, "kv_dtype": dtype})
    arrays = arrays_of(problem, splits)
    for name in ("Q", "KV"):
        arrays[name] = rounding.rounded(arrays[name], dtype)
    for launch in planned(problem, Schedule(tile=(8, 8), splits=splits)):
        harness.compute(launch, arrays)
    bound = 2.01 * rounding.unit_roundoff(dtype) * np.abs(arrays["KV"]).max()
    assert np.abs(arrays["O"] - expected(arrays, problem)).max() <= bound


SHAPES = {
    "whole tiles": {},
    "ragged": {"seqlen_k": 1001},
    "several rows": {"seqlen": 3, "causal": True},
    "scales": {"kv_dtype": "fp8"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [1, 5])
def test_closed_forms_are_what_the_engine_counts(shape, splits):
    size = {"batch": 2, "heads": 32, "seqlen_k": 1024, "head_dim": 144, "latent_dim": 128}
    problem = LatentDecode(**{**size, **SHAPES[shape]})
    schedule = Schedule(tile=(16, 64), stages=2, warps=4, splits=splits, spills=0)
    memory = CachedMemory(GPU)
    runs = [
        run_blocks(launch, GPU, memory, clock_hz=1.7e9, seed=0, soil=False).traffic
        for launch in planned(problem, schedule)
    ]
    for form in KERNEL.closed_forms(problem, schedule, GPU)[1:]:
        assert sum(getattr(run, form.quantity) for run in runs) == form.value, form.quantity


def test_a_token_costs_1152_bytes_whatever_the_heads():
    """576 elements of bf16; keys and values of 128 heads of 128 would be 65,536."""
    for heads in (16, 128):
        problem = LatentDecode(batch=3, heads=heads, seqlen_k=1000, dtype="bf16")
        launch = planned(problem, KERNEL.default_schedule(problem, GPU))[0]
        unique = {o.name: o.unique_bytes for o in launch.operands}
        assert unique["KV"] == 3 * 1000 * 1152
        assert launch.work.flops == 2 * 3 * 1000 * (576 + 512) * heads


def test_the_cache_is_57_times_smaller_than_keys_and_values_of_all_heads():
    """K and V of 128 heads of 128 are 32,768 elements of a token, a latent row is 576."""
    dense = Attention(heads=128, seqlen=1, seqlen_k=1024, head_dim=128, dtype="bf16")
    (other,) = load_kernel("flash2").launches(dense, Schedule(tile=(16, 64), stages=2), GPU)
    mine = planned(LatentDecode(seqlen_k=1024, dtype="bf16"), Schedule(tile=(64, 64)))[0]
    need = {o.name: o.unique_bytes for o in (*other.operands, *mine.operands)}
    assert 9 * (need["K"] + need["V"]) == 9 * 1024 * 65_536 == 512 * need["KV"]
    # flops of a byte of the cache: 2 · (576 + 512) · 128 / 1152, for heads of their own 1
    assert mine.work.flops / need["KV"] == pytest.approx(241.8, abs=0.05)
    assert other.work.flops / (need["K"] + need["V"]) == 1


def test_a_tile_of_the_cache_is_73728_bytes():
    problem = LatentDecode(dtype="bf16")
    one, two = (
        planned(problem, Schedule(tile=(64, 64), stages=s, warps=8))[0].footprint.shared_bytes
        for s in (1, 2)
    )
    assert two - one == 64 * 576 * 2 == 73_728
    assert two <= 232_448


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("heads", [8, 128])
def test_default_schedules_fit(profile, heads):
    chip = load_profile(profile)
    problem = LatentDecode(heads=heads, dtype="bf16")
    launches = planned(problem, KERNEL.default_schedule(problem, chip), chip)
    assert all(why_not(launch.footprint, chip) is None for launch in launches)


def test_refusals():
    with pytest.raises(RequestError, match="needs a latent problem"):
        planned(Attention(), Schedule(tile=(16, 64)))
    with pytest.raises(RequestError, match="one KV head for all"):
        LatentDecode(kv_heads=2)
    with pytest.raises(RequestError, match="latent_dim must be from 1"):
        LatentDecode(latent_dim=600)
