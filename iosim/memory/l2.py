"""A last-level cache in partitions: home lines, near copies, dirty sectors and their ceiling.

Every line has a home partition (runs of `1 << home_shift` lines alternate, hashed). A core reads
through its own partition: a line of the other one comes over the fabric and leaves a copy there.
Writes go to the home and drop the copies. DRAM answers in pairs of sectors where the chip does so.

The partitions lie one after the other in one array. Tallies count sectors, one row per operand.
"""

from __future__ import annotations

from iosim.jit import inline
from iosim.memory.cache import EMPTY, access, find, place, popcount, to_front, touch

#: columns of the tally; SHARED_FILL arrives at the other cores of a cluster
L1_FILL, L1_WRITE, DRAM_READ, DRAM_WRITE, FABRIC, SHARED_FILL = range(6)
TALLY_COLUMNS = 6
#: cells of the last row of the tally, which belongs to no operand
DIRTY_NOW = 0


@inline
def spot_of(line, model):
    """Where the group of lines that begins at `line` lies.

    (home partition, first set of its run, rotation in the run, place in the run): a group is the
    least stretch of lines that shares all four, so that a walk over lines needs no division.
    """
    piece = line >> model.home_shift
    pair = piece >> model.partition_shift
    fold = pair ^ (pair >> 3) ^ (pair >> 7) ^ (pair >> 12)
    home = (piece + fold) & (model.partitions - 1)
    local = (pair << model.home_shift) + (line & ((1 << model.home_shift) - 1))
    at, turn = place(local >> model.run_shift, model.l2_runs, model.l2_runs_inverse)
    return home, at << model.run_shift, turn, local & (model.l2_run - 1)


@inline
def row_of(line, spot, model):
    """The set of `line` inside its partition, from the spot of its group."""
    inside = spot[3] + (line & ((1 << model.group_shift) - 1))
    return spot[1] + ((inside ^ spot[2]) & (model.l2_run - 1))


@inline
def paired(mask, model):
    """The sectors that DRAM brings for `mask`: both of a pair where it answers in pairs."""
    if model.pair_mask:
        low = (mask | (mask >> 1)) & 5
        return low | (low << 1)
    return mask


@inline
def settle_eviction(evicted, tally):
    """Writes the dirty sectors of an evicted entry back; returns how many."""
    if evicted & 15 == 0:
        return 0
    dirty = popcount(evicted & 15)
    tally[(evicted >> 8) & 255, DRAM_WRITE] += dirty
    tally[tally.shape[0] - 1, DIRTY_NOW] -= dirty
    return dirty


@inline
def read_near(tags, base, ways, line, mask):
    """Whether all sectors of `mask` are in the set at `base`; the line is then first in it."""
    for way in range(ways):
        entry = tags[base + way]
        if entry >> 16 == line:
            if (entry >> 4) & mask != mask:
                return False
            to_front(tags, base, way, entry)
            return True
    return False


@inline
def read_sectors(tags, line, mask, base, far_base, tally, model):
    """A core reads sectors of a line that its own partition does not hold completely.

    `base` is the set in the home partition, `far_base` the one in the core's own, or -1 if that is
    the home. Returns (sectors read from DRAM, sectors over the fabric, sectors written back).
    """
    ways = model.l2_ways
    fabric = 0
    written = 0
    wanted = paired(mask, model)
    if far_base >= 0:
        missing, evicted = access(tags, far_base, ways, line, wanted, False)
        written += settle_eviction(evicted, tally)
        fabric = popcount(missing)
    way = find(tags, base, ways, line)
    if way >= 0 and (tags[base + way] >> 4) & mask == mask:
        wanted = mask
    missing, evicted = touch(tags, base, ways, way, line, wanted, False)
    written += settle_eviction(evicted, tally)
    return popcount(missing), fabric, written


@inline
def write_sectors(tags, line, mask, home, row, tensor, tally, model):
    """A core writes sectors of a line to its home; returns the sectors written back to DRAM.

    `row` is the set inside a partition; copies in other partitions are dropped.
    """
    ways = model.l2_ways
    for other in range(model.partitions):
        if other != home:
            drop(tags, (other * model.l2_sets + row) * ways, ways, line)
    base = (home * model.l2_sets + row) * ways
    way = find(tags, base, ways, line)
    clean = mask & ~(tags[base + way] & 15) if way >= 0 else mask
    _, evicted = touch(tags, base, ways, way, line, mask, True)
    written = settle_eviction(evicted, tally)
    tags[base] = (tags[base] & ~0xFF00) | (tensor << 8)
    last = tally.shape[0] - 1
    tally[last, DIRTY_NOW] += popcount(clean)
    if tally[last, DIRTY_NOW] > model.dirty_max:
        written += clean_oldest(tags, base, ways, tally)
    return written


@inline
def fetch_home(tags, line, mask, home, row, tensor, tally, model):
    """Sectors of a line that an addition in L2 needs at its home; returns (read, written back)."""
    base = (home * model.l2_sets + row) * model.l2_ways
    way = find(tags, base, model.l2_ways, line)
    wanted = mask
    if way < 0 or (tags[base + way] >> 4) & mask != mask:
        wanted = paired(mask, model)
    missing, evicted = touch(tags, base, model.l2_ways, way, line, wanted, False)
    tally[tensor, DRAM_READ] += popcount(missing)
    return popcount(missing), settle_eviction(evicted, tally)


@inline
def drop(tags, base, ways, line):
    """Removes `line` from a set if it is there; those behind it move up."""
    way = find(tags, base, ways, line)
    if way >= 0:
        for at in range(base + way, base + ways - 1):
            tags[at] = tags[at + 1]
        tags[base + ways - 1] = EMPTY


@inline
def clean_oldest(tags, base, ways, tally):
    """Writes the least recently used dirty entry of a set back and keeps it, clean."""
    for at in range(base + ways - 1, base - 1, -1):
        if tags[at] & 15:
            written = settle_eviction(tags[at], tally)
            tags[at] &= ~15
            return written
    return 0
