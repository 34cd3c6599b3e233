"""A sectored, set-associative, write-back LRU cache in one packed array.

A set is a row of `ways` int64 entries, most recently used first. An entry packs

    line << 16  |  tensor << 8  |  valid sectors << 4  |  dirty sectors

so that a lookup compares one shifted word, a hit moves entries of one row, and an eviction knows
whose bytes it writes back. `EMPTY` matches no line. Line = byte address / line_bytes, never cut.

`index` spreads runs of lines over the sets so that both contiguous ranges and power-of-two strides
fill all sets evenly: real last-level caches do (hashed, balanced index).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from iosim.jit import inline, jit
from iosim.units import ceil_div

EMPTY = -(1 << 16)
RUN = 32  # lines that share one hash: a run of consecutive lines lies in consecutive sets
_SKEW = 7  # sets of runs by which each turn round the cache is shifted

#: columns of the counters that an access adds to
HITS, MISSES, FETCHED, WRITTEN = range(4)


def new_cache(sets: int, ways: int) -> NDArray[np.int64]:
    """An empty cache: sets × ways entries, set after set."""
    return np.full(sets * ways, EMPTY, dtype=np.int64)


def run_lines(sets: int) -> int:
    """Lines per run: the greatest power of two ≤ RUN that divides the number of sets."""
    run = RUN
    while sets % run:
        run //= 2
    return run


@inline
def place(group, round_trip, inverse):
    """(place, rotation) of a run of lines: runs go round the cache, skewed at each turn.

    `round_trip` runs fill one way of the cache; `inverse` is 1 / round_trip, since a division by
    multiplication is several times faster here. It is exact: half a run keeps the quotient away
    from whole numbers, so that rounding cannot push it over one.
    """
    turns = np.int64((group + 0.5) * inverse)
    skewed = group + turns * _SKEW
    at = skewed - np.int64((skewed + 0.5) * inverse) * round_trip
    return at, group ^ (group >> 5) ^ (group >> 10) ^ (group >> 15)


@inline
def index(line, sets, run):
    """The set of `line`: its run's first set, and the line's place in the run, rotated by XOR."""
    round_trip = sets // run
    at, turn = place(line // run, round_trip, 1.0 / round_trip)
    return at * run + ((line ^ turn) & (run - 1))


@inline
def find(tags, base, ways, line):
    """The way of `line` in the set that starts at `base`, or -1."""
    for way in range(ways):
        if tags[base + way] >> 16 == line:
            return way
    return -1


@inline
def to_front(tags, base, way, entry):
    """Puts `entry` first in its set; the entries before `way` move back by one."""
    for at in range(base + way, base, -1):
        tags[at] = tags[at - 1]
    tags[base] = entry


@inline
def popcount(mask):
    """Sectors in a 4-bit mask."""
    mask = mask - ((mask >> 1) & 5)
    return (mask & 3) + ((mask >> 2) & 3)


@inline
def sectors(first_byte, last_byte, sector_shift):
    """The mask of the sectors from `first_byte` to `last_byte` inside a line."""
    return (2 << (last_byte >> sector_shift)) - (1 << (first_byte >> sector_shift))


@inline
def access(tags, base, ways, line, mask, write):
    """One access to the sectors `mask` of `line` in the set at `base`; LRU, allocates always."""
    return touch(tags, base, ways, find(tags, base, ways, line), line, mask, write)


@inline
def touch(tags, base, ways, way, line, mask, write):
    """`access` to a line that was found at `way`, or nowhere (-1).

    Returns (missing sectors, evicted entry or EMPTY): a read fetches the missing sectors, a write
    makes its sectors valid and dirty without a fetch. The line is then first in its set.
    """
    evicted = EMPTY
    if way < 0:
        way = ways - 1
        evicted = tags[base + way]
        entry = line << 16
    else:
        entry = tags[base + way]
    missing = mask & ~(entry >> 4) & 15
    entry |= mask << 4
    if write:
        entry |= mask
    to_front(tags, base, way, entry)
    return missing, evicted


@jit
def replay(tags, ways, run, addresses, lengths, writes, shape, counts):
    """Runs a trace of byte accesses through `tags`, adding to `counts` per line touched.

    `shape` is (log2 of line bytes, of sector bytes); `run` 0 takes the plain modulo index.
    FETCHED and WRITTEN count sectors.
    """
    line_shift, sector_shift = shape
    size = 1 << line_shift
    sets = tags.size // ways
    for i in range(addresses.size):
        end = addresses[i] + lengths[i] - 1
        for line in range(addresses[i] >> line_shift, (end >> line_shift) + 1):
            start = line << line_shift
            mask = sectors(max(addresses[i] - start, 0), min(end - start, size - 1), sector_shift)
            row = index(line, sets, run) if run else line % sets
            missing, evicted = access(tags, row * ways, ways, line, mask, writes[i])
            counts[MISSES if missing else HITS] += 1
            if not writes[i]:
                counts[FETCHED] += popcount(missing)
            counts[WRITTEN] += popcount(evicted & 15)


class Cache:
    """One set-associative LRU cache that a trace of byte accesses runs through.

    `balanced` takes the hashed index of the chip model, else line modulo sets. Capacity must be a
    multiple of line × ways; a line has 1 to 4 sectors.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        line_bytes: int,
        ways: int,
        sector_bytes: int = 0,
        balanced: bool = False,
    ) -> None:
        self.line_bytes = line_bytes
        self.sector_bytes = sector_bytes or line_bytes
        row_bytes = line_bytes * ways
        if line_bytes & (line_bytes - 1) or self.sector_bytes & (self.sector_bytes - 1):
            raise ValueError(f"line {line_bytes} and sector {sector_bytes} must be powers of two")
        if capacity_bytes <= 0 or capacity_bytes % row_bytes:
            raise ValueError(f"capacity {capacity_bytes} is not a multiple of {row_bytes}")
        if ceil_div(self.line_bytes, self.sector_bytes) > 4 or line_bytes % self.sector_bytes:
            raise ValueError(
                f"a line of {line_bytes} bytes cannot have 1 to 4 sectors of {sector_bytes}"
            )
        sets = capacity_bytes // row_bytes
        self._tags, self._ways = new_cache(sets, ways), ways
        self._run = run_lines(sets) if balanced else 0
        self._counts = np.zeros(4, dtype=np.int64)

    def run(self, addresses: Any, lengths: Any = 1, writes: Any = False) -> None:
        """Accesses `lengths` bytes at each of `addresses` in order; scalars are broadcast."""
        where = np.ascontiguousarray(addresses, dtype=np.int64)
        long = np.ascontiguousarray(np.broadcast_to(lengths, where.shape), dtype=np.int64)
        wr = np.ascontiguousarray(np.broadcast_to(writes, where.shape), dtype=np.bool_)
        shape = (self.line_bytes.bit_length() - 1, self.sector_bytes.bit_length() - 1)
        replay(self._tags, self._ways, self._run, where, long, wr, shape, self._counts)

    @property
    def hits(self) -> int:
        """Line touches that found all their sectors."""
        return int(self._counts[HITS])

    @property
    def misses(self) -> int:
        """Line touches that lacked a sector."""
        return int(self._counts[MISSES])

    @property
    def fetched_bytes(self) -> int:
        """Bytes that reads brought in."""
        return int(self._counts[FETCHED]) * self.sector_bytes

    @property
    def written_back_bytes(self) -> int:
        """Dirty bytes that evictions wrote back."""
        return int(self._counts[WRITTEN]) * self.sector_bytes

    @property
    def dirty_bytes(self) -> int:
        """Dirty bytes in the cache now."""
        dirty = self._tags[self._tags != EMPTY] & 15
        return int(np.bitwise_count(dirty).sum()) * self.sector_bytes
