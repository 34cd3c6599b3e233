"""Obvious, slow models of the caches: dicts and lists of lines, one step after the other.

`SectoredCache` is (a) a sectored, set-associative, write-back LRU cache; `ChipModel` is (b) the
L1s, the L2 in partitions and the DRAM of `iosim.memory`. Nothing here is taken from what it checks
but the formulas of index and home, stated again in plain integers.
"""

from collections import Counter
from dataclasses import dataclass, field

L1_FILL, L1_WRITE, DRAM_READ, DRAM_WRITE, FABRIC, SHARED_FILL = range(6)


@dataclass
class Line:
    """What a cache holds of one line: the sectors that are there, those that are dirty, whose."""

    number: int
    valid: set = field(default_factory=set)
    dirty: set = field(default_factory=set)
    tensor: int = 0


def run_of(sets):
    """Lines per run of the balanced index."""
    return max(run for run in (1, 2, 4, 8, 16, 32) if sets % run == 0)


def balanced_set(line, sets):
    """The set of a line: runs of lines go round the cache, 7 runs further at each turn."""
    run = run_of(sets)
    group, inside = line // run, line % run
    around = sets // run
    turns = group // around
    rotation = (group ^ (group >> 5) ^ (group >> 10) ^ (group >> 15)) % run
    return (group + 7 * turns) % around * run + (inside ^ rotation)


class Sets:
    """Sets of lines, most recently used first."""

    def __init__(self, sets, ways):
        self.ways = ways
        self.lines = [[] for _ in range(sets)]

    def find(self, row, number):
        """The line, or None; its place does not change."""
        return next((line for line in self.lines[row] if line.number == number), None)

    def touch(self, row, number):
        """(the line, now first in its set; the line that had to go for it or None)."""
        line, gone = self.find(row, number), None
        if line is None:
            line = Line(number)
            if len(self.lines[row]) == self.ways:
                gone = self.lines[row].pop()
        else:
            self.lines[row].remove(line)
        self.lines[row].insert(0, line)
        return line, gone

    def drop(self, row, number):
        """Forgets a line."""
        self.lines[row] = [line for line in self.lines[row] if line.number != number]


class SectoredCache:
    """(a): an access of some bytes is one touch per line."""

    def __init__(self, capacity_bytes, line_bytes, ways, sector_bytes, balanced=False):
        self.line_bytes, self.sector_bytes, self.balanced = line_bytes, sector_bytes, balanced
        self.sets = Sets(capacity_bytes // line_bytes // ways, ways)
        self.hits = self.misses = self.fetched_bytes = self.written_back_bytes = 0

    def access(self, address, length, write):
        """Touches every line that holds a byte of the access."""
        touched: dict = {}
        for byte in range(address, address + length):
            line, offset = divmod(byte, self.line_bytes)
            touched.setdefault(line, set()).add(offset // self.sector_bytes)
        for number, sectors in touched.items():
            self.touch(number, sectors, write)

    def touch(self, number, sectors, write):
        """One line: a hit if all sectors are there; a read fetches what is missing."""
        count = len(self.sets.lines)
        row = balanced_set(number, count) if self.balanced else number % count
        line, gone = self.sets.touch(row, number)
        missing = sectors - line.valid
        self.hits += not missing
        self.misses += bool(missing)
        line.valid |= sectors
        if write:
            line.dirty |= sectors
        else:
            self.fetched_bytes += len(missing) * self.sector_bytes
        if gone:
            self.written_back_bytes += len(gone.dirty) * self.sector_bytes

    @property
    def dirty_bytes(self):
        """Dirty bytes in the cache now."""
        return self.sector_bytes * sum(len(x.dirty) for row in self.sets.lines for x in row)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What the chip model needs to know of a chip; sizes in lines and sectors."""

    line_bytes: int
    sectors_per_line: int
    partitions: int
    l2_sets: int
    l2_ways: int
    l1_sets: int
    l1_ways: int
    home_run_lines: int
    answers_in_pairs: bool
    dirty_max_sectors: int


@dataclass
class Moved:
    """Sectors that one box moved."""

    between_core_and_l2: int = 0
    dram: int = 0
    fabric_reads: int = 0


class ChipModel:
    """(b): loads and stores of boxes from cores, with the tally of each operand."""

    def __init__(self, geometry, cores):
        g = self.g = geometry
        self.l1 = [Sets(g.l1_sets, g.l1_ways) for _ in range(cores)]
        self.l2 = [Sets(g.l2_sets, g.l2_ways) for _ in range(g.partitions)]
        self.tally = Counter()  # (tensor, column): sectors

    @property
    def dirty_now(self):
        """Dirty sectors in all partitions."""
        return sum(len(x.dirty) for part in self.l2 for row in part.lines for x in row)

    def home(self, line):
        """(home partition, number of the line among those of its home).

        Runs of lines take the partitions in turn; which one begins a turn is hashed.
        """
        piece, inside = divmod(line, self.g.home_run_lines)
        turn = piece // self.g.partitions
        begins = turn ^ (turn >> 3) ^ (turn >> 7) ^ (turn >> 12)
        return (piece + begins) % self.g.partitions, turn * self.g.home_run_lines + inside

    def box(self, address, rows, row_bytes, pitch_bytes):
        """The touches of a box: (line, sectors), a line in consecutive rows only once."""
        touches: list = []
        for row in range(rows):
            for byte in range(address + row * pitch_bytes, address + row * pitch_bytes + row_bytes):
                line, offset = divmod(byte, self.g.line_bytes)
                sector = offset * self.g.sectors_per_line // self.g.line_bytes
                if touches and touches[-1][0] == line:
                    touches[-1][1].add(sector)
                else:
                    touches.append((line, {sector}))
        return touches

    def load(self, core, tensor, touches, bypass, receivers=1):
        """A core loads for itself and `receivers` - 1 others; returns what moved."""
        moved = Moved()
        for line, sectors in touches:
            if not bypass:
                held, _ = self.l1[core].touch(line % self.g.l1_sets, line)
                sectors = sectors - held.valid
                held.valid |= sectors
            if sectors:
                self.read_l2(core, tensor, line, sectors, moved)
        self.tally[tensor, L1_FILL] += moved.between_core_and_l2
        for _ in range(receivers - 1):
            self.tally[tensor, SHARED_FILL] += moved.between_core_and_l2
        return moved

    def store(self, core, tensor, touches):
        """A core stores: through L1, which takes the sectors as of a load."""
        moved = Moved()
        for line, sectors in touches:
            held, _ = self.l1[core].touch(line % self.g.l1_sets, line)
            held.valid |= sectors
            self.write_l2(core, tensor, line, sectors, moved)
        self.tally[tensor, L1_WRITE] += moved.between_core_and_l2
        return moved

    def add(self, core, tensor, touches):
        """A core adds to memory: the home partition reads what it lacks, then it is written."""
        moved = Moved()
        for line, sectors in touches:
            home, local = self.home(line)
            self.read_home(tensor, line, sectors, home, balanced_set(local, self.g.l2_sets), moved)
            self.write_l2(core, tensor, line, sectors, moved)
        self.tally[tensor, L1_WRITE] += moved.between_core_and_l2
        return moved

    def read_l2(self, core, tensor, line, sectors, moved):
        """Own partition, then the home one, then DRAM."""
        moved.between_core_and_l2 += len(sectors)
        home, local = self.home(line)
        row = balanced_set(local, self.g.l2_sets)
        own = core % self.g.partitions
        near = self.l2[own].find(row, line)
        if near and sectors <= near.valid:
            self.l2[own].touch(row, line)
            return
        wanted = self.answer(sectors)
        if own != home:
            copy, gone = self.l2[own].touch(row, line)
            self.evicted(gone, moved)
            moved.fabric_reads += len(wanted - copy.valid)
            self.tally[tensor, FABRIC] += len(wanted - copy.valid)
            copy.valid |= wanted
        self.read_home(tensor, line, sectors, home, row, moved)

    def read_home(self, tensor, line, sectors, home, row, moved):
        """What the home partition lacks comes from DRAM, in the grain in which that answers."""
        wanted = self.answer(sectors)
        there = self.l2[home].find(row, line)
        if there and sectors <= there.valid:
            wanted = sectors
        held, gone = self.l2[home].touch(row, line)
        self.evicted(gone, moved)
        self.tally[tensor, DRAM_READ] += len(wanted - held.valid)
        moved.dram += len(wanted - held.valid)
        held.valid |= wanted

    def answer(self, sectors):
        """What DRAM brings for some sectors: both of a pair where it answers in pairs."""
        if not self.g.answers_in_pairs:
            return set(sectors)
        return {both for s in sectors for both in (s // 2 * 2, s // 2 * 2 + 1)}

    def write_l2(self, core, tensor, line, sectors, moved):
        """To the home partition; other copies go; beyond the ceiling one line is cleaned."""
        moved.between_core_and_l2 += len(sectors)
        home, local = self.home(line)
        row = balanced_set(local, self.g.l2_sets)
        if core % self.g.partitions != home:
            self.tally[tensor, FABRIC] += len(sectors)
        for other, partition in enumerate(self.l2):
            if other != home:
                partition.drop(row, line)
        held, gone = self.l2[home].touch(row, line)
        self.evicted(gone, moved)
        held.valid |= sectors
        held.dirty |= sectors
        held.tensor = tensor
        if self.dirty_now > self.g.dirty_max_sectors:
            dirty = [x for x in self.l2[home].lines[row] if x.dirty]
            if dirty:
                self.evicted(dirty[-1], moved)
                dirty[-1].dirty = set()

    def evicted(self, line, moved):
        """The dirty sectors of a line go to DRAM, on the account of who wrote it."""
        if line and line.dirty:
            self.tally[line.tensor, DRAM_WRITE] += len(line.dirty)
            moved.dram += len(line.dirty)
