"""The gradients that backward kernels are held to are those of the definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.kernels import reference
from iosim.kernels.reference_gradients import gradients
from iosim.problem import Attention

STEP = 1e-4  # of the central differences: their error is that of STEP², and of 1e-16 / STEP


def inputs_of(problem, seed):
    """Q, K, V and dO, and a direction for each of the first three."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    rows = (heads, problem.seqlen, problem.head_dim)
    keys = (kv_heads, problem.seqlen_k, problem.head_dim)
    shapes = (rows, keys, keys)
    point, direction = ([rng.standard_normal(s) for s in shapes] for _ in range(2))
    return point, rng.standard_normal(rows), direction


def assert_slope(problem, seed):
    """The gradients along a direction against the slope of sum(dO ∘ O), for Q, K and V apart."""
    point, do, direction = inputs_of(problem, seed)
    found = gradients(*point, do, problem)
    for which, gradient in enumerate((found.dq, found.dk, found.dv)):
        assert gradient.shape == point[which].shape

        def loss(step, which=which):
            moved = [
                x + step * d if i == which else x
                for i, (x, d) in enumerate(zip(point, direction, strict=True))
            ]
            return float((do * reference.attention(*moved, problem)[0]).sum())

        slope = (loss(STEP) - loss(-STEP)) / (2 * STEP)
        scale = 1 + np.abs(gradient * direction[which]).sum()
        assert abs(slope - (gradient * direction[which]).sum()) < 1e-6 * scale


@settings(max_examples=100, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_gradients_are_the_slopes_of_the_definition(harness, data, seed):
    assert_slope(data.draw(harness.attention_problems(longest=12, longest_k=12)), seed)


@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        {"causal": True, "align": "top-left"},
        {"window": 3},
        {"causal": True, "window": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("seqlen", "seqlen_k"), [(9, 9), (11, 5), (4, 13)])
def test_gradients_of_every_mask_and_both_alignments(mask, seqlen, seqlen_k):
    size = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 5}
    assert_slope(Attention(**size, seqlen=seqlen, seqlen_k=seqlen_k, **mask), seed=1)


def test_rows_without_keys_get_nothing_and_give_nothing():
    problem = Attention(heads=2, seqlen=7, seqlen_k=4, head_dim=3, causal=True)
    (q, k, v), do, _ = inputs_of(problem, 0)
    found = gradients(q, k, v, do, problem)
    assert not reference.mask(problem)[:3].any()
    assert not found.dq[:, :3].any()
    assert found.dq[:, 4:].all()
    again = gradients(q, k, v, np.where(np.arange(7)[:, None] < 3, 1e9, do), problem)
    for before, after in zip(found, again, strict=True):
        np.testing.assert_array_equal(before, after)
    for value in found:
        assert np.isfinite(value).all()


def test_a_kv_head_gets_the_sum_over_its_query_heads():
    grouped = Attention(heads=6, kv_heads=2, seqlen=5, seqlen_k=7, head_dim=3)
    (q, k, v), do, _ = inputs_of(grouped, 2)
    found = gradients(q, k, v, do, grouped)
    each = Attention(heads=1, seqlen=5, seqlen_k=7, head_dim=3)
    for kv in range(2):
        parts = [
            gradients(q[h : h + 1], k[kv : kv + 1], v[kv : kv + 1], do[h : h + 1], each)
            for h in range(3 * kv, 3 * kv + 3)
        ]
        np.testing.assert_allclose(found.dk[kv], sum(p.dk[0] for p in parts), rtol=1e-12)
        np.testing.assert_allclose(found.dv[kv], sum(p.dv[0] for p in parts), rtol=1e-12)
