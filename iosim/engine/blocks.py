"""Runs the blocks of a launch on a chip with caches, each next one where another has finished."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.engine import interleave, slots
from iosim.engine.counts import Counts
from iosim.jit import jit
from iosim.launch import Launch, blocks_per_core, require_fit
from iosim.memory.cache import new_cache
from iosim.memory.hierarchy import RESIDENT, SERVER_COLUMNS
from iosim.memory.l2 import (
    DIRTY_NOW,
    DRAM_READ,
    DRAM_WRITE,
    FABRIC,
    L1_FILL,
    L1_WRITE,
    SHARED_FILL,
    TALLY_COLUMNS,
    row_of,
    spot_of,
    write_sectors,
)
from iosim.memory.model import gpu_model
from iosim.ops import OP_DTYPE
from iosim.traffic import OperandTraffic, Traffic

_BUFFER_BYTES = 4 << 20  # for the operations of all resident blocks together
_LEAST_STEPS = 4  # steps that one refill asks for at least
_MOST_STEPS = 256
_RESIDUE_ADDRESS = 1 << 30  # what others left dirty lies below all tensors
_OWNER_NOBODY = 255  # tally row of lines that belong to no operand of this launch


class CachedMemory:
    """The L2 of a chip, kept from launch to launch; what is dirty at first is the profiler's."""

    def __init__(self, chip: Chip) -> None:
        level = chip.levels["l2"]
        sets = level.capacity_bytes // (level.line_bytes * level.ways)
        self.tags = new_cache(sets * level.partitions, level.ways)
        self.dirty_sectors = 0
        self._names: tuple[str, ...] = ()
        self._residue_lines = level.dirty_before_bytes // level.line_bytes

    def hand_over(self, names: tuple[str, ...]) -> None:
        """Lines of an earlier launch belong to the operand of the same name now, or to nobody."""
        owner = np.full(256, _OWNER_NOBODY, dtype=np.int64)
        for index, name in enumerate(self._names):
            if name in names:
                owner[index] = names.index(name)
        valid = self.tags >= 0
        tags = self.tags[valid]
        self.tags[valid] = (tags & ~0xFF00) | (owner[(tags >> 8) & 255] << 8)
        self._names = names

    def soil(self, tally: NDArray[np.int64], model: Any) -> None:
        """Makes the residue dirty that is there before a profiled kernel starts."""
        _soil(self.tags, self._residue_lines, tally, model)


@jit
def _soil(tags, lines, tally, model):
    first = _RESIDUE_ADDRESS >> model.line_shift
    for line in range(first, first + lines):
        spot = spot_of(line >> model.group_shift << model.group_shift, model)
        row = row_of(line, spot, model)
        write_sectors(tags, line, model.sector_all, spot[0], row, _OWNER_NOBODY, tally, model)
    tally[:_OWNER_NOBODY, :] = 0
    tally[_OWNER_NOBODY, :] = 0


def _slot_speeds(
    chip: Chip, slots: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Time that each slot takes for a unit of work, and a start for its random numbers.

    Blocks that share a core get unequal shares of it, evenly spaced, always the same slot more.
    """
    cores = chip.cores
    rng = np.random.default_rng(seed)
    levels = np.linspace(-1.0, 1.0, max(1, -(-slots // cores.count)))
    levels /= levels.std() or 1.0
    own = cores.resident_speed_spread * levels[np.arange(slots) // cores.count] * (len(levels) > 1)
    shared = cores.core_speed_spread * rng.standard_normal(cores.count)
    speeds = 1 + own + shared[np.arange(slots) % cores.count]
    return speeds, rng.integers(1, 1 << 31, size=slots)


class BlockRun:
    """One launch on one chip: prepares the packed state, then feeds the jitted loop."""

    def __init__(
        self, launch: Launch, chip: Chip, memory: CachedMemory, clock_hz: float, seed: int
    ) -> None:
        require_fit(launch, chip)
        assert chip.limits is not None
        self.launch = launch
        self.memory = memory
        self.launch_cycles = chip.limits.block_launch_cycles
        self.cores = chip.cores.count
        self.local_bytes = launch.footprint.local_bytes
        resident = blocks_per_core(launch.footprint, chip.limits)
        self.slots = min(resident * self.cores, launch.blocks)
        self.model = gpu_model(chip, launch, clock_hz, resident)
        self.speeds, self.random = _slot_speeds(chip, self.slots, seed)
        self.tally = np.zeros((_OWNER_NOBODY + 2, TALLY_COLUMNS), dtype=np.int64)
        self.tally[-1, DIRTY_NOW] = memory.dirty_sectors
        ends, per_step = launch.ops_at_ends, launch.ops_per_step
        self.kept = ends + per_step * (launch.stages + 1)
        room = _BUFFER_BYTES // OP_DTYPE.itemsize // self.slots
        self.chunk = int(np.clip((room - self.kept) // per_step, _LEAST_STEPS, _MOST_STEPS))
        capacity = self.kept + ends + per_step * self.chunk
        self.ops = np.zeros((self.slots, capacity), dtype=OP_DTYPE)
        self.ints = np.zeros((self.slots, slots.INT_COLUMNS), dtype=np.int64)
        self.floats = np.zeros((self.slots, slots.ARRIVALS + capacity))
        self.heap = np.zeros(2 * self.slots + 2, dtype=np.int64)
        self.servers = np.zeros((self.cores + 1, SERVER_COLUMNS))
        l1 = new_cache(int(self.model["l1_sets"]) * self.cores, int(self.model["l1_ways"]))
        self.caches = (memory.tags, l1)
        self.emitted = [0] * self.slots
        self.block_of = [0] * self.slots

    def run(self, soil: bool) -> Counts:
        """Runs all blocks; `soil` says whether the profiler's residue is in the cache first."""
        if soil:
            self.memory.soil(self.tally, self.model)
        for slot in range(self.slots):
            self.start(slot, slot, (slot // self.cores) * float(self.launch_cycles))
        begun, ended, end = self.slots, 0, 0.0
        state = (self.heap, self.floats, self.ints, self.ops)
        rest = (self.caches, self.servers, self.tally, self.model)
        while True:
            what, slot = interleave.advance(*state, *rest)
            if what == interleave.REFILL:
                self.refill(slot)
            elif what == interleave.DONE:
                ended += 1
                now = self.floats[slot, slots.COMPUTE_KEY]
                end = max(end, now)
                self.servers[slot % self.cores, RESIDENT] -= 1
                if begun < self.launch.blocks:
                    self.start(slot, begun, now + self.launch_cycles)
                    begun += 1
            else:
                break
        if ended < self.launch.blocks:
            left = self.launch.blocks - ended
            raise RuntimeError(f"{self.launch.name}: {left} blocks wait for each other for ever")
        self.memory.dirty_sectors = int(self.tally[-1, DIRTY_NOW])
        return self.counts(end)

    def start(self, slot: int, block: int, now: float) -> None:
        """Puts `block` into `slot` at `now`."""
        core = slot % self.cores
        own = (self.speeds[slot], float(self.random[block % self.slots]))
        slots.open_slot(self.heap, self.floats, self.ints, self.servers, slot, core, now, own)
        self.block_of[slot], self.emitted[slot] = block, 0
        self.refill(slot)

    def refill(self, slot: int) -> None:
        """Drops the operations that are done, asks the block program for the next steps.

        Steps without loads let the load agent run dry far ahead: it waits until there is room.
        """
        if self.ints[slot, slots.COUNT] - self.ints[slot, slots.COMPUTED] > self.kept:
            return
        left = slots.make_room(self.floats, self.ints, self.ops, slot)
        first = self.emitted[slot]
        last = first + self.chunk
        room = self.ops[slot, left:]
        written, finished = self.launch.program(
            self.block_of[slot], first, last, self.launch.params, room, None
        )
        self.emitted[slot] = last
        if self.local_bytes:
            slots.settle_local(room, written, slot * self.local_bytes)
        slots.refilled(self.heap, self.floats, self.ints, slot, left + written, not finished)

    def counts(self, end: float) -> Counts:
        """The tally as bytes."""
        size = int(self.model["sector_bytes"])
        total = self.tally[:-1].sum(axis=0) * size
        traffic = Traffic(
            dram_read_bytes=int(total[DRAM_READ]),
            dram_write_bytes=int(total[DRAM_WRITE]),
            dirty_left_bytes=self.memory.dirty_sectors * size,
            l1_fill_bytes=int(total[L1_FILL] + total[SHARED_FILL]),
            l1_write_bytes=int(total[L1_WRITE]),
            l2_from_l1_bytes=int(total[L1_FILL] + total[L1_WRITE]),
            l2_fabric_bytes=int(total[FABRIC]),
        )
        operands = {
            operand.name: OperandTraffic(
                dram_read_bytes=int(row[DRAM_READ]),
                dram_write_bytes=int(row[DRAM_WRITE]),
                l1_fill_bytes=int(row[L1_FILL] + row[SHARED_FILL]),
                l1_write_bytes=int(row[L1_WRITE]),
                l2_hit_bytes=max(0, int(row[L1_FILL] - row[DRAM_READ])),
                unique_bytes=operand.unique_bytes,
            )
            for operand, row in zip(self.launch.operands, self.tally * size, strict=False)
            if operand.size_bytes
        }
        return Counts(traffic=traffic, operands=operands, makespan_cycles=end)


def run_blocks(
    launch: Launch, chip: Chip, memory: CachedMemory, *, clock_hz: float, seed: int, soil: bool
) -> Counts:
    """Runs one launch through `memory`; same arguments, same counts.

    Raises DoesNotFitError where a block does not fit the chip.
    """
    memory.hand_over(tuple(operand.name for operand in launch.operands))
    return BlockRun(launch, chip, memory, clock_hz, seed).run(soil)
