"""What one simulation gives: bytes per level and operand, work, bounds, fit, limiter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from iosim.chip import Chip
from iosim.launch import ClosedForm, Launch, occupancy
from iosim.problem import Problem, Schedule
from iosim.timing.roofline import limiter
from iosim.traffic import FIELDS, OperandTraffic, Traffic, Work

FORMAT = 1

_OPERAND_FIELDS = {
    "gpu": (
        "dram_read_bytes", "dram_write_bytes", "l1_fill_bytes", "l1_write_bytes", "l2_hit_bytes",
        "unique_bytes",
    ),
    "tpu": (
        "dram_read_bytes", "dram_write_bytes", "vmem_fill_bytes", "vmem_drain_bytes", "fetches",
        "unique_bytes",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """One launch: what it moved and computed, and the least time of each resource in seconds."""

    launch: Launch
    traffic: Traffic
    operands: Mapping[str, OperandTraffic]
    floor_times_s: Mapping[str, float]
    makespan_cycles: float | None

    @property
    def floor_s(self) -> float:
        """No run of this launch at this clock can be faster."""
        return max(self.floor_times_s.values())


@dataclass(frozen=True, kw_only=True)
class Result:
    """One kernel on one chip. `launches` is empty where the block does not fit (`why_not`)."""

    kernel: str
    chip: Chip
    problem: Problem
    schedule: Schedule
    cache: str
    seeds: tuple[int, ...]
    clock_hz: float
    planned: tuple[Launch, ...]
    launches: tuple[LaunchResult, ...]
    closed_forms: tuple[ClosedForm, ...]
    why_not: str | None = None
    band: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether every launch fits the chip."""
        return self.why_not is None

    @property
    def traffic(self) -> Traffic:
        """Bytes of all launches; what is dirty at the end counts once."""
        total = sum((run.traffic for run in self.launches), Traffic())
        left = self.launches[-1].traffic.dirty_left_bytes if self.launches else 0
        return dataclasses.replace(total, dirty_left_bytes=left)

    @property
    def operands(self) -> dict[str, OperandTraffic]:
        """Bytes per operand over all launches; unique bytes count once."""
        merged: dict[str, OperandTraffic] = {}
        for run in self.launches:
            for name, row in run.operands.items():
                before = merged.get(name, OperandTraffic())
                unique = max(before.unique_bytes, row.unique_bytes)
                merged[name] = dataclasses.replace(before + row, unique_bytes=unique)
        return merged

    @property
    def work(self) -> Work:
        """Arithmetic of all launches."""
        return sum((launch.work for launch in self.planned), Work())

    @property
    def footprint_bytes(self) -> int:
        """On-chip memory of the largest block: shared memory, or VMEM."""
        prints = [launch.footprint for launch in self.planned]
        return max(f.vmem_bytes if self.chip.grid else f.shared_bytes for f in prints)

    @property
    def compulsory(self) -> tuple[int, int]:
        """Bytes that must be read from and written to HBM once whatever the kernel does."""
        unique = {o.name: o for launch in self.planned for o in launch.operands}.values()
        read = sum(o.unique_bytes for o in unique if o.role == "in")
        written = sum(o.unique_bytes for o in unique if o.role == "out")
        return read, written

    @property
    def floor_s(self) -> float:
        """Least time of all launches, one after the other."""
        return sum(run.floor_s for run in self.launches)

    @property
    def limiter(self) -> str | None:
        """The resource that sets the floor of the longest launch."""
        if not self.launches:
            return None
        return limiter(max(self.launches, key=lambda run: run.floor_s).floor_times_s)

    def as_json(self) -> dict[str, Any]:
        """One entry of `results` in the JSON that scripts rely on (format 1)."""
        read, written = self.compulsory
        machine = self.chip.machine
        return {
            "kernel": self.kernel,
            "profile": self.chip.name,
            "problem": dataclasses.asdict(self.problem),
            "tile": dict(zip("mnk", self.schedule.tile, strict=False)),
            "order": self.schedule.order,
            "dtype": self.problem.dtype,
            "schedule": _schedule(self.schedule),
            "cache": self.cache,
            "seeds": list(self.seeds),
            "fits": self.fits,
            "why_not": self.why_not,
            "footprint_bytes": self.footprint_bytes,
            "traffic": _pick(self.traffic, FIELDS[machine]) if self.launches else None,
            "operands": {
                name: _pick(row, _OPERAND_FIELDS[machine]) for name, row in self.operands.items()
            },
            "band": {name: list(span) for name, span in self.band.items()},
            "compulsory": {"read_bytes": read, "write_bytes": written},
            "closed_forms": [dataclasses.asdict(form) for form in self.closed_forms],
            **dataclasses.asdict(self.work),
            "sm_cycles": None,
            "clock_hz": self.clock_hz,
            "time_s": None,
            "floor_s": self.floor_s if self.launches else None,
            "limiter": self.limiter,
            "launches": [self._launch_json(run) for run in self.launches],
        }

    def _launch_json(self, run: LaunchResult) -> dict[str, Any]:
        machine = self.chip.machine
        limits = self.chip.limits
        print_ = run.launch.footprint
        return {
            "name": run.launch.name,
            "blocks": run.launch.blocks,
            "footprint": dataclasses.asdict(print_),
            "occupancy": occupancy(print_, limits) if limits else None,
            "traffic": _pick(run.traffic, FIELDS[machine]),
            "operands": {
                name: _pick(row, _OPERAND_FIELDS[machine]) for name, row in run.operands.items()
            },
            **dataclasses.asdict(run.launch.work),
            "floor_s": run.floor_s,
            "floor_times_s": dict(run.floor_times_s),
            "limiter": limiter(run.floor_times_s),
        }


def document(results: list[Result]) -> dict[str, Any]:
    """The whole JSON document of several results."""
    return {"format": FORMAT, "results": [result.as_json() for result in results]}


def _pick(record: object, names: tuple[str, ...]) -> dict[str, int]:
    return {name: getattr(record, name) for name in names}


def _schedule(schedule: Schedule) -> dict[str, Any]:
    return {
        "group": schedule.group,
        "stages": schedule.stages,
        "warps": schedule.warps,
        "registers": schedule.registers,
        "spills": schedule.spills,
        "splits": schedule.splits,
        "cluster": schedule.cluster,
        "variant": schedule.variant,
    }
