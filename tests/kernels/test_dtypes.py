"""Attention with the rounding of hardware: fp16, bf16 and fp8 within what unit roundoffs allow.

Inputs are rounded first, the twin computes with them in float64. With u the unit roundoff and h
half of the least subnormal number of the dtype, one rounding of x is off by u |x| + h at most. For
one element of O let

    A = Σ p |v|   over the keys that its row sees, p the probabilities     (so |O| ≤ A)
    B = Σ |v|     over the same keys

A kernel that is added here names its own bound: a function of `Parts`.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.kernels import load_kernel, reference
from iosim.kernels.rounding import FORMATS, rounded, unit_roundoff
from iosim.problem import Attention, Schedule, tiles
from iosim.profiles import load_profile

FLOAT64 = 1e-12  # of A: what float64 itself is off by, sums of a few dozen terms
DTYPES = ("fp16", "bf16", "fp8")


class Parts(NamedTuple):
    """What the bounds are made of: arrays of the shape of O, and of the dtype."""

    o: np.ndarray
    a: np.ndarray
    b: np.ndarray
    score: np.ndarray  # greatest |score| of the row, [heads, rows, 1]
    u: float
    h: float
    visits: int  # of a row of Q, at most


def stored(error, parts):
    """The bound of O's error when it is stored: it was off by `error` before."""
    return (1 + parts.u) * error + parts.u * np.abs(parts.o) + parts.h


def flash2(parts):
    """P is rounded as it enters the product, O as it is stored.

    P is relative to the greatest score so far, so that an error h of it shrinks as that grows, and
    the row sum by which O is divided is at least 1: off by u A + h B.
    """
    return stored(parts.u * parts.a + parts.h * parts.b, parts)


def flash1(parts):
    """O is stored at each of T visits besides, and the part that is old is off by what it was.

    Bound of visit t: c A + h D with c = (1 + u) max(c before, u) + u, as old and new part of A are
    weighted alike, so that c = (1 + u)^(T + 1) - 1; and D = (1 + u) (D before + new B) + 1.
    """
    growth = (1 + parts.u) ** parts.visits
    return (growth * (1 + parts.u) - 1) * parts.a + parts.h * growth * (parts.b + parts.visits)


def standard(parts):
    """S is stored, off by e ≤ u |s| + h, so that p changes by a factor within exp(±2 e).

    P is stored: all in all (exp(2 e) (1 + u) - 1) A + h B. Then O is.
    """
    factor = np.exp(2 * (parts.u * parts.score + parts.h)) * (1 + parts.u)
    return stored((factor - 1) * parts.a + parts.h * parts.b, parts)


#: kernel: its bound
BOUNDS: dict[str, Callable[[Parts], np.ndarray]] = {
    "flash1": flash1,
    "flash2": flash2,
    "standard": standard,
}


def parts_of(arrays, problem, schedule, dtype):
    """`Parts` of a problem; the twin in float64 on inputs as they are."""
    q, k, v = arrays["Q"], arrays["K"], arrays["V"]
    scores = reference.scores(q, k, problem)
    p, _ = reference.softmax(scores)
    seen = np.isfinite(scores)
    weights = np.abs(v)[np.arange(q.shape[0]) // problem.group]
    form = FORMATS[dtype]
    return Parts(
        o=reference.attention(q, k, v, problem)[0],
        a=np.einsum("hnm,hmd->hnd", p, weights),
        b=np.einsum("hnm,hmd->hnd", seen.astype(float), weights),
        score=np.abs(np.where(seen, scores, 0.0)).max(axis=-1, keepdims=True),
        u=unit_roundoff(dtype),
        h=2.0 ** (form.least - form.digits),
        visits=tiles(problem.seqlen_k, schedule.tile[1]),
    )


def with_dtype(problem, dtype):
    """The same problem in another dtype."""
    return dataclasses.replace(problem, dtype=dtype, kv_dtype="")


def run(harness, kernel, problem, schedule, chip, scale=1.0):
    """The arrays after all launches, as hardware rounds, from inputs rounded to the dtype."""
    arrays = harness.attention_arrays(problem)
    for name in "QKV":
        arrays[name] = rounded(arrays[name] * scale, problem.dtype)
    for launch in load_kernel(kernel).launches(problem, schedule, chip):
        harness.compute(launch, arrays)
    return arrays


def excess(kernel, arrays, problem, schedule, dtype):
    """By how much O is farther from the twin than the bound; at most 0 where it holds."""
    parts = parts_of(arrays, problem, schedule, dtype)
    error = np.abs(arrays["O"] - parts.o)
    return (error - BOUNDS[kernel](parts) - FLOAT64 * parts.a).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", BOUNDS)
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    scale=st.sampled_from([1.0, 0.05, 3.0]),
)
def test_rounding_stays_within_its_bound(harness, kernel, dtype, data, tile, scale):
    problem = with_dtype(data.draw(harness.attention_problems()), dtype)
    schedule = Schedule(tile=tile, warps=4)
    arrays = run(harness, kernel, problem, schedule, load_profile("h200"), scale)
    assert (rounded(arrays["O"], dtype) == arrays["O"]).all()
    assert excess(kernel, arrays, problem, schedule, dtype) <= 0


@pytest.mark.parametrize("kernel", sorted({"flash2", "standard"} & BOUNDS.keys()))
def test_rounding_stays_within_its_bound_on_a_grid(harness, kernel):
    chip = load_profile("tpu-v5e")
    problem = Attention(
        heads=2, kv_heads=1, seqlen=40, seqlen_k=300, head_dim=16, causal=True, dtype="bf16"
    )
    schedule = Schedule(tile=(16, 128))
    arrays = run(harness, kernel, problem, schedule, chip)
    assert (rounded(arrays["O"], "bf16") == arrays["O"]).all()
    assert excess(kernel, arrays, problem, schedule, "bf16") <= 0


@pytest.mark.parametrize("kernel", BOUNDS)
def test_the_bounds_can_fail(harness, kernel):
    """What bf16 rounds away is too much for fp16, and fp16 is not exact."""
    chip, schedule = load_profile("h200"), Schedule(tile=(16, 8), warps=4)
    shape = Attention(heads=2, seqlen=24, head_dim=8)
    coarse = run(harness, kernel, with_dtype(shape, "bf16"), schedule, chip)
    assert excess(kernel, coarse, shape, schedule, "bf16") <= 0
    assert excess(kernel, coarse, shape, schedule, "fp16") > 0
    fine = run(harness, kernel, with_dtype(shape, "fp16"), schedule, chip)
    assert excess(kernel, fine, shape, schedule, "fp32") > 0
