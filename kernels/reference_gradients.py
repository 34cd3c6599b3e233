"""What a backward pass must compute, in float64 NumPy: the gradients of the definition.

Nothing of it is recomputed in tiles or taken from a forward pass: S and P are whole matrices, and
the sum that the softmax's derivative subtracts is that of P ∘ dP. Tests hold it against central
differences of `reference.attention`, and every backward block program against it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from iosim.kernels.reference import scores, softmax
from iosim.problem import Attention

Array = NDArray[np.float64]


class Gradients(NamedTuple):
    """dQ as Q is shaped, dK and dV as K and V are; P and dS of every query head besides."""

    dq: Array
    dk: Array
    dv: Array
    p: Array
    ds: Array


def gradients(q: Array, k: Array, v: Array, do: Array, problem: Attention) -> Gradients:
    """Gradients of sum(dO ∘ O) with O = softmax(Q Kᵀ · scale + mask) V.

    `q` and `do` are [batch · heads, seqlen, head_dim], `k` and `v` are
    [batch · kv_heads, seqlen_k, head_dim]. A KV head gets the sum over the query heads that share
    it. Rows that see no key give 0 and get 0.
    """
    shared = np.arange(q.shape[0]) // problem.group
    scale = 1 / np.sqrt(problem.head_dim)
    p, _ = softmax(scores(q, k, problem))
    dp = np.einsum("hnd,hmd->hnm", do, v[shared])
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    return Gradients(
        dq=scale * np.einsum("hnm,hmd->hnd", ds, k[shared]),
        dk=scale * of_kv_heads(np.einsum("hnm,hnd->hmd", ds, q), problem),
        dv=of_kv_heads(np.einsum("hnm,hnd->hmd", p, do), problem),
        p=p,
        ds=ds,
    )


def of_kv_heads(values: Array, problem: Attention) -> Array:
    """Sums over the query heads that share a KV head."""
    summed: Array = values.reshape(-1, problem.group, *values.shape[1:]).sum(axis=1)
    return summed
