"""The float64 twins against still plainer words: one element at a time, and known values."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.kernels import reference
from iosim.problem import Attention


def one_row(q, k, v, keys):
    """Output and log-sum-exp of one query row that sees `keys`, by the definition."""
    if not keys:
        return np.zeros(v.shape[1]), -np.inf
    logits = [float(q @ k[j]) / math.sqrt(q.size) for j in keys]
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    total = math.fsum(weights)
    output = sum(w * v[j] for w, j in zip(weights, keys, strict=True)) / total
    return output, peak + math.log(total)


def sees(problem, row, key):
    """The words of `Attention` about one (row, key) pair."""
    diagonal = problem.seqlen_k - problem.seqlen if problem.align == "bottom-right" else 0
    distance = row + diagonal - key
    if problem.causal and distance < 0:
        return False
    return not problem.window or abs(distance) < problem.window


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen=st.integers(1, 9),
    seqlen_k=st.integers(1, 9),
    causal=st.booleans(),
    align=st.sampled_from(["bottom-right", "top-left"]),
    window=st.integers(0, 5),
    peak=st.sampled_from([1.0, 1e4]),
)
def test_attention(batch, kv_heads, group, seqlen, seqlen_k, causal, align, window, peak):
    problem = Attention(
        batch=batch, heads=kv_heads * group, kv_heads=kv_heads, seqlen=seqlen, seqlen_k=seqlen_k,
        head_dim=3, causal=causal, align=align, window=window,
    )  # fmt: skip
    rng = np.random.default_rng(seqlen * 10 + seqlen_k)
    q = rng.standard_normal((batch * kv_heads * group, seqlen, 3)) * peak
    k, v = rng.standard_normal((2, batch * kv_heads, seqlen_k, 3))
    o, lse = reference.attention(q, k, v, problem)
    for b in range(batch):
        for h in range(problem.heads):
            at, kv = b * problem.heads + h, b * kv_heads + h // group
            for row in range(seqlen):
                keys = [j for j in range(seqlen_k) if sees(problem, row, j)]
                output, total = one_row(q[at, row], k[kv], v[kv], keys)
                np.testing.assert_allclose(o[at, row], output, rtol=1e-12, atol=1e-12)
                np.testing.assert_allclose(lse[at, row], total, rtol=1e-12, atol=1e-12)


def test_attention_of_equal_keys_is_the_mean():
    problem = Attention(heads=1, seqlen=2, seqlen_k=4, head_dim=2)
    v = np.arange(8.0).reshape(1, 4, 2)
    o, lse = reference.attention(np.ones((1, 2, 2)), np.zeros((1, 4, 2)), v, problem)
    np.testing.assert_array_equal(o, np.broadcast_to([3.0, 4.0], (1, 2, 2)))
    np.testing.assert_allclose(lse, math.log(4))


def test_matmul():
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    expected = [[sum(a[i, x] * b[x, j] for x in range(3)) for j in range(4)] for i in range(2)]
    np.testing.assert_array_equal(reference.matmul(a, b), expected)


@pytest.mark.parametrize(("elements", "stride", "block"), [(10, 3, 4), (8, 1, 4), (3, 5, 4)])
def test_strided_sums(elements, stride, block):
    x = np.arange(float(elements * stride))
    sums = reference.strided_sums(x, stride, block)
    blocks = range(0, elements, block)
    expected = [sum(x[i * stride] for i in range(p, min(p + block, elements))) for p in blocks]
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize(
    ("start_step", "length", "reps"),
    [(8, 8, 3), (8, 24, 1)],
    ids=["private", "shared"],
)
def test_reread_sums(start_step, length, reps):
    x, block, blocks = np.arange(24.0) ** 2, 4, 3
    expected = np.zeros((blocks, block))
    for p in range(blocks):
        for _ in range(reps):
            for i in range(length):
                expected[p, i % block] += x[(p * start_step + i) % x.size]
    sums = reference.reread_sums(
        x, blocks, start_step=start_step, length=length, reps=reps, block=block
    )
    np.testing.assert_array_equal(sums, expected)
