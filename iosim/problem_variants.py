"""Attention problems of serving and of sparsity: what a kernel of their own has to know besides.

Each is an `Attention`, so that every kernel that takes one can be compared on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iosim.errors import RequestError
from iosim.problem import Attention, require_at_least
from iosim.units import ceil_div


@dataclass(frozen=True, kw_only=True)
class Decode(Attention):
    """Attention of one new token (or a few) with all the keys of its past."""

    seqlen: int = 1
    seqlen_k: int = 8192


@dataclass(frozen=True, kw_only=True)
class PagedDecode(Decode):
    """Decode with K and V in pages of `page_size` keys, found through a table of page numbers.

    The pages of all sequences are dealt out of one pool in an order drawn from `pattern_seed`, as a
    server's pool is after a while; 0 leaves them in order.
    """

    page_size: int = 16
    pattern_seed: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "page_size")
        require_at_least(0, self, "pattern_seed")

    @property
    def pages(self) -> int:
        """Pages of one sequence, the last one perhaps not full."""
        return ceil_div(self.seqlen_k, self.page_size)

    def page_table(self) -> NDArray[np.int64]:
        """[batch, pages]: the number of each page in the pool."""
        pool = np.arange(self.batch * self.pages, dtype=np.int64)
        if self.pattern_seed:
            np.random.default_rng(self.pattern_seed).shuffle(pool)
        return pool.reshape(self.batch, self.pages)


@dataclass(frozen=True, kw_only=True)
class LatentDecode(Decode):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with the projections absorbed.

    One row per token serves all heads: its `head_dim` elements are the key (latent and rotary
    part), the first `latent_dim` of them the value.
    """

    heads: int = 128
    kv_heads: int = 1
    head_dim: int = 576
    latent_dim: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads != 1:
            raise RequestError(f"latent attention has one KV head for all, not {self.kv_heads}")
        if not 1 <= self.latent_dim <= self.head_dim:
            raise RequestError(
                f"latent_dim must be from 1 to head_dim ({self.head_dim}), not {self.latent_dim}"
            )

    def matrix_flops(self, products: int = 2) -> int:
        """Scores over head_dim and outputs over latent_dim; only the forward pass is defined."""
        if products != 2:
            raise ValueError(f"latent attention has two products, not {products}")
        return 2 * self.pairs * (self.head_dim + self.latent_dim) * self.batch * self.heads


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Attention):
    """Attention in which blocks of mask_block × mask_block pairs are seen or not, for all heads.

    `blocks` is the mask, block row by block row; empty: each block is seen with probability
    `density`, drawn from `pattern_seed`. A causal or windowed mask holds besides.
    """

    mask_block: int = 128
    density: float = 0.25
    pattern_seed: int = 1
    blocks: tuple[tuple[bool, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "mask_block")
        require_at_least(0, self, "pattern_seed")
        if not 0 <= self.density <= 1:
            raise RequestError(f"density must be from 0 to 1, not {self.density}")
        height, width = self.block_shape
        if self.blocks and {(len(self.blocks), len(row)) for row in self.blocks} != {
            (height, width)
        }:
            raise RequestError(f"blocks must be {height} rows of {width} for this problem")

    @property
    def block_shape(self) -> tuple[int, int]:
        """Block rows and block columns of the mask."""
        return ceil_div(self.seqlen, self.mask_block), ceil_div(self.seqlen_k, self.mask_block)

    def block_mask(self) -> NDArray[np.bool_]:
        """[block rows, block columns]: which blocks are seen."""
        if self.blocks:
            return np.array(self.blocks, dtype=np.bool_)
        rng = np.random.default_rng(self.pattern_seed)
        return rng.random(self.block_shape) < self.density

    def keys_of_rows(self) -> NDArray[np.int64]:
        """[seqlen]: how many keys each row sees, by blocks and mask."""
        seen = np.pad(self.block_mask(), ((0, 0), (0, 1))).astype(np.int64)
        before = np.cumsum(seen, axis=1) - seen  # blocks seen to the left of each
        row_block = np.arange(self.seqlen) // self.mask_block
        low, high = (
            before[row_block, block] * self.mask_block + seen[row_block, block] * inside
            for block, inside in (divmod(key, self.mask_block) for key in self.spans())
        )
        return high - low

    @property
    def pairs(self) -> int:
        """Pairs of one head that the blocks and the mask let through."""
        return int(self.keys_of_rows().sum())
