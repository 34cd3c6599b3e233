"""A box of a tile operation through the hierarchy of a GPU: lines, L1, L2 partitions, DRAM, time.

`servers` has one row per core (how many blocks share it, when its port is free again, in cycles),
then one row for what all share: when DRAM and the L2 partitions are free again.

L1 is written through, and a store leaves its sectors there as a load does: what a block has written
it reads again without a fill (the probe `stored-then-read`; kernels that spill show the
same). Additions (atomics) are done at the home of a line, fetched first where it is not in L2.
"""

from __future__ import annotations

import numpy as np

from iosim.jit import inline
from iosim.memory.cache import access, popcount, sectors
from iosim.memory.l2 import (
    DRAM_READ,
    FABRIC,
    L1_FILL,
    L1_WRITE,
    SHARED_FILL,
    fetch_home,
    read_near,
    read_sectors,
    row_of,
    spot_of,
    write_sectors,
)
from iosim.ops import ATOMIC, L1_BYPASS, MULTICAST

RESIDENT, PORT_FREE = range(2)  # row of a core: blocks that share it, when its port is free
DRAM_FREE = 0  # last row; L2 partitions from column 1
L2_FREE = 1
SERVER_COLUMNS = 8


@inline
def load_box(caches, op, core, now, servers, tally, model):
    """A core loads the box of `op` at `now`; returns when its last byte has arrived."""
    filled, dram, far = walk(caches, op, core, False, tally, model)
    tally[op.tensor, L1_FILL] += filled
    if op.flags & MULTICAST:
        tally[op.tensor, SHARED_FILL] += filled * (op.slot - 1)
    if filled == 0:
        return now + model.l1_hit
    latency = model.far_hit if far else model.near_hit
    if dram:
        latency = model.far_miss if far else model.near_miss
    return transfer(core, now, filled, dram, servers, model) + latency


@inline
def store_box(caches, op, core, now, servers, tally, model):
    """A core stores (or adds) the box of `op` at `now`; returns when it has left the core."""
    written, dram, _ = walk(caches, op, core, True, tally, model)
    tally[op.tensor, L1_WRITE] += written
    return transfer(core, now, written, dram, servers, model)


@inline
def transfer(core, now, moved, dram, servers, model):
    """Queues sectors at the port of the core, its L2 partition and DRAM; when all have passed."""
    last = servers.shape[0] - 1
    size = moved * model.sector_bytes
    ready = occupy(servers, core, PORT_FREE, now, size, model.port_bytes_per_cycle)
    side = L2_FREE + core % model.partitions
    ready = max(ready, occupy(servers, last, side, now, size, model.l2_bytes_per_cycle))
    if dram:
        size = dram * model.sector_bytes
        bus = occupy(servers, last, DRAM_FREE, now, size, model.dram_bytes_per_cycle)
        ready = max(ready, bus)
    return ready


@inline
def occupy(servers, row, column, now, size, bytes_per_cycle):
    """Queues `size` bytes at a shared resource; returns when they have passed."""
    free = max(servers[row, column], now) + size / bytes_per_cycle
    servers[row, column] = free
    return free


@inline
def walk(caches, op, core, write, tally, model):
    """All lines of a box in address order; runs of one line in consecutive rows are merged.

    Returns the sectors moved between core and L2, those of DRAM, and those over the fabric.
    """
    rows = np.int64(op.rows)
    row_bytes = np.int64(op.row_bytes)
    if op.pitch_bytes == row_bytes:
        row_bytes *= rows
        rows = 1
        aligned = (op.address | row_bytes) & ((1 << model.line_shift) - 1) == 0
        if op.flags & L1_BYPASS and aligned and not write:
            return read_lines(caches[0], op, row_bytes, core, tally, model)
    moved = dram = far = 0
    group = line_before = np.int64(-1)
    spot = (np.int64(0), np.int64(0), np.int64(0), np.int64(0))
    mask = 0
    shift = model.line_shift
    size = np.int64(1) << shift
    for r in range(rows):
        first = op.address + r * op.pitch_bytes
        end = first + row_bytes
        for line in range(first >> shift, ((end - 1) >> shift) + 1):
            start = line << shift
            part = model.sector_all
            if start < first or start + size > end:
                part = sectors(
                    max(first - start, 0), min(end - start, size) - 1, model.sector_shift
                )
            if line == line_before:
                mask |= part
                continue
            if line_before >= 0:
                m, d, f = line_access(
                    caches, op, line_before, mask, core, write, spot, tally, model
                )
                moved, dram, far = moved + m, dram + d, far + f
            if line >> model.group_shift != group:
                group = line >> model.group_shift
                spot = spot_of(group << model.group_shift, model)
            line_before, mask = line, part
    m, d, f = line_access(caches, op, line_before, mask, core, write, spot, tally, model)
    return moved + m, dram + d, far + f


@inline
def read_lines(tags, op, size_bytes, core, tally, model):
    """The common case of `walk`, a load of whole consecutive lines past L1: the same, faster."""
    line = op.address >> model.line_shift
    end = line + (size_bytes >> model.line_shift)
    group_mask = (1 << model.group_shift) - 1
    run_mask = model.l2_run - 1
    ways = model.l2_ways
    everything = model.sector_all
    side = core % model.partitions
    own_first = side * model.l2_sets
    moved = (end - line) * popcount(everything)
    dram = fabric = 0
    while line < end:
        home, first, turn, inside = spot_of(line & ~group_mask, model)
        stop = min(end, (line | group_mask) + 1)
        own = (own_first + first) * ways
        for at in range(line, stop):
            row = ((inside + (at & group_mask)) ^ turn) & run_mask
            base = own + row * ways
            if read_near(tags, base, ways, at, everything):
                continue
            far = np.int64(-1)
            if home != side:
                far = base
                base = (home * model.l2_sets + first + row) * ways
            d, f, w = read_sectors(tags, at, everything, base, far, tally, model)
            tally[op.tensor, DRAM_READ] += d
            tally[op.tensor, FABRIC] += f
            dram += d + w
            fabric += f
        line = stop
    return moved, dram, fabric


@inline
def line_access(caches, op, line, mask, core, write, spot, tally, model):
    """One line through L1 (loads without bypass) and L2: sectors moved, of DRAM, over the fabric.

    `spot` is where the group of the line lies in the L2, as `spot_of` gives it.
    """
    tags, l1 = caches
    ways = model.l2_ways
    side = core % model.partitions
    if not write and not op.flags & L1_BYPASS:
        base = (core * model.l1_sets + line % model.l1_sets) * model.l1_ways
        mask, _ = access(l1, base, model.l1_ways, line, mask, False)
        if mask == 0:
            return 0, 0, 0
    home = spot[0]
    row = row_of(line, spot, model)
    moved = popcount(mask)
    if write:
        dram = 0
        if op.kind == ATOMIC:
            read, dram = fetch_home(tags, line, mask, home, row, op.tensor, tally, model)
            dram += read
        else:
            base = (core * model.l1_sets + line % model.l1_sets) * model.l1_ways
            access(l1, base, model.l1_ways, line, mask, False)
        dram += write_sectors(tags, line, mask, home, row, op.tensor, tally, model)
        if home != side:
            tally[op.tensor, FABRIC] += moved
        return moved, dram, 0
    own = (side * model.l2_sets + row) * ways
    if read_near(tags, own, ways, line, mask):
        return moved, 0, 0
    base, far = own, np.int64(-1)
    if home != side:
        base, far = (home * model.l2_sets + row) * ways, own
    dram, fabric, written = read_sectors(tags, line, mask, base, far, tally, model)
    tally[op.tensor, DRAM_READ] += dram
    tally[op.tensor, FABRIC] += fabric
    return moved, dram + written, fabric
