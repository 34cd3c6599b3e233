"""What the jitted parts need to know of a chip, in one flat record: geometry, latencies, costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.cost import UNITS, unit_costs
from iosim.launch import Launch
from iosim.memory.cache import run_lines

_INT = (
    "line_shift", "sector_shift", "sector_bytes", "sector_all", "pair_mask",
    "partitions", "partition_shift", "home_shift", "group_shift", "run_shift", "l2_runs",
)  # fmt: skip
_CACHE = ("l2_sets", "l2_ways", "l2_run", "l1_sets", "l1_ways", "dirty_max")
_FLOAT = (
    "l2_runs_inverse", "jitter", "near_hit", "far_hit", "near_miss", "far_miss", "l1_hit",
    "port_bytes_per_cycle", "l2_bytes_per_cycle", "dram_bytes_per_cycle",
)  # fmt: skip

MODEL_DTYPE: np.dtype[Any] = np.dtype(
    [(name, np.int64) for name in (*_INT, *_CACHE, "stages")]
    + [(name, np.float64) for name in (*_FLOAT, *UNITS)]
)


def gpu_model(chip: Chip, launch: Launch, clock_hz: float, resident: int) -> Any:
    """The record for one launch on a chip with caches; `resident` blocks share a core."""
    values = {
        **_l2_geometry(chip),
        **_l1_geometry(chip, launch, resident),
        **_latencies(chip, clock_hz),
        **unit_costs(chip, launch.dtype),
        "stages": launch.stages,
        "jitter": chip.cores.jitter_cycles,
    }
    record = np.zeros(1, dtype=MODEL_DTYPE).view(np.recarray)
    for name, value in values.items():
        record[name] = value
    return record[0]


def _l2_geometry(chip: Chip) -> dict[str, float]:
    l2 = chip.levels["l2"]
    sets = l2.capacity_bytes // (l2.line_bytes * l2.ways)
    run = run_lines(sets)
    home_lines = max(1, l2.home_run_bytes // l2.line_bytes)
    return {
        "line_shift": _log2(l2.line_bytes),
        "sector_shift": _log2(l2.sector_bytes),
        "sector_bytes": l2.sector_bytes,
        "sector_all": (1 << (l2.line_bytes // l2.sector_bytes)) - 1,
        "pair_mask": int(chip.dram.answer_bytes >= 2 * l2.sector_bytes),
        "partitions": l2.partitions,
        "partition_shift": _log2(l2.partitions),
        "home_shift": _log2(home_lines),
        "group_shift": _log2(min(home_lines, run)),
        "run_shift": _log2(run),
        "l2_run": run,
        "l2_runs": sets // run,
        "l2_runs_inverse": run / sets,
        "l2_sets": sets,
        "l2_ways": l2.ways,
        "dirty_max": (l2.dirty_max_bytes or 1 << 60) // l2.sector_bytes,
    }


def _l1_geometry(chip: Chip, launch: Launch, resident: int) -> dict[str, float]:
    """What the resident blocks take of the common memory of a core is not there for L1."""
    l1, limits = chip.levels["l1"], chip.limits
    assert limits is not None
    block_bytes = launch.footprint.shared_bytes + limits.shared_reserved_per_block_bytes
    taken = min(resident * block_bytes, limits.shared_per_core_bytes)
    row_bytes = l1.line_bytes * l1.ways
    return {"l1_sets": max(l1.capacity_bytes - taken, row_bytes) // row_bytes, "l1_ways": l1.ways}


def _latencies(chip: Chip, clock_hz: float) -> dict[str, float]:
    l1, l2, dram = chip.levels["l1"], chip.levels["l2"], chip.dram
    return {
        "l1_hit": l1.latency_cycles,
        "near_hit": l2.latency_cycles,
        "far_hit": l2.far_latency_cycles or l2.latency_cycles,
        "near_miss": dram.latency_cycles,
        "far_miss": dram.far_miss_latency_cycles or dram.latency_cycles,
        "port_bytes_per_cycle": l1.bytes_per_cycle(clock_hz),
        "l2_bytes_per_cycle": l2.bytes_per_cycle(clock_hz),
        "dram_bytes_per_cycle": dram.bytes_per_cycle(clock_hz),
    }


def _log2(value: int) -> int:
    return value.bit_length() - 1
