"""What the backward kernels compute on real numbers, tile by tile, when they are given tensors.

Beside arithmetic.py, by the same rules: tiles are fetched, sums are float64, and what a chip keeps
in the dtype of the problem is rounded to it. That is P and dS, which enter matrix products, and
the results; delta = rowsum(dO ∘ O), dP and the sums of dQ, dK and dV are fp32 on a chip.
"""

from __future__ import annotations

import numpy as np

from iosim.jit import numeric
from iosim.kernels.arithmetic import stored
from iosim.kernels.masks import visible_keys


@numeric
def row_dots(left, right):
    """[rows, 1]: the dot products of the rows of two tiles."""
    dots = np.zeros((left.shape[0], 1))
    for r in range(left.shape[0]):
        for d in range(left.shape[1]):
            dots[r, 0] += left[r, d] * right[r, d]
    return dots


@numeric
def recompute(q, k, v, do, peak, total, delta, row0, key0, p):
    """P and dS of a pair of tiles: P = exp(S · scale - peak) / total, dS = P ∘ (dO Vᵀ - delta).

    With the log-sum-exp as `peak`, `total` is 1. `q` and `do` hold rows from `row0` on, `k` and `v`
    keys from `key0` on; `peak`, `total` and `delta` are [rows, 1]. Hidden pairs are 0.
    """
    weights = np.zeros((q.shape[0], k.shape[0]))
    slopes = np.zeros((q.shape[0], k.shape[0]))
    for r in range(q.shape[0]):
        low, high = visible_keys(row0 + r, p)
        for c in range(max(low - key0, 0), min(high - key0, k.shape[0])):
            s, dp = 0.0, 0.0
            for d in range(q.shape[1]):
                s += q[r, d] * k[c, d]
                dp += do[r, d] * v[c, d]
            e = np.exp(s * p.scale - peak[r, 0]) / total[r, 0]
            weights[r, c] = stored(e, p)
            slopes[r, c] = stored(e * (dp - delta[r, 0]), p)
    return weights, slopes


@numeric
def add_product(acc, left, right):
    """acc += left · right."""
    for r in range(left.shape[0]):
        for c in range(left.shape[1]):
            for d in range(right.shape[1]):
                acc[r, d] += left[r, c] * right[c, d]


@numeric
def add_transposed(acc, left, right):
    """acc += leftᵀ · right."""
    for r in range(left.shape[0]):
        for c in range(left.shape[1]):
            for d in range(right.shape[1]):
                acc[c, d] += left[r, c] * right[r, d]


@numeric
def scaled(tile, factor):
    """`tile` · `factor`."""
    return tile * factor


@numeric
def write_fp32(tensor, matrix, row0, tile):
    """Writes a tile to consecutive rows of one matrix of a stack that is kept in fp32."""
    for r in range(tile.shape[0]):
        for c in range(tile.shape[1]):
            tensor[matrix, row0 + r, c] = tile[r, c]


@numeric
def add_fp32(tensor, matrix, row0, tile):
    """Adds a tile to consecutive rows of one matrix of a stack that is kept in fp32."""
    for r in range(tile.shape[0]):
        for c in range(tile.shape[1]):
            tensor[matrix, row0 + r, c] += tile[r, c]


@numeric
def ones(rows):
    """[rows, 1] of 1: what P is divided by where the log-sum-exp is known."""
    return np.ones((rows, 1))
