"""What is run on a GPU to learn its numbers: lists of small launches, each with a name and sizes.

A case is plain data, so that it can be listed, filtered and stored beside its counters on any host.
Nothing here is an attention or a matrix product of a real kernel: those judge the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch: the family of probes that runs it, and its sizes.

    `counted`: a profiler reads its counters too, besides what the launch says of itself.
    """

    family: str
    params: Mapping[str, Any]
    counted: bool = False

    @property
    def id(self) -> str:
        """Family and sizes, such as `read/bytes1048576/programs528`."""
        return "/".join([self.family, *(f"{name}{value}" for name, value in self.params.items())])


def probes(cores: int) -> list[Case]:
    """All microbenchmarks of a GPU with `cores` cores."""
    parts = (
        _latency, _loaded_latency, _bandwidth, _writes, _first_level, _products, _lanes, _units,
        _streams, _launch_cost,
    )  # fmt: skip
    return [case for part in parts for case in part(cores)]


def _latency(cores: int) -> Iterator[Case]:
    """A chain of dependent loads, alone on the chip: what each level answers after."""
    common = {"steps": 4096, "loaders": 0, "load": "none"}
    yield Case(family="chase", params={"bytes": 0, "cached": 1, **common})
    for size in (16 * KIB, 64 * KIB, 128 * KIB):
        yield Case(family="chase", params={"bytes": size, "cached": 1, **common})
    for size in (2, 4, 8, 12, 16, 20, 24, 28):
        yield Case(family="chase", params={"bytes": size * MIB, "cached": 0, **common})
    for size in (1024, 2048):
        yield Case(family="chase", params={"bytes": size * MIB, "cached": 0, **common})


def _loaded_latency(cores: int) -> Iterator[Case]:
    """The same while other cores stream through L2 or from HBM."""
    for loaders in (cores // 8, cores // 4, cores // 2, cores - 1):
        for size, load in ((8, "l2"), (8, "hbm"), (1024, "hbm")):
            params = {"bytes": size * MIB, "cached": 0, "steps": 2048}
            yield Case(family="chase", params={**params, "loaders": loaders, "load": load})


def _bandwidth(cores: int) -> Iterator[Case]:
    """Reads past L1 by footprint: every core its own share, or all cores all of it."""
    sizes = (2, 4, 8, 16, 24, 28, 30, 32, 36, 40, 44, 48, 56, 64, 96, 128, 1024, 2048)
    for own in (1, 0):
        for size in sizes:
            params = {"bytes": size * MIB, "programs": 8 * cores, "moved": 2048 * MIB, "own": own}
            yield Case(family="read", params=params, counted=True)


def _writes(cores: int) -> Iterator[Case]:
    """Streams that are read and written once: what is written back, what stays dirty."""
    for reads, writes in ((1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (1, 2), (4, 1), (0, 2)):
        params = {"reads": reads, "writes": writes, "bytes": 256 * MIB}
        yield Case(family="mixed", params=params, counted=True)
    for size in (8, 16, 20, 24, 26, 28, 30, 32, 36, 40, 48, 56, 64, 80, 96, 128):
        for reads in (0, 1):
            params = {"reads": reads, "writes": 1, "bytes": size * MIB}
            yield Case(family="mixed", params=params, counted=True)


def _first_level(cores: int) -> Iterator[Case]:
    """What L1 holds, and whether a store leaves its line there."""
    sizes = (16, 32, 64, 96, 128, 160, 192, 208, 224, 232, 240, 248, 256, 288, 320, 384, 512)
    for size in sizes:
        params = {"bytes": size * KIB, "programs": cores, "reps": 8}
        yield Case(family="private", params=params, counted=True)
    params = {"bytes": 8 * KIB, "programs": 4 * cores, "reps": 4}
    yield Case(family="stored-then-read", params=params, counted=True)


def _products(cores: int) -> Iterator[Case]:
    """The matrix unit alone, by tile, dtype and blocks on a core."""
    tiles = (
        (128, 256, 64, 8), (128, 128, 64, 8), (128, 128, 64, 4), (128, 64, 64, 8),
        (128, 64, 64, 4), (128, 32, 64, 4), (64, 256, 64, 4), (64, 128, 64, 4), (64, 64, 64, 4),
        (64, 32, 64, 4), (32, 128, 64, 4), (32, 64, 64, 4), (32, 32, 64, 4), (16, 64, 64, 4),
        (16, 128, 64, 4),
    )  # fmt: skip
    for m, n, k, warps in tiles:
        for per_core in (1, 2, 4):
            yield _product(m, n, k, warps, per_core * cores, "fp16")
    for dtype in ("bf16", "fp8", "tf32"):
        for m, n, k, warps in ((128, 128, 64, 8), (64, 64, 64, 4), (32, 64, 64, 4)):
            yield _product(m, n, k, warps, 2 * cores, dtype)


def _product(m: int, n: int, k: int, warps: int, programs: int, dtype: str) -> Case:
    steps = 64 * 128 * 128 * 64 // (m * n * k) * 16
    sizes = {"tile": f"{m}x{n}x{k}", "warps": warps, "programs": programs, "dtype": dtype}
    return Case(family="products", params={**sizes, "steps": steps}, counted=True)


def _lanes(cores: int) -> Iterator[Case]:
    """Exponentials and multiply-adds on numbers in registers."""
    for family in ("exp", "add"):
        for block, warps, per_core in ((1024, 4, 1), (1024, 4, 8), (2048, 4, 4), (2048, 8, 4)):
            sizes = {"block": block, "warps": warps, "programs": per_core * cores, "steps": 4096}
            yield Case(family=family, params=sizes)


def _units(cores: int) -> Iterator[Case]:
    """A product, exponentials and additions in one loop: which units work at the same time."""
    for wait in (0, 1):
        for exps, adds in ((0, 0), (1, 0), (2, 0), (0, 4), (0, 8), (1, 4), (2, 4)):
            for m, n, k, warps in ((64, 64, 64, 4), (128, 64, 64, 8), (128, 64, 128, 8)):
                for per_core in (1, 2, 3):
                    sizes = {"tile": f"{m}x{n}x{k}", "warps": warps, "programs": per_core * cores}
                    work = {"exps": exps, "adds": adds, "wait": wait, "steps": 2048}
                    yield Case(family="units", params={**sizes, **work})


def _streams(cores: int) -> Iterator[Case]:
    """Tiles from HBM, from L2 and shared by all, with products and without: power, speeds."""
    shapes = (
        (128, 128, 64, 8, 3, 2), (128, 128, 64, 8, 2, 2), (64, 64, 64, 4, 3, 4),
        (64, 64, 32, 4, 3, 6), (128, 64, 64, 8, 2, 3), (64, 128, 64, 4, 2, 4),
    )  # fmt: skip
    for m, n, k, warps, stages, per_core in shapes:
        for dot, wait in ((1, 0), (1, 1), (0, 0)):
            for where in ("shared", "l2", "hbm"):
                for steps in (64, 512):
                    sizes = {"tile": f"{m}x{n}x{k}", "warps": warps, "stages": stages}
                    work = {"dot": dot, "wait": wait, "where": where, "steps": steps}
                    params = {**sizes, "programs": 8 * per_core * cores, **work}
                    yield Case(family="stream", params=params, counted=True)


def _launch_cost(cores: int) -> Iterator[Case]:
    """Blocks that do nothing."""
    for warps in (1, 4, 8):
        for per_core in (1, 8, 64, 512):
            sizes = {"warps": warps, "programs": per_core * cores}
            yield Case(family="empty", params=sizes, counted=True)
