"""Problems and schedules: masks row by row against plain words, and values that cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.errors import RequestError
from iosim.problem import Attention, Gemm, Rows, Schedule, Stream
from iosim.problem_variants import BlockSparse, Decode, LatentDecode, PagedDecode

MASKS: dict[str, Any] = {
    "seqlen": st.integers(1, 40),
    "seqlen_k": st.integers(1, 40),
    "causal": st.booleans(),
    "align": st.sampled_from(["bottom-right", "top-left"]),
    "window": st.sampled_from([0, 0, 1, 2, 7, 50]),
}


def sees(problem: Attention, row: int, key: int) -> bool:
    """The words of `Attention` about one (row, key) pair."""
    diagonal = problem.seqlen_k - problem.seqlen if problem.align == "bottom-right" else 0
    distance = row + diagonal - key
    if problem.causal and distance < 0:
        return False
    return not problem.window or abs(distance) < problem.window


@settings(max_examples=300, deadline=None)
@given(fields=st.fixed_dictionaries(MASKS))
def test_spans_are_what_each_row_sees(fields: dict[str, Any]) -> None:
    problem = Attention(heads=2, head_dim=8, batch=3, **fields)
    first, last = problem.spans()
    pairs = 0
    for row in range(problem.seqlen):
        keys = [key for key in range(problem.seqlen_k) if sees(problem, row, key)]
        assert list(range(first[row], last[row])) == keys
        assert problem.visible(row) == (first[row], last[row])
        if not keys:
            assert (first[row], last[row]) == (0, 0)
        pairs += len(keys)
    assert problem.pairs == pairs
    assert problem.exps == pairs * 6
    assert problem.matrix_flops() == 4 * pairs * 8 * 6


@settings(max_examples=150, deadline=None)
@given(
    fields=st.fixed_dictionaries(MASKS),
    side=st.integers(1, 12),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 5),
)
def test_pairs_of_a_block_mask(
    fields: dict[str, Any], side: int, density: float, seed: int
) -> None:
    problem = BlockSparse(mask_block=side, density=density, pattern_seed=seed, **fields)
    blocks = problem.block_mask()
    assert blocks.shape == problem.block_shape
    pairs = sum(
        sees(problem, row, key) and bool(blocks[row // side, key // side])
        for row in range(problem.seqlen)
        for key in range(problem.seqlen_k)
    )
    assert problem.pairs == pairs
    if density == 1.0:
        plain = {f.name: getattr(problem, f.name) for f in dataclasses.fields(Attention)}
        assert pairs == Attention(**plain).pairs
    given_ = dataclasses.replace(problem, blocks=tuple(map(tuple, blocks.tolist())), density=0.0)
    assert given_.pairs == pairs


def test_pages_are_dealt_out_once() -> None:
    problem = PagedDecode(batch=3, seqlen_k=100, page_size=16)
    table = problem.page_table()
    assert table.shape == (3, 7)
    assert sorted(table.ravel().tolist()) == list(range(21))
    assert (table == problem.page_table()).all()
    assert table.ravel().tolist() != list(range(21))
    ordered = dataclasses.replace(problem, pattern_seed=0).page_table()
    assert ordered.ravel().tolist() == list(range(21))
    other = dataclasses.replace(problem, pattern_seed=2).page_table()
    assert (other != table).any()


def test_defaults_of_the_other_problems() -> None:
    assert (Decode().seqlen, Decode().seqlen_k, Decode().kv_heads) == (1, 8192, 16)
    latent = LatentDecode(batch=2, seqlen_k=100)
    assert (latent.heads, latent.kv_heads, latent.head_dim, latent.latent_dim) == (128, 1, 576, 512)
    assert latent.matrix_flops() == 2 * 100 * (576 + 512) * 2 * 128
    with pytest.raises(ValueError, match="two products"):
        latent.matrix_flops(5)
    assert Rows(rows=3, cols=5).elements == 15


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (Attention, {"seqlen": 0}, "seqlen must be at least 1, not 0"),
    (Attention, {"heads": 3, "kv_heads": 2}, "heads must be a multiple of kv_heads"),
    (Attention, {"window": -1}, "window must be 0 (none) or more, not -1"),
    (Attention, {"align": "middle"}, "align must be one of bottom-right, top-left"),
    (Attention, {"dtype": "fp12"}, "fp12"),
    (Attention, {"kv_dtype": "fp12"}, "kv_dtype must be one of fp8, int8, fp16"),
    (Decode, {"seqlen_k": -5}, "seqlen_k must be at least 1"),
    (PagedDecode, {"page_size": 0}, "page_size must be at least 1, not 0"),
    (PagedDecode, {"pattern_seed": -1}, "pattern_seed must be at least 0"),
    (LatentDecode, {"kv_heads": 2}, "one KV head for all, not 2"),
    (LatentDecode, {"latent_dim": 0}, "latent_dim must be from 1 to head_dim (576), not 0"),
    (LatentDecode, {"latent_dim": 577}, "latent_dim must be from 1 to head_dim (576), not 577"),
    (BlockSparse, {"mask_block": 0}, "mask_block must be at least 1"),
    (BlockSparse, {"density": 2.0}, "density must be from 0 to 1, not 2.0"),
    (BlockSparse, {"density": float("nan")}, "density must be from 0 to 1, not nan"),
    (BlockSparse, {"pattern_seed": -3}, "pattern_seed must be at least 0"),
    (BlockSparse, {"blocks": ((True,),)}, "blocks must be 32 rows of 32"),
    (
        BlockSparse,
        {"seqlen": 256, "blocks": ((True, True), (True,))},
        "blocks must be 2 rows of 2",
    ),
    (Rows, {"rows": 0}, "rows must be at least 1"),
    (Rows, {"cols": -1}, "cols must be at least 1"),
    (Rows, {"dtype": "float"}, "float"),
    (Gemm, {"m": 0}, "m must be at least 1"),
    (Stream, {"mode": "both"}, "mode must be one of private, shared"),
    (Schedule, {"tile": (0, 64)}, "tile sizes must be at least 1"),
    (Schedule, {"spills": -1}, "spills must not be negative"),
    (Schedule, {"spills": 200_000}, "spills must be at most 131,072, not 200000"),
    (Schedule, {"splits": -1}, "splits must not be negative"),
    (Schedule, {"cluster": -1}, "cluster must not be negative"),
    (Schedule, {"registers": -1}, "registers must not be negative"),
    (Schedule, {"stages": 9}, "stages must be at most 8"),
    (Schedule, {"group": 0}, "group must be at least 1"),
]


@pytest.mark.parametrize(("kind", "fields", "words"), BAD, ids=str)
def test_values_that_cannot_be(kind: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        kind(**fields)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_spans_of_a_million_rows() -> None:
    problem = Attention(seqlen=1 << 20, causal=True, window=4096)
    first, last = problem.spans()
    assert int((last - first).max()) == 4096
    assert problem.pairs == int(np.minimum(np.arange(1, (1 << 20) + 1), 4096).sum())
