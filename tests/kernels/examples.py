"""What block programs are tried on: small attention problems of every kind, their arrays, chips."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from iosim.chip import Chip
from iosim.kernels import reference
from iosim.problem import Attention
from iosim.profiles import load_profile


def chip_of(cores: int, rows: int = 4, profile: str = "h200") -> Chip:
    """A chip with `cores` cores, whose warp-group products have `rows` rows.

    On it small problems have many tiles for each block.
    """
    chip = load_profile(profile)
    rates = tuple(replace(r, min_rows=rows if r.min_rows > 1 else 1) for r in chip.rates)
    return replace(chip, cores=replace(chip.cores, count=cores), rates=rates)


@st.composite
def attention_problems(draw, longest: int = 24, longest_k: int = 24) -> Attention:
    """Small attention problems with every kind of mask and grouping, fully masked rows included."""
    kv_heads = draw(st.integers(1, 2))
    return Attention(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        seqlen=draw(st.integers(1, longest)),
        seqlen_k=draw(st.integers(1, longest_k)),
        head_dim=draw(st.sampled_from([1, 3, 8])),
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.sampled_from([0, 0, 1, 2, 5, 30])),
        dtype="bf16",
    )


def attention_arrays(problem: Attention, peak: float = 0.0) -> dict:
    """Random Q, K, V and room for what the attention kernels write; logits up to ±`peak`."""
    rng = np.random.default_rng(problem.seqlen * 1000 + problem.seqlen_k)
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    q = rng.standard_normal((heads, problem.seqlen, problem.head_dim))
    k, v = rng.standard_normal((2, kv_heads, problem.seqlen_k, problem.head_dim))
    if peak:
        logits = reference.scores(q, k, problem)
        q *= peak / max(1e-9, np.abs(logits[np.isfinite(logits)]).max(initial=0.0))
    return {
        "Q": q,
        "K": k,
        "V": v,
        "O": np.zeros_like(q),
        "lse": np.zeros((heads, problem.seqlen)),
        "l": np.zeros((heads, problem.seqlen)),
        "m": np.full((heads, problem.seqlen), -np.inf),
        "S": np.zeros((heads, problem.seqlen, problem.seqlen_k)),
        "P": np.zeros((heads, problem.seqlen, problem.seqlen_k)),
    }
