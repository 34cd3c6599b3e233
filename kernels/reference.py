"""What the kernels must compute, in float64 NumPy: slow, obvious, and true to the definition.

No tiles, no online softmax, no tricks: the mask is `Attention.visible` row by row and the blocks of
a `BlockSparse`, the softmax subtracts the maximum of the whole row. Tests hold every block program
against these.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iosim.problem import Attention
from iosim.problem_variants import BlockSparse

Array = NDArray[np.float64]

LAYERNORM_EPS = 1e-5  # what PyTorch adds to the variance unless told otherwise


def mask(problem: Attention) -> NDArray[np.bool_]:
    """[seqlen, seqlen_k], true where a row sees a key."""
    seen = np.zeros((problem.seqlen, problem.seqlen_k), dtype=np.bool_)
    for row in range(problem.seqlen):
        first, last = problem.visible(row)
        seen[row, first:last] = True
    if isinstance(problem, BlockSparse):
        side = problem.mask_block
        pairs = problem.block_mask().repeat(side, axis=0).repeat(side, axis=1)
        seen &= pairs[: problem.seqlen, : problem.seqlen_k]
    return seen


def scores(q: Array, k: Array, problem: Attention) -> Array:
    """Q Kᵀ / √head_dim as [batch · heads, seqlen, seqlen_k], -inf where masked.

    Query head h reads KV head h // group (grouped-query attention, arXiv 2305.13245).
    """
    heads = np.arange(q.shape[0]) // problem.group
    logits = np.einsum("hnd,hmd->hnm", q, k[heads]) / np.sqrt(problem.head_dim)
    return np.where(mask(problem), logits, -np.inf)


def softmax(logits: Array) -> tuple[Array, Array]:
    """Probabilities of each row and the natural logarithm of its sum of exponentials.

    A row of -inf alone has probabilities 0 and a sum of 0, whose logarithm is -inf.
    """
    peak = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(peak), peak, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    empty = total == 0
    lse = np.where(empty, -np.inf, peak + np.log(np.where(empty, 1.0, total)))
    return weights / np.where(empty, 1.0, total), lse[..., 0]


def layernorm(
    x: Array, gamma: Array, beta: Array, eps: float = LAYERNORM_EPS
) -> tuple[Array, Array, Array]:
    """(x - mean) / √(variance + eps) · gamma + beta of each row, the means, and 1 / √(…).

    The variance is the biased one, over the last axis.
    """
    mean = x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + eps)
    return (x - mean) * rstd * gamma + beta, mean, rstd


def attention(q: Array, k: Array, v: Array, problem: Attention) -> tuple[Array, Array]:
    """Output [batch · heads, seqlen, head_dim] and log-sum-exp [batch · heads, seqlen].

    `q` is [batch · heads, seqlen, head_dim], `k` and `v` are
    [batch · kv_heads, seqlen_k, head_dim]. Fully masked rows give 0 and -inf.
    """
    probabilities, lse = softmax(scores(q, k, problem))
    heads = np.arange(q.shape[0]) // problem.group
    return np.einsum("hnm,hmd->hnd", probabilities, v[heads]), lse


def matmul(a: Array, b: Array) -> Array:
    """A [m, k] · B [k, n]."""
    return a @ b


def strided_sums(x: Array, stride: int, block: int) -> Array:
    """Block p sums its `block` elements, which lie `stride` apart in `x`; the last may be short."""
    taken = x[::stride]
    return np.add.reduceat(taken, np.arange(0, taken.size, block))


def reread_sums(
    x: Array, blocks: int, *, start_step: int, length: int, reps: int, block: int
) -> Array:
    """[blocks, block]: block p reads `length` elements from p · start_step on, `reps` times.

    Reads wrap at the end of `x`; what stands at the same place in its stretch of `block` elements
    is added up. `length` must be a multiple of `block`.
    """
    sums = np.empty((blocks, block))
    for p in range(blocks):
        read = x[(p * start_step + np.arange(length)) % x.size]
        sums[p] = reps * read.reshape(-1, block).sum(axis=0)
    return sums


def latent_attention(q: Array, rows: Array, latent_dim: int, problem: Attention) -> Array:
    """Output [batch · heads, seqlen, latent_dim] of attention whose keys and values are one tensor.

    `rows` is [batch, seqlen_k, head_dim]; the first `latent_dim` columns are the values.
    """
    probabilities, _ = softmax(scores(q, rows, problem))
    values: Array = rows[np.arange(q.shape[0]) // problem.group, :, :latent_dim]
    output: Array = np.einsum("hnm,hmd->hnd", probabilities, values)
    return output
