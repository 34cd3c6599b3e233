"""From flags to runs: which kernels and chips are meant, and whether the flags go together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iosim.chip import Chip
from iosim.cli.flags import RUN_FLAGS, Values
from iosim.errors import RequestError
from iosim.kernels import kernel_names, load_kernel
from iosim.launch import Kernel
from iosim.problem import Attention
from iosim.profiles import load_profile, profile_names
from iosim.study.sweep import How, Point, check, points, takes

DEFAULT_KERNELS = ("standard", "flash1", "flash2", "flash3")
GPU_ONLY = ("warps", "registers", "spills", "cluster")
AXES = (*(name.removeprefix("--").replace("-", "_") for name, *_ in RUN_FLAGS), "causal")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The runs that were asked for, and what to say about how the flags were understood."""

    kernels: tuple[Kernel, ...]
    chips: tuple[Chip, ...]
    axes: Mapping[str, tuple[Any, ...]]
    how: How
    notes: tuple[str, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """Every run."""
        return points(self.kernels, self.chips, self.axes)


def request_of(values: Values) -> Request:
    """The runs that the flags ask for. Raises RequestError where they do not go together."""
    names = values.many("profile")
    if not names:
        raise RequestError(f"--profile is missing (possible: {', '.join(profile_names())})")
    chips = tuple(load_profile(name) for name in names)
    axes = {name: values.many(name) for name in AXES if name in values.given}
    kernels, left_out = _kernels(values, chips, axes)
    _require_meaning(axes, kernels, chips)
    how = _how(values, chips)
    notes = [
        f"{name} = {chip.name}, {chip.title}"
        for name, chip in zip(names, chips, strict=True)
        if name in chip.aliases
    ]
    notes += [f"left out: {reason}" for reason in left_out]
    return Request(kernels=kernels, chips=_distinct(chips), axes=axes, how=how, notes=tuple(notes))


def _kernels(
    values: Values, chips: Sequence[Chip], axes: Mapping[str, tuple[Any, ...]]
) -> tuple[tuple[Kernel, ...], list[str]]:
    """Those asked for, all of which must run on all chips; else the defaults that do.

    Also why each of the other defaults does not. The first of them is never left out for its sizes.
    """
    names = values.many("kernel") or DEFAULT_KERNELS
    kernels = tuple(load_kernel(name) for name in names)
    if "kernel" not in values.given:
        reasons = [_unfit(kernel, chips, axes) for kernel in kernels[1:]]
        others = (k for k, reason in zip(kernels[1:], reasons, strict=True) if reason is None)
        return (kernels[0], *others), [reason for reason in reasons if reason]
    for chip in chips:
        without = [k.name for k in kernels if chip.machine not in k.machines]
        if without:
            raise RequestError(
                f"{', '.join(without)} {_have(without)} no form for {chip.name}, "
                f"a {chip.machine.upper()}; leave it out, or see iosim kernels"
            )
    return kernels, []


def _unfit(
    kernel: Kernel, chips: Sequence[Chip], axes: Mapping[str, tuple[Any, ...]]
) -> str | None:
    """Why a kernel that nobody named cannot be run on all chips; None where it can."""
    for chip in chips:
        if chip.machine not in kernel.machines:
            return f"{kernel.name} has no form for a {chip.machine.upper()}"
        try:
            check(points([kernel], [chip], axes))
        except RequestError as error:
            return f"{kernel.name} on {chip.name}: {error}"
    return None


def _require_meaning(
    axes: Mapping[str, tuple[Any, ...]], kernels: Sequence[Kernel], chips: Sequence[Chip]
) -> None:
    """Raises RequestError for a flag that would silently do nothing."""
    if {"bytes", "elements"} <= axes.keys():
        raise RequestError("--bytes and --elements say the same thing; give one of them")
    for name in axes:
        if not any(takes(kernel, name) for kernel in kernels):
            others = _who_takes(name)
            where = f"it belongs to {', '.join(others)}" if others else "no kernel takes it"
            raise RequestError(
                f"{_flag(name)} means nothing to {', '.join(k.name for k in kernels)}; {where}"
            )
        if name in GPU_ONLY and not any(chip.machine == "gpu" for chip in chips):
            raise RequestError(
                f"{_flag(name)} means nothing on {chips[0].name}; it belongs to GPUs"
            )
    attention = [kernel.name for kernel in kernels if issubclass(kernel.problem, Attention)]
    gpus = [chip.name for chip in chips if chip.machine == "gpu"]
    if attention and gpus and any(len(tile) == 3 for tile in axes.get("tile", ())):
        raise RequestError(
            f"{attention[0]} on {gpus[0]} takes a tile of two sizes, query × key rows"
        )


def _who_takes(name: str) -> list[str]:
    return [k for k in kernel_names() if takes(load_kernel(k), name)]


def _how(values: Values, chips: Sequence[Chip]) -> How:
    cache = values.one("cache", "cold")
    cacheless = [chip.name for chip in chips if "l2" not in chip.levels]
    if cache == "warm" and cacheless:
        raise RequestError(f"--cache warm means nothing on {cacheless[0]}, which has no cache")
    first = values.one("seed", 0)
    seeds = range(first, first + values.one("seeds", 1))
    return How(cache=cache, seeds=tuple(seeds), clock_hz=values.one("clock", 0.0))


def _distinct(chips: Iterable[Chip]) -> tuple[Chip, ...]:
    return tuple({chip.name: chip for chip in chips}.values())


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
