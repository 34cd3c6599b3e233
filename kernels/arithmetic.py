"""What the attention kernels compute on real numbers, tile by tile, when they are given tensors.

A tile is copied onto the chip by `fetch`, element for element what its load operation reports, and
all arithmetic reads the copy. The counting version of a kernel holds none of this. Sums are
float64; what a chip keeps in the dtype of the problem is rounded to it (rounding.py).
"""

from __future__ import annotations

import numpy as np

from iosim.jit import inline, numeric
from iosim.kernels.masks import visible_keys
from iosim.kernels.rounding import to_format


@numeric
def fetch(tensor, matrix, row0, rows, columns):
    """Copies rows of one matrix of a stack onto the chip."""
    tile = np.empty((rows, columns))
    for r in range(rows):
        for c in range(columns):
            tile[r, c] = tensor[matrix, row0 + r, c]
    return tile


@numeric
def fetch_keys(tensor, scales, matrix, row0, rows, columns, p):
    """Like `fetch`, of keys or values: rows with scales in the dtype of the products."""
    tile = fetch(tensor, matrix, row0, rows, columns)
    if p.scale_rows > 0:
        for r in range(rows):
            scale = scales[matrix, 0, row0 + r]
            for c in range(columns):
                tile[r, c] = stored(tile[r, c] * scale, p)
    return tile


@inline
def stored(x, p):
    """`x` in the dtype of the problem."""
    return to_format(x, p.digits, p.least_exponent, p.largest)


@numeric
def consecutive(row0, rows):
    """The rows from `row0` on, for `attend`."""
    return np.arange(row0, row0 + rows)


@numeric
def attend(q, k, v, rows, key0, m, total, acc, p):
    """One step of the online softmax on tiles of real numbers: updates m, total, acc in place.

    `rows` says which row of the problem each row of `q` is, `k` and `v` hold keys from `key0` on;
    `acc` is not yet divided by `total`. Keys that a row does not see count for nothing.
    """
    for r in range(q.shape[0]):
        low, high = visible_keys(rows[r], p)
        scores = np.empty(k.shape[0])
        peak = m[r]
        for c in range(k.shape[0]):
            s = 0.0
            for d in range(q.shape[1]):
                s += q[r, d] * k[c, d]
            scores[c] = s * p.scale if low <= key0 + c < high else -np.inf
            peak = max(peak, scores[c])
        if peak == -np.inf:
            continue  # nothing seen so far
        weight = np.exp(m[r] - peak)
        total[r] *= weight
        for d in range(acc.shape[1]):
            acc[r, d] *= weight
        for c in range(k.shape[0]):
            e = np.exp(scores[c] - peak)
            total[r] += e
            e = stored(e, p)
            for d in range(acc.shape[1]):
                acc[r, d] += e * v[c, d]
        m[r] = peak


@numeric
def finish(o, lse, head, row0, m, total, acc, p):
    """Writes the output rows and their log-sum-exp; fully masked rows are 0 and -inf."""
    for r in range(m.size):
        for d in range(acc.shape[1]):
            o[head, row0 + r, d] = stored(acc[r, d] / total[r], p) if total[r] > 0 else 0.0
        if p.lse > 0:
            lse[head, row0 + r] = m[r] + np.log(total[r]) if total[r] > 0 else -np.inf


@numeric
def revisit(tensors, k, v, head, row0, rows, key0, p):
    """One visit: the rows' O, l and m out of memory, one step of softmax, and back."""
    o, sums, peaks = tensors[3], tensors[4], tensors[5]
    q = fetch(tensors[0], head, row0, rows, p.head_dim)
    acc = fetch(o, head, row0, rows, p.head_dim)
    total, m = np.empty(rows), np.empty(rows)
    for r in range(rows):
        total[r] = sums[head, row0 + r]
        m[r] = peaks[head, row0 + r]
        for d in range(p.head_dim):
            acc[r, d] *= total[r]
    attend(q, k, v, consecutive(row0, rows), key0, m, total, acc, p)
    for r in range(rows):
        sums[head, row0 + r] = total[r]
        peaks[head, row0 + r] = m[r]
        for d in range(p.head_dim):
            o[head, row0 + r, d] = stored(acc[r, d] / total[r], p) if total[r] > 0 else 0.0


@numeric
def multiply_scores(tensors, head, row0, rows, key0, keys, p):
    """A tile of S: scaled products, -inf where the mask hides the key."""
    q = fetch(tensors[0], head, row0, rows, p.head_dim)
    k = fetch(tensors[1], head // p.group, key0, keys, p.head_dim)
    for r in range(rows):
        low, high = visible_keys(row0 + r, p)
        for c in range(keys):
            s = 0.0
            for d in range(p.head_dim):
                s += q[r, d] * k[c, d]
            seen = low <= key0 + c < high
            tensors[2][head, row0 + r, key0 + c] = stored(s * p.scale, p) if seen else -np.inf


@numeric
def softmax_rows(tensors, head, row0, rows, p):
    """P = softmax(S) of whole rows; fully masked rows are 0."""
    s = fetch(tensors[0], head, row0, rows, p.seqlen_k)
    for r in range(rows):
        peak = -np.inf
        for c in range(p.seqlen_k):
            peak = max(peak, s[r, c])
        total = 0.0
        for c in range(p.seqlen_k):
            s[r, c] = np.exp(s[r, c] - peak) if peak > -np.inf else 0.0
            total += s[r, c]
        for c in range(p.seqlen_k):
            tensors[1][head, row0 + r, c] = stored(s[r, c] / total, p) if total > 0 else 0.0


@numeric
def multiply_output(tensors, acc, head, row0, key0, keys, p):
    """Adds the product of a tile of P and a tile of V to `acc`."""
    weights = tensors[0]
    v = fetch(tensors[1], head // p.group, key0, keys, p.head_dim)
    for r in range(acc.shape[0]):
        for c in range(keys):
            weight = weights[head, row0 + r, key0 + c]
            for d in range(p.head_dim):
                acc[r, d] += weight * v[c, d]


@numeric
def write_rows(tensor, matrix, row0, tile, p):
    """Writes a tile to consecutive rows of one matrix of a stack."""
    for r in range(tile.shape[0]):
        for c in range(tile.shape[1]):
            tensor[matrix, row0 + r, c] = stored(tile[r, c], p)
