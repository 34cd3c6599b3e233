"""Boxes through the hierarchy of a small chip, against the slow twin: tallies and what is left."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.jit import jit
from iosim.memory.cache import EMPTY, new_cache, run_lines
from iosim.memory.hierarchy import SERVER_COLUMNS, load_box, store_box
from iosim.memory.l2 import (
    DIRTY_NOW,
    DRAM_READ,
    DRAM_WRITE,
    FABRIC,
    L1_FILL,
    L1_WRITE,
    SHARED_FILL,
    TALLY_COLUMNS,
)
from iosim.memory.model import MODEL_DTYPE
from iosim.ops import ATOMIC, L1_BYPASS, LOAD, LOCAL, MULTICAST, OP_DTYPE, STORE

CORES, TENSORS = 4, 3
RECEIVERS = 3  # cores that a multicast load goes to
SECTOR = 32
BASE = 1 << 32


@jit
def drive(ops, cores, caches, servers, tally, model, ready):
    """All boxes one after the other, at time 0 each."""
    for i in range(ops.size):
        if ops[i].kind == LOAD:
            ready[i] = load_box(caches, ops[i], cores[i], 0.0, servers, tally, model)
        else:
            ready[i] = store_box(caches, ops[i], cores[i], 0.0, servers, tally, model)


class Small:
    """A small chip: its record, its caches, and the slow twin of it."""

    def __init__(self, twin, geometry):
        self.g = g = geometry
        run = run_lines(g.l2_sets)
        values = {
            "line_shift": (g.line_bytes - 1).bit_length(),
            "sector_shift": 5,
            "sector_bytes": SECTOR,
            "sector_all": (1 << g.sectors_per_line) - 1,
            "pair_mask": int(g.answers_in_pairs),
            "partitions": g.partitions,
            "partition_shift": g.partitions.bit_length() - 1,
            "home_shift": g.home_run_lines.bit_length() - 1,
            "group_shift": min(g.home_run_lines, run).bit_length() - 1,
            "run_shift": run.bit_length() - 1,
            "l2_runs": g.l2_sets // run,
            "l2_runs_inverse": run / g.l2_sets,
            "l2_sets": g.l2_sets,
            "l2_ways": g.l2_ways,
            "l2_run": run,
            "l1_sets": g.l1_sets,
            "l1_ways": g.l1_ways,
            "dirty_max": g.dirty_max_sectors,
            **dict.fromkeys(("near_hit", "far_hit", "near_miss", "far_miss", "l1_hit"), 1.0),
            "port_bytes_per_cycle": 64,
            "l2_bytes_per_cycle": 1024,
            "dram_bytes_per_cycle": 512,
        }
        record = np.zeros(1, dtype=MODEL_DTYPE).view(np.recarray)
        for name, value in values.items():
            record[name] = value
        self.model = record[0]
        self.l2 = new_cache(g.l2_sets * g.partitions, g.l2_ways)
        self.l1 = new_cache(g.l1_sets * CORES, g.l1_ways)
        self.tally = np.zeros((TENSORS + 1, TALLY_COLUMNS), dtype=np.int64)
        self.servers = np.zeros((CORES + 1, SERVER_COLUMNS))
        self.slow = twin.ChipModel(g, CORES)

    def run(self, boxes):
        """Boxes (kind, core, tensor, flags, address, rows, row_bytes, pitch) through the chip."""
        ops = np.zeros(len(boxes), dtype=OP_DTYPE)
        for op, (kind, _, tensor, flags, address, rows, row_bytes, pitch) in zip(
            ops, boxes, strict=True
        ):
            op["kind"], op["tensor"], op["flags"], op["address"] = kind, tensor, flags, address
            op["rows"], op["row_bytes"], op["pitch_bytes"] = rows, row_bytes, pitch
            op["slot"] = RECEIVERS if flags & MULTICAST else 0
        cores = np.array([box[1] for box in boxes], dtype=np.int64)
        ready = np.zeros(len(boxes))
        caches = (self.l2, self.l1)
        drive(ops, cores, caches, self.servers, self.tally, self.model, ready)
        return ready

    def run_slowly(self, boxes):
        """The same through the twin."""
        for kind, core, tensor, flags, *box in boxes:
            touches = self.slow.box(*box)
            if kind == LOAD:
                receivers = RECEIVERS if flags & MULTICAST else 1
                self.slow.load(core, tensor, touches, flags & L1_BYPASS, receivers)
            elif kind == ATOMIC:
                self.slow.add(core, tensor, touches)
            else:
                self.slow.store(core, tensor, touches)

    def check(self):
        """Every column of the tally, the dirty sectors, and every set."""
        for tensor in range(TENSORS):
            for column in range(TALLY_COLUMNS):
                expected = self.slow.tally[tensor, column]
                assert self.tally[tensor, column] == expected, (tensor, column)
        assert self.tally[-1, DIRTY_NOW] == self.slow.dirty_now
        parts = [row for part in self.slow.l2 for row in part.lines]
        assert contents(self.l2, self.g.l2_ways) == plain(parts)
        firsts = [row for l1 in self.slow.l1 for row in l1.lines]
        assert contents(self.l1, self.g.l1_ways) == plain(firsts)


def contents(tags, ways):
    """Sets as lists of (line, valid sectors, dirty sectors, owner of dirty ones)."""
    return [
        [
            (e >> 16, (e >> 4) & 15, e & 15, (e >> 8) & 255 if e & 15 else 0)
            for e in row
            if e != EMPTY
        ]
        for row in tags.reshape(-1, ways).tolist()
    ]


def plain(sets):
    """The same of the twin's sets."""

    def mask(sectors):
        return sum(1 << s for s in sectors)

    return [
        [(x.number, mask(x.valid), mask(x.dirty), x.tensor if x.dirty else 0) for x in row]
        for row in sets
    ]


@pytest.fixture
def small(twin):
    """small(**changes): a chip of two partitions with 64 sets of 2 ways."""

    def build(**changes):
        usual = {
            "line_bytes": 128,
            "sectors_per_line": 4,
            "partitions": 2,
            "l2_sets": 64,
            "l2_ways": 2,
            "l1_sets": 3,
            "l1_ways": 2,
            "home_run_lines": 32,
            "answers_in_pairs": True,
            "dirty_max_sectors": 1 << 40,
        }
        return Small(twin, twin.Geometry(**{**usual, **changes}))

    return build


@st.composite
def geometries(draw, twin):
    """Small chips of every shape."""
    sectors = draw(st.sampled_from([1, 2, 4, 4]))
    return twin.Geometry(
        line_bytes=sectors * SECTOR,
        sectors_per_line=sectors,
        partitions=draw(st.sampled_from([1, 2, 2, 4])),
        l2_sets=draw(st.sampled_from([1, 2, 3, 6, 16, 32, 49, 64, 96])),
        l2_ways=draw(st.integers(1, 4)),
        l1_sets=draw(st.integers(1, 4)),
        l1_ways=draw(st.integers(1, 3)),
        home_run_lines=draw(st.sampled_from([1, 2, 4, 32, 64])),
        answers_in_pairs=sectors > 1 and draw(st.booleans()),
        dirty_max_sectors=draw(st.sampled_from([0, 3, 40, 1 << 40])),
    )


@st.composite
def boxes(draw):
    """Boxes of every kind and flag from any core, few lines in all, aligned and not."""
    kind = draw(st.sampled_from([LOAD, LOAD, LOAD, STORE, STORE, ATOMIC]))
    flags = {LOAD: [0, L1_BYPASS, LOCAL, L1_BYPASS | MULTICAST], STORE: [0, LOCAL], ATOMIC: [0]}
    grain = draw(st.sampled_from([1, 32, 128, 4096]))
    row_bytes = max(1, draw(st.integers(1, 700)) // grain * grain)
    step = draw(st.sampled_from([0, 0, 1, 60, 500]))
    return (
        kind,
        draw(st.integers(0, CORES - 1)),
        draw(st.integers(0, TENSORS - 1)),
        draw(st.sampled_from(flags[kind])),
        BASE + draw(st.integers(0, draw(st.sampled_from([200, 2000, 20000])))) // grain * grain,
        draw(st.integers(1, 5)),
        row_bytes,
        row_bytes + step,
    )


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_agrees_with_the_twin(twin, data):
    chip = Small(twin, data.draw(geometries(twin)))
    for part in data.draw(st.lists(st.lists(boxes(), max_size=12), max_size=4)):
        chip.run(part)
        chip.run_slowly(part)
        chip.check()


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    start=st.integers(0, 300),
    lines=st.integers(1, 100),
    core=st.integers(0, CORES - 1),
    cuts=st.lists(st.integers(1, 12000), max_size=4),
)
def test_whole_lines_are_the_same_fast_and_slow(twin, data, start, lines, core, cuts):
    """`read_lines` against the general walk: the same bytes as boxes that are not whole lines."""
    geometry = data.draw(geometries(twin))
    before = data.draw(st.lists(boxes(), max_size=10))
    fast, slow = Small(twin, geometry), Small(twin, geometry)
    size = geometry.line_bytes
    address = BASE + start * size
    whole = (LOAD, core, 1, L1_BYPASS, address, 1, lines * size, lines * size)
    rows = (LOAD, core, 1, L1_BYPASS, address, lines, size, size)
    padded = (LOAD, core, 1, L1_BYPASS, address, 1, lines * size, lines * size + 32)  # the pitch
    general = data.draw(st.sampled_from(["pitch", "pieces"]))
    if general == "pitch":  # one row whose pitch is not its length: the general walk
        parts = [padded]
    else:
        edges = sorted({0, lines, *(cut % lines for cut in cuts)})
        parts = [
            (LOAD, core, 1, L1_BYPASS, address + a * size, 1, (b - a) * size, (b - a) * size + 1)
            for a, b in pairwise(edges)
        ]
    fast.run([*before, data.draw(st.sampled_from([whole, rows]))])
    slow.run([*before, *parts])
    assert fast.tally.tolist() == slow.tally.tolist()
    assert fast.l2.tolist() == slow.l2.tolist()
    assert fast.l1.tolist() == slow.l1.tolist()


def test_a_far_line_leaves_a_copy_that_a_write_drops(small):
    chip = small()
    home = chip.slow.home(BASE // 128)[0]
    far = 1 - home
    line = (BASE, 1, 128, 128)
    for _ in range(2):
        chip.run([(LOAD, far, 0, L1_BYPASS, *line)])
    assert chip.tally[0].tolist() == [8, 0, 4, 0, 4, 0]  # the second time near: no fabric
    chip.run([(STORE, home, 1, 0, *line), (LOAD, far, 0, L1_BYPASS, *line)])
    assert chip.tally[0].tolist() == [12, 0, 4, 0, 8, 0]  # the copy is gone, DRAM is not asked
    assert chip.tally[1].tolist() == [0, 4, 0, 0, 0, 0]


def test_a_far_read_of_what_was_written_asks_dram_for_nothing(small):
    """The home holds the one sector that is asked for: its pair does not matter."""
    chip = small()
    home = chip.slow.home(BASE // 128)[0]
    chip.run(
        [(STORE, home, 1, 0, BASE, 1, 32, 32), (LOAD, 1 - home, 0, L1_BYPASS, BASE, 1, 32, 32)]
    )
    assert chip.tally[0, DRAM_READ] == 0
    assert chip.tally[0, L1_FILL] == 1


def test_dram_answers_in_pairs(small):
    for pairs, sectors in ((True, 2), (False, 1)):
        chip = small(answers_in_pairs=pairs)
        chip.run([(LOAD, 0, 0, L1_BYPASS, BASE, 1, 32, 32)])
        assert chip.tally[0, DRAM_READ] == sectors
        assert chip.tally[0, L1_FILL] == 1


def test_a_ceiling_of_dirty_bytes_is_kept(small):
    chip = small(dirty_max_sectors=40)
    chip.run([(STORE, i % CORES, 0, 0, BASE + 128 * i, 1, 128, 128) for i in range(64)])
    written, left = chip.tally[0, 3], chip.tally[-1, DIRTY_NOW]
    assert written + left == 64 * 4
    assert left <= 40 + 4 * 64  # a set that holds nothing else dirty cleans what was just written


def test_servers_pass_one_box_after_the_other(small):
    """Two boxes at one port: the second waits for the first; another core's port is free."""
    chip = small()
    box = (BASE, 1, 1280, 1280)
    first, second, other = chip.run([(LOAD, core, 0, L1_BYPASS, *box) for core in (0, 0, 1)])
    assert second > first
    assert chip.servers[0, 1] == pytest.approx(2 * 1280 / 64)
    assert chip.servers[1, 1] == pytest.approx(1280 / 64)
    assert other < second


@pytest.mark.parametrize("pairs", [True, False])
def test_an_addition_reads_what_l2_lacks_and_leaves_it_dirty(small, pairs):
    chip = small(answers_in_pairs=pairs)
    home = chip.slow.home(BASE // 128)[0]
    add = (ATOMIC, home, 0, 0, BASE, 1, 32, 32)
    read = 2 if pairs else 1
    chip.run([add])
    assert chip.tally[0, [L1_FILL, L1_WRITE, DRAM_READ, FABRIC]].tolist() == [0, 1, read, 0]
    assert chip.tally[-1, DIRTY_NOW] == 1
    chip.run([add])  # it is there now
    assert chip.tally[0, [L1_FILL, L1_WRITE, DRAM_READ, FABRIC]].tolist() == [0, 2, read, 0]
    assert chip.tally[-1, DIRTY_NOW] == 1


def test_an_addition_to_what_was_written_hits(small):
    chip = small()
    home = chip.slow.home(BASE // 128)[0]
    chip.run([(STORE, home, 0, 0, BASE, 1, 64, 64), (ATOMIC, home, 1, 0, BASE, 1, 32, 32)])
    assert chip.tally[1, DRAM_READ] == 0
    assert chip.tally[-1, DIRTY_NOW] == 2
    chip.run([(ATOMIC, home, 1, 0, BASE + 64, 1, 32, 32)])  # other sectors of the same line
    assert chip.tally[1, DRAM_READ] == 2
    assert chip.tally[-1, DIRTY_NOW] == 3


def test_a_far_addition_crosses_the_fabric_and_drops_copies(small):
    chip = small()
    home = chip.slow.home(BASE // 128)[0]
    far = 1 - home
    chip.run([(LOAD, far, 0, L1_BYPASS, BASE, 1, 128, 128)])
    chip.run([(ATOMIC, far, 1, 0, BASE, 1, 128, 128)])
    assert chip.tally[1].tolist() == [0, 4, 0, 0, 4, 0]  # the home has it: DRAM is not asked
    chip.run([(LOAD, far, 0, L1_BYPASS, BASE, 1, 128, 128)])
    assert chip.tally[0, FABRIC] == 8  # the copy was dropped
    assert chip.tally[0, DRAM_READ] == 4


def test_additions_are_written_back_once(small):
    """Cores add to the same lines again and again; then other lines turn the cache over."""
    chip = small(answers_in_pairs=False)
    for turn in range(5):
        chip.run(
            [(ATOMIC, (turn + i) % CORES, 0, 0, BASE + 128 * i, 1, 128, 128) for i in range(8)]
        )
    assert chip.tally[0, DRAM_READ] == 8 * 4
    assert chip.tally[0, L1_WRITE] == 5 * 8 * 4
    assert chip.tally[0, DRAM_WRITE] == 0
    others = range(BASE + 4096, BASE + 4096 + 128 * 1024, 128)
    chip.run([(LOAD, core, 1, L1_BYPASS, at, 1, 128, 128) for at in others for core in range(2)])
    assert chip.tally[0, DRAM_WRITE] == 8 * 4
    assert chip.tally[-1, DIRTY_NOW] == 0


def test_one_request_fills_a_cluster(small):
    chip = small()
    chip.run([(LOAD, 0, 0, L1_BYPASS | MULTICAST, BASE, 1, 1280, 1280)])
    assert chip.tally[0, L1_FILL] == 40
    assert chip.tally[0, SHARED_FILL] == 40 * (RECEIVERS - 1)
    assert chip.tally[0, DRAM_READ] == 40
    assert chip.servers[0, 1] == pytest.approx(1280 / 64)  # the port of the one that asks


def test_local_memory_stays_in_l1(small):
    """What a core stored it loads again without L2, of local memory and of any other."""
    chip = small()
    box = (BASE, 1, 256, 256)
    chip.run([(STORE, 0, 0, LOCAL, *box), (LOAD, 0, 0, LOCAL, *box)])
    assert chip.tally[0, [L1_FILL, L1_WRITE, DRAM_READ]].tolist() == [0, 8, 0]
    chip.run([(LOAD, 1, 0, LOCAL, *box)])  # another core has an L1 of its own
    assert chip.tally[0, L1_FILL] == 8
    chip.run([(STORE, 0, 1, 0, BASE + 4096, 1, 32, 32), (LOAD, 0, 1, 0, BASE + 4096, 1, 32, 32)])
    assert chip.tally[1, L1_FILL] == 0
