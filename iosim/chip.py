"""A chip as data: what is on it, how large, how fast, and where each number comes from.

The dataclasses say which fields a chip file may hold; `profile_schema` reads them. A field whose
name ends in a unit is a number and carries a `Fact` (its kind and source) in `Chip.facts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from iosim.errors import RequestError

SCHEMA = 1
KINDS = ("published", "measured", "assumed")
MACHINES = ("gpu", "tpu")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Where one number of a chip file comes from; `other` holds what other sources say."""

    value: float
    kind: str
    source: str
    other: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The cores of a chip: SMs on a GPU, TensorCores on a TPU."""

    name: str
    count: int
    clock_hz: float  # sustained under load; cycles are counted at this clock unless told otherwise
    peak_clock_hz: float  # the clock behind the published dense peak
    per_device: int = 0  # cores that one program runs on; 0: all of them
    # equal blocks are not equally fast: standard deviations of the speed, as shares
    resident_speed_spread: float = 0.0  # between the blocks of one core, always the same slot
    core_speed_spread: float = 0.0  # between cores
    jitter_cycles: float = 0.0  # variance of a block's run time per cycle of it


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one block may take and what one core holds (GPU)."""

    shared_per_core_bytes: int
    shared_per_block_bytes: int
    shared_reserved_per_block_bytes: int
    registers_per_core: int
    registers_per_thread: int
    registers_per_warp_unit: int  # registers are handed out to a warp in multiples of this
    threads_per_warp: int
    warps_per_core: int
    warps_per_block: int
    blocks_per_core: int
    block_launch_cycles: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How a grid of windows runs (TPU): register tile, scoped memory, cost of a step."""

    lanes: int
    sublanes: int
    scoped_limit_bytes: int
    window_buffers: int
    step_cycles: int


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Operations per core and clock of one unit for one dtype; `min_rows` is the least m."""

    unit: str  # matrix | exp | vector
    path: str  # wgmma, mma_sync, mxu, …
    dtype: str
    per_core_per_clock: float
    min_rows: int = 1


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The published dense peak of one dtype, and the instruction path that it stands on."""

    dtype: str
    path: str
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of the memory hierarchy.

    `capacity_bytes` and the bandwidths are per unit of `scope`: a core, a partition or the chip.
    Caches (`managed = "hardware"`) have lines, sectors and ways. `counter` names the real counter
    that checks what is modelled here.
    """

    name: str
    managed: str  # hardware | software
    scope: str  # core | partition | chip
    counter: str
    capacity_bytes: int
    latency_cycles: float
    line_bytes: int = 0
    sector_bytes: int = 0
    ways: int = 0
    partitions: int = 1
    bandwidth_bytes_per_clock: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    sustained_bytes_per_s: float = 0.0  # what streaming reaches, where that was measured
    far_latency_cycles: float = 0.0  # a hit in the partition of the other side
    far_miss_latency_cycles: float = 0.0  # DRAM behind the partition of the other side
    home_run_bytes: int = 0  # consecutive bytes with one home partition
    dirty_max_bytes: int = 0  # written back beyond this many dirty bytes; 0: no such ceiling
    dirty_before_bytes: int = 0  # dirty before a profiled kernel starts (the profiler's own)
    answer_bytes: int = 0  # DRAM: the least that one read brings

    def peak_bytes_per_s(self, clock_hz: float) -> float:
        """Nominal bytes per second of one unit of `scope`: nothing can move more."""
        return self.bandwidth_bytes_per_s or self.bandwidth_bytes_per_clock * clock_hz

    def bytes_per_cycle(self, clock_hz: float) -> float:
        """Bytes per core cycle of one unit of `scope`; the sustained figure where known."""
        if self.sustained_bytes_per_s:
            return self.sustained_bytes_per_s / clock_hz
        return self.bandwidth_bytes_per_clock or self.bandwidth_bytes_per_s / clock_hz


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, complete and checked; `facts` maps `section.field` to its origin."""

    name: str
    title: str
    machine: str
    aliases: tuple[str, ...]
    cores: Cores
    limits: Limits | None
    grid: Grid | None
    rates: tuple[Rate, ...]
    peaks: tuple[Peak, ...]
    levels: Mapping[str, Level]
    facts: Mapping[str, Fact] = field(repr=False)

    @property
    def dram(self) -> Level:
        """The off-chip memory (HBM)."""
        return self.levels["hbm"]

    @property
    def cores_used(self) -> int:
        """Cores that one program runs on."""
        return self.cores.per_device or self.cores.count

    def peak(self, dtype: str) -> Peak:
        """The dense peak for `dtype`. Raises RequestError where the chip has no such unit."""
        for peak in self.peaks:
            if peak.dtype == dtype:
                return peak
        have = ", ".join(p.dtype for p in self.peaks)
        raise RequestError(f"{self.name} has no matrix unit for {dtype} (it has: {have})")

    def rate(self, unit: str, dtype: str = "", rows: int = 1 << 30) -> Rate:
        """The fastest rate of `unit` for `dtype` that a tile of `rows` rows can use.

        Rates whose dtype is "" serve every dtype. Raises RequestError where there is none.
        """
        fits = [
            r
            for r in self.rates
            if r.unit == unit and r.dtype in ("", dtype) and r.min_rows <= rows
        ]
        if not fits:
            units = [r for r in self.rates if r.unit == unit]
            have = ", ".join(sorted({r.dtype for r in units})) or "none"
            tile = f" and a tile of {rows} rows" if any(r.dtype == dtype for r in units) else ""
            raise RequestError(f"{self.name} has no {unit} unit for {dtype}{tile} (it has: {have})")
        return max(fits, key=lambda r: r.per_core_per_clock)

    def ridge_flops_per_byte(self, dtype: str) -> float:
        """Arithmetic intensity at which HBM and the matrix units take equally long."""
        return self.peak(dtype).flops_per_s / self.dram.bandwidth_bytes_per_s
