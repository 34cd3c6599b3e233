"""How quantities are called and written: the same words in every table and figure."""

from __future__ import annotations

from collections.abc import Sequence

from iosim.problem import Attention, Gemm, Problem, Rows, Schedule
from iosim.problem_variants import BlockSparse, LatentDecode, PagedDecode
from iosim.units import format_bytes

#: the fields of traffic, as a reader says them
LEVELS = {
    "dram_read_bytes": "HBM read",
    "dram_write_bytes": "HBM write",
    "dirty_left_bytes": "left dirty in L2",
    "l1_fill_bytes": "L1 fill",
    "l1_write_bytes": "L1 write",
    "l2_hit_bytes": "L2 hit",
    "l2_from_l1_bytes": "L2 from L1",
    "l2_fabric_bytes": "L2 fabric",
    "cmem_read_bytes": "CMEM read",
    "cmem_write_bytes": "CMEM write",
    "vmem_fill_bytes": "VMEM fill",
    "vmem_drain_bytes": "VMEM drain",
}
_RESOURCES = {"hbm": "HBM", "l1": "L1 fill", "l2": "L2", "cmem": "CMEM", "vmem": "VMEM"}
NOTHING = "–"


def resource(name: str | None) -> str:
    """A resource of the floor: `HBM`, `tensor`."""
    return _RESOURCES.get(name, name) if name else NOTHING


def ratio(value: float, of: float) -> str:
    """`value` as a multiple: `1.00 ×`, `165 ×`; nothing where there is nothing to compare with."""
    if not of:
        return NOTHING
    times = value / of
    return (
        f"{times:.2f} ×" if times < 10 else f"{times:.1f} ×" if times < 100 else f"{times:,.0f} ×"
    )


def percent(value: float) -> str:
    """A share: `3.1 %`, `0.04 %`, `100 %`."""
    share = 100 * value
    if share == 0 or share >= 99.95:
        return f"{share:.0f} %"
    return f"{share:.1f} %" if share >= 1 else f"{share:.2g} %"


def seconds(value: float) -> str:
    """A time: `179 µs`, `1.24 ms`."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 0.9995:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def problems_text(problems: Sequence[Problem], names: Sequence[str]) -> str:
    """Several problems in words: the one they all are, or in which of `names` they differ."""
    texts = list(dict.fromkeys(problem_text(problem) for problem in problems))
    if len(texts) == 1:
        return texts[0]
    apart = [name for name in names if name not in ("profile", "kernel")]
    return f"{len(texts)} problems{', by ' if apart else ''}{', '.join(apart)}"


def tile_text(tile: tuple[int, ...]) -> str:
    """`128x64`, as it is written on the command line."""
    return "x".join(map(str, tile)) or NOTHING


def problem_text(problem: Problem) -> str:
    """A problem in words."""
    if isinstance(problem, Attention):
        return _attention_text(problem)
    if isinstance(problem, Gemm):
        m, n, k = (f"{side:,}" for side in (problem.m, problem.n, problem.k))
        return f"matrix product C [{m} × {n}] = A [{m} × {k}] · B [{k} × {n}], {problem.dtype}"
    if isinstance(problem, Rows):
        return f"{problem.rows:,} rows of {problem.cols:,} elements of {problem.dtype}"
    stride = f", stride {problem.stride}" if problem.stride > 1 else ""
    return (
        f"stream of {problem.elements:,} elements of {problem.dtype} "
        f"({format_bytes(problem.bytes)}){stride}"
    )


def _attention_text(p: Attention) -> str:
    kv = f" ({p.kv_heads} of K and V)" if p.kv_heads != p.heads else ""
    heads = f"{p.heads} head{'s' if p.heads > 1 else ''}{kv}"
    parts = [f"batch {p.batch}", heads, f"{p.seqlen:,} queries × {p.seqlen_k:,} keys"]
    parts += [f"head_dim {p.head_dim}", p.dtype]
    if p.scaled:
        parts.append(f"K and V in {p.kv_dtype} with scales")
    if isinstance(p, PagedDecode):
        parts.append(f"pages of {p.page_size} keys")
    if isinstance(p, LatentDecode):
        parts.append(f"values of {p.latent_dim}")
    if isinstance(p, BlockSparse):
        parts.append(f"blocks of {p.mask_block}, {p.block_mask().mean():.0%} of them seen")
    if p.causal:
        parts.append(f"causal{'' if p.seqlen == p.seqlen_k else f' ({p.align})'}")
    if p.window:
        parts.append(f"window {p.window:,}")
    return f"attention: {', '.join(parts)}"


def schedule_text(schedule: Schedule, machine: str) -> str:
    """A schedule in words: what is not the tile."""
    parts = [f"order {schedule.order}"]
    if machine == "gpu":
        parts.append(f"{schedule.stages} stages")
        if schedule.warps:  # 0: they follow from the tile
            parts.append(f"{schedule.warps} warps")
    if schedule.splits:
        parts.append(f"{schedule.splits} split{'s' if schedule.splits > 1 else ''}")
    if schedule.cluster > 1:
        parts.append(f"clusters of {schedule.cluster}")
    if schedule.variant:
        parts.append(schedule.variant)
    return ", ".join(parts)
