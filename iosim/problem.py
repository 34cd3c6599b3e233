"""What is to be computed (a problem) and how it is cut up (a schedule), apart from any chip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iosim.errors import RequestError
from iosim.units import DTYPE_BYTES, SCALED_DTYPES, ceil_div, dtype_bytes

ALIGNMENTS = ("bottom-right", "top-left")
ORDERS = ("query", "head")
MODES = ("private", "shared")
MOST_SPILLS = 1 << 17  # 512 KB of local memory a thread (CUDA C++ Programming Guide, limits)


def require_at_least(least: int, record: object, *names: str) -> None:
    """Raises RequestError where a field of `record` is less than `least`."""
    for name in names:
        value = getattr(record, name)
        if value < least:
            raise RequestError(f"{name} must be at least {least}, not {value}")


def _require_choice(name: str, value: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise RequestError(f"{name} must be one of {', '.join(possible)}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """softmax(Q Kᵀ · scale + mask) V with Q [batch, heads, seqlen, head_dim].

    K and V are [batch, kv_heads, seqlen_k, head_dim]. `causal` lets row i see keys up to
    i + diagonal; `align` says where the diagonal ends when seqlen ≠ seqlen_k: bottom-right (last
    row sees the last key) or top-left (row i sees keys 0 … i). `window` W > 0 keeps the W keys
    that end at the diagonal, and without `causal` also the W - 1 keys after it. Where `kv_dtype` is
    not `dtype`, K and V are stored in it, which must take fewer bytes, with an fp32 scale for every
    row of each.
    """

    batch: int = 1
    heads: int = 16
    kv_heads: int = 0
    seqlen: int = 4096
    seqlen_k: int = 0
    head_dim: int = 128
    causal: bool = False
    align: str = "bottom-right"
    window: int = 0
    dtype: str = "fp16"
    kv_dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "seqlen_k", self.seqlen_k or self.seqlen)
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.dtype)
        require_at_least(1, self, "batch", "heads", "kv_heads", "seqlen", "seqlen_k", "head_dim")
        if self.heads % self.kv_heads:
            raise RequestError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly; "
                "heads must be a multiple of kv_heads"
            )
        if self.window < 0:
            raise RequestError(f"window must be 0 (none) or more, not {self.window}")
        _require_choice("align", self.align, ALIGNMENTS)
        dtype_bytes(self.dtype)
        if self.kv_dtype != self.dtype:
            _require_choice("kv_dtype", self.kv_dtype, (*SCALED_DTYPES, self.dtype))
            if dtype_bytes(self.kv_dtype) >= dtype_bytes(self.dtype):
                raise RequestError(
                    f"kv_dtype {self.kv_dtype} takes no fewer bytes than dtype {self.dtype}; "
                    "K and V with scales are for a wider dtype"
                )

    @property
    def scaled(self) -> bool:
        """Whether K and V are stored in another dtype, with scales."""
        return self.kv_dtype != self.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def diagonal(self) -> int:
        """The last key that row 0 may see in a causal mask."""
        return self.seqlen_k - self.seqlen if self.align == "bottom-right" else 0

    def visible(self, row: int) -> tuple[int, int]:
        """First and past-the-last key that `row` sees; (0, 0) where the row is fully masked."""
        centre = row + self.diagonal
        first = max(0, centre - self.window + 1) if self.window else 0
        last = self.seqlen_k
        if self.causal:
            last = min(last, centre + 1)
        elif self.window:
            last = min(last, centre + self.window)
        return (first, last) if first < last else (0, 0)

    def spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First and past-the-last key of every row, as `visible` gives them."""
        centre = np.arange(self.seqlen, dtype=np.int64) + self.diagonal
        first = np.zeros_like(centre)
        last = np.full_like(centre, self.seqlen_k)
        if self.window:
            first = np.maximum(first, centre - self.window + 1)
        if self.causal:
            last = np.minimum(last, centre + 1)
        elif self.window:
            last = np.minimum(last, centre + self.window)
        seen = first < last
        return np.where(seen, first, 0), np.where(seen, last, 0)

    @property
    def pairs(self) -> int:
        """Unmasked (row, key) pairs of one head."""
        if not self.causal and not self.window:
            return self.seqlen * self.seqlen_k
        first, last = self.spans()
        return int((last - first).sum())

    def matrix_flops(self, products: int = 2) -> int:
        """Flops of `products` matrix products over the unmasked pairs.

        Forward takes 2 (scores, output), standard backward 4, a backward that recomputes the
        scores 5: forward + backward is 6 or 7 products of 2·pairs·head_dim flops.
        """
        return products * 2 * self.pairs * self.head_dim * self.batch * self.heads

    @property
    def exps(self) -> int:
        """Exponentials of the softmax: one per unmasked pair."""
        return self.pairs * self.batch * self.heads


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """C [m, n] = A [m, k] · B [k, n], all row-major."""

    m: int = 4096
    n: int = 4096
    k: int = 4096
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        require_at_least(1, self, "m", "n", "k")
        dtype_bytes(self.dtype)

    def matrix_flops(self) -> int:
        """2·m·n·k."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A buffer of `elements` that is copied, filled, read with a stride or read again and again.

    `stride` (strided): every stride-th element of a buffer of elements × stride is read.
    `mode`, `reps` (reread): every block its own part `reps` times, or all the whole buffer once.
    """

    elements: int = 32 * 1024**2
    mode: str = "private"
    reps: int = 8
    stride: int = 1
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        require_at_least(1, self, "elements", "reps", "stride")
        _require_choice("mode", self.mode, MODES)
        dtype_bytes(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of the elements that are read or written."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A row-major matrix of which every row is worked on by itself (softmax, layernorm)."""

    rows: int = 16384
    cols: int = 4096
    dtype: str = "fp16"

    def __post_init__(self) -> None:
        require_at_least(1, self, "rows", "cols")
        dtype_bytes(self.dtype)

    @property
    def elements(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.cols


Problem = Attention | Gemm | Stream | Rows


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a problem is cut into blocks: tile sizes, order of blocks, pipelining, threads.

    `tile` is (m, n) or (m, n, k): query × key rows for attention (on a TPU block_q × block_k_major
    × block_k), m × n × k for GEMM. `order` query: the blocks of one head follow each other;
    head: one block of every head first. `group` is the number of tile rows that a GEMM launches
    together, `splits` the number of parts that the keys of a head are cut into, `cluster` the
    number of blocks that share loads, `variant` one of the ways in which a kernel can be run.
    0, () or "" leaves a value to the kernel. `shared_bytes` and `registers` override the kernel's
    own estimate with what a compiler reported; `spills` are registers of a thread that it said it
    spilled (None: those of the values that a kernel cannot do without which find no room).
    """

    tile: tuple[int, ...] = ()
    order: str = "query"
    group: int = 8
    stages: int = 0
    warps: int = 0
    registers: int = 0
    shared_bytes: int = 0
    spills: int | None = None
    splits: int = 0
    cluster: int = 0
    variant: str = ""

    def __post_init__(self) -> None:
        _require_choice("order", self.order, ORDERS)
        if any(t < 1 for t in self.tile):
            raise RequestError(
                f"tile sizes must be at least 1, not {'x'.join(map(str, self.tile))}"
            )
        for name in ("stages", "warps", "registers", "shared_bytes", "spills", "splits", "cluster"):
            if (getattr(self, name) or 0) < 0:
                raise RequestError(f"{name} must not be negative")
        require_at_least(1, self, "group")
        if (self.spills or 0) > MOST_SPILLS:
            raise RequestError(f"spills must be at most {MOST_SPILLS:,}, not {self.spills}")
        if self.stages > 8:
            raise RequestError(f"stages must be at most 8, not {self.stages}")


def tiles(length: int, tile: int) -> int:
    """How many tiles of `tile` cover `length`."""
    return ceil_div(length, tile)
