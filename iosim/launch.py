"""A launch: what is not in a block. Grid, operands, occupancy, pipelining; and what a kernel is.

A kernel turns (problem, schedule, chip) into one launch or several that run one after the other
and share the cache. Nothing here knows an algorithm or a chip by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from iosim.chip import Chip, Limits
from iosim.errors import DoesNotFitError, RequestError
from iosim.problem import Problem, Schedule
from iosim.traffic import Work
from iosim.units import format_bytes, format_capacity, round_up

REGISTER_BYTES = 4

#: emit(block, first, last, params, out, tensors) -> (operations written, block is done)
BlockProgram = Callable[..., tuple[int, bool]]


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One tensor of a launch: where it lies and how much of it the problem needs.

    `unique_bytes` counts every byte once that has to be read (role in) or written (role out);
    an operand of role scratch passes from one launch to the next, or from a block to itself, and
    is compulsory in neither. One of size 0 only keeps its place: this launch has none.
    """

    name: str
    role: str  # in | out | scratch
    address: int
    size_bytes: int
    unique_bytes: int


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """On-chip memory of one block.

    GPU: `shared_bytes` and `registers` per thread (an estimate unless a compiler reported it), and
    how many more a thread would need, which spill to local memory.
    TPU: VMEM as windows (buffers × block), scratch and the compiler's temporaries.
    """

    shared_bytes: int = 0
    registers: int = 0
    threads: int = 0
    spilled_registers: int = 0
    window_bytes: int = 0
    scratch_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def local_bytes(self) -> int:
        """Local memory of a block that spills."""
        return self.spilled_registers * REGISTER_BYTES * self.threads

    @property
    def vmem_bytes(self) -> int:
        """VMEM of one grid step: windows, scratch and temporaries."""
        return self.window_bytes + self.scratch_bytes + self.temporary_bytes


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel launch. `params` is the record that `program` reads its sizes from."""

    name: str
    program: BlockProgram
    params: Any  # a NumPy record, one dtype per program
    blocks: int
    steps: int  # greatest number of steps of a block
    ops_per_step: int
    ops_at_ends: int  # operations before the first step and after the last together
    operands: tuple[Operand, ...]
    footprint: Footprint
    work: Work
    dtype: str
    stages: int = 1
    matrix_rows: int = 1 << 30  # height of its matrix products: decides the instruction path
    cluster: int = 1  # consecutive blocks that run at the same time and share multicast loads


@dataclass(frozen=True, kw_only=True)
class ClosedForm:
    """What pencil and paper say about a kernel: the formula and its value, beside the counts."""

    quantity: str
    formula: str
    value: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One algorithm: how it is described to a reader, cut into launches, and checked.

    `variants` are the ways in which it can be run, the one taken by default first. `sketch` is a
    small problem and tile whose operations show a reader which tile is read when.
    """

    name: str
    summary: str
    problem: type[Problem]
    loops: str  # the loop nest in words
    machines: tuple[str, ...]
    parameters: Mapping[str, str]
    default_schedule: Callable[[Problem, Chip], Schedule]
    launches: Callable[[Problem, Schedule, Chip], tuple[Launch, ...]]
    closed_forms: Callable[[Problem, Schedule, Chip], tuple[ClosedForm, ...]]
    sources: tuple[str, ...] = field(default=())
    variants: tuple[str, ...] = field(default=())
    sketch: tuple[Problem, Schedule] | None = None


def require_form(kernel: Kernel, chip: Chip) -> None:
    """Raises RequestError where `kernel` has no form for the machine that `chip` is."""
    if chip.machine not in kernel.machines:
        raise RequestError(
            f"kernel {kernel.name} has no form for {chip.name} (a {chip.machine}); "
            f"it has: {', '.join(kernel.machines)}"
        )


def why_not(footprint: Footprint, chip: Chip) -> str | None:
    """One line that says why a block does not fit the chip; None where it fits."""
    if chip.grid is not None:
        need, limit = footprint.vmem_bytes, chip.grid.scoped_limit_bytes
        if need > limit:
            return (
                f"windows {format_capacity(footprint.window_bytes)} + scratch "
                f"{format_capacity(footprint.scratch_bytes)} + temporaries "
                f"{format_capacity(footprint.temporary_bytes)} = {need:,} bytes of VMEM "
                f"> scoped limit {limit:,}"
            )
        return None
    assert chip.limits is not None
    limits = chip.limits
    if footprint.shared_bytes > limits.shared_per_block_bytes:
        return (
            f"shared memory {footprint.shared_bytes:,} bytes > "
            f"{limits.shared_per_block_bytes:,} that one block may use"
        )
    if footprint.registers > limits.registers_per_thread:
        return f"{footprint.registers} registers of a thread > {limits.registers_per_thread}"
    warps = footprint.threads // limits.threads_per_warp
    if warps > limits.warps_per_block:
        return f"{warps} warps per block > {limits.warps_per_block}"
    if blocks_per_core(footprint, limits) == 0:
        return (
            f"{footprint.registers} registers × {footprint.threads} threads > "
            f"{limits.registers_per_core:,} registers of a core"
        )
    return None


def tensors_too_large(planned: Sequence[Launch], chip: Chip) -> str | None:
    """One line that says that the tensors of the launches exceed the off-chip memory, or None."""
    sizes = {o.name: o.size_bytes for launch in planned for o in launch.operands}
    total, capacity = sum(sizes.values()), chip.dram.capacity_bytes
    if total <= capacity:
        return None
    name = max(sizes, key=lambda key: sizes[key])
    return (
        f"tensors of {format_bytes(total)} (the largest, {name}: {format_bytes(sizes[name])}) "
        f"> HBM of {format_bytes(capacity)}"
    )


def occupancy(footprint: Footprint, limits: Limits) -> dict[str, int]:
    """Blocks per core that each resource allows: shared memory, registers, warps, blocks.

    Shared memory: ⌊pool / (block + reserve)⌋; registers are handed out to warps in units
    (CUDA C++ Programming Guide, CUDA occupancy calculator).
    """
    shared = footprint.shared_bytes + limits.shared_reserved_per_block_bytes
    warps = max(1, -(-footprint.threads // limits.threads_per_warp))
    per_warp = round_up(
        max(1, footprint.registers) * limits.threads_per_warp, limits.registers_per_warp_unit
    )
    return {
        "shared memory": limits.shared_per_core_bytes // shared,
        "registers": (limits.registers_per_core // per_warp) // warps,
        "warps": limits.warps_per_core // warps,
        "blocks": limits.blocks_per_core,
    }


def blocks_per_core(footprint: Footprint, limits: Limits) -> int:
    """Blocks resident on one core: the least of what the resources allow."""
    return min(occupancy(footprint, limits).values())


def require_fit(launch: Launch, chip: Chip) -> None:
    """Raises DoesNotFitError where a block of `launch` does not fit `chip`."""
    reason = why_not(launch.footprint, chip)
    if reason:
        raise DoesNotFitError(f"{launch.name} does not fit {chip.name}: {reason}")
