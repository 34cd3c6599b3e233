"""A box of a tile operation through the hierarchy of a GPU: lines, L1, L2 partitions, DRAM, time.

`servers` holds when each shared resource is free again, in cycles: one row per core with the
columns of CORE_SERVERS, then one row with the L2 partitions and DRAM in its columns.
"""

from __future__ import annotations

import numpy as np

from iosim.jit import inline
from iosim.memory.cache import access, index, popcount, sectors
from iosim.memory.l2 import (
    DRAM_READ,
    FABRIC,
    L1_FILL,
    L1_WRITE,
    home_of,
    read_near,
    read_sectors,
    write_sectors,
)
from iosim.ops import L1_BYPASS

MATRIX_FREE, EXP_FREE, VECTOR_FREE, PORT_FREE = range(4)  # row of a core
DRAM_FREE = 0  # last row; L2 partitions from column 1
L2_FREE = 1
SERVER_COLUMNS = 8


@inline
def load_box(caches, op, core, now, servers, tally, model):
    """A core loads the box of `op` at `now`; returns when its last byte has arrived."""
    filled, dram, far = walk(caches, op, core, False, tally, model)
    tally[op.tensor, L1_FILL] += filled
    if filled == 0:
        return now + model.l1_hit
    latency = model.far_hit if far else model.near_hit
    if dram:
        latency = model.far_miss if far else model.near_miss
    return transfer(core, now, filled, dram, servers, model) + latency


@inline
def store_box(caches, op, core, now, servers, tally, model):
    """A core stores the box of `op` at `now`; returns when it has left the core."""
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

    Returns the sectors moved between core and L2, those of DRAM, and whether any went far.
    """
    rows = np.int64(op.rows)
    row_bytes = np.int64(op.row_bytes)
    if op.pitch_bytes == row_bytes:
        row_bytes *= rows
        rows = 1
    moved = dram = far = 0
    pending = np.int64(-1)
    mask = 0
    size = model.line_bytes
    for r in range(rows):
        first = op.address + r * op.pitch_bytes
        end = first + row_bytes
        line = first // size
        start = line * size
        while start < end:
            part = model.sector_all
            if start < first or start + size > end:
                part = sectors(
                    max(first - start, 0), min(end - start, size) - 1, model.sector_bytes
                )
            if line == pending:
                mask |= part
            else:
                if pending >= 0:
                    m, d, f = line_access(caches, op, pending, mask, core, write, tally, model)
                    moved, dram, far = moved + m, dram + d, far + f
                pending = line
                mask = part
            line += 1
            start += size
    m, d, f = line_access(caches, op, pending, mask, core, write, tally, model)
    return moved + m, dram + d, far + f


@inline
def line_access(caches, op, line, mask, core, write, tally, model):
    """One line through L1 (loads without bypass) and L2: sectors moved, of DRAM, over the fabric."""
    tags, l1 = caches
    side = core % model.partitions
    if not write and not op.flags & L1_BYPASS:
        base = (core * model.l1_sets + index(line, model.l1_sets, model.l1_run)) * model.l1_ways
        mask, _ = access(l1, base, model.l1_ways, line, mask, False)
        if mask == 0:
            return 0, 0, 0
    home, local = home_of(line, model.home_lines, model.partitions)
    row = index(local, model.l2_sets, model.l2_run)
    tensor = op.tensor
    moved = popcount(mask)
    if write:
        written = write_sectors(tags, line, mask, home, row, tensor, tally, model)
        if home != side:
            tally[tensor, FABRIC] += moved
        return moved, written, 0
    ways = model.l2_ways
    own = (side * model.l2_sets + row) * ways
    if read_near(tags, own, ways, line, mask):
        return moved, 0, 0
    base, far = own, np.int64(-1)
    if home != side:
        base, far = (home * model.l2_sets + row) * ways, own
    dram, fabric, written = read_sectors(tags, line, mask, home, base, far, tally, model)
    tally[tensor, DRAM_READ] += dram
    tally[tensor, FABRIC] += fabric
    return moved, dram + written, fabric
