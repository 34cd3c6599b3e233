"""One cache against its slow twin and against pycachesim; its balanced index."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iosim.memory.cache import Cache, index, popcount, run_lines, sectors

COUNTS = ("hits", "misses", "fetched_bytes", "written_back_bytes", "dirty_bytes")


@st.composite
def geometries(draw):
    """Line, sectors, ways and sets of any small cache."""
    line = draw(st.sampled_from([32, 64, 128, 256]))
    ways = draw(st.integers(1, 16))
    sets = draw(st.one_of(st.sampled_from([1, 2, 4, 32, 64]), st.integers(1, 100)))
    return {
        "capacity_bytes": line * ways * sets,
        "line_bytes": line,
        "ways": ways,
        "sector_bytes": line // draw(st.sampled_from([1, 2, 4])),
        "balanced": draw(st.booleans()),
    }


@st.composite
def traces(draw, reach):
    """(address, length, write) accesses, many of them to few lines; some far beyond 32 bits."""
    base = draw(st.sampled_from([0, 1 << 20, (1 << 32) - 100, 1 << 45]))
    near = st.integers(0, max(1, draw(st.sampled_from([reach // 4, reach, 3 * reach]))))
    far = st.sampled_from([0, 0, 0, 1 << 32, 1 << 40])
    access = st.tuples(near, far, st.integers(1, 300), st.booleans())
    return [(base + at + up, n, w) for at, up, n, w in draw(st.lists(access, max_size=120))]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), geometry=geometries())
def test_agrees_with_the_twin_access_for_access(twin, data, geometry):
    cache, slow = Cache(**geometry), twin.SectoredCache(**geometry)
    for step, access in enumerate(data.draw(traces(geometry["capacity_bytes"]))):
        cache.run(access[:1], access[1], access[2])
        slow.access(*access)
        for name in COUNTS:
            assert getattr(cache, name) == getattr(slow, name), (step, name)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), geometry=geometries())
def test_one_call_for_a_trace_is_one_call_for_each_access(data, geometry):
    trace = data.draw(traces(geometry["capacity_bytes"]))
    one, many = Cache(**geometry), Cache(**geometry)
    columns = [np.array(column) for column in zip(*trace, strict=True)] or [np.empty(0)] * 3
    one.run(*columns)
    for address, length, write in trace:
        many.run([address], length, write)
    assert [getattr(one, name) for name in COUNTS] == [getattr(many, name) for name in COUNTS]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    line=st.sampled_from([32, 64, 128]),
    ways=st.sampled_from([1, 2, 4, 8, 16]),
    sets=st.sampled_from([1, 4, 16, 64]),
    spread=st.floats(0.3, 4),
)
def test_agrees_with_pycachesim(seed, line, ways, sets, spread):
    """LRU, write-back, write-allocate. What is stored is loaded first: only a load makes a line
    the most recent one there."""
    cachesim = pytest.importorskip("cachesim", reason="pycachesim is in the extra iosim[test]")
    memory = cachesim.MainMemory()
    level = cachesim.Cache("L1", sets, ways, line, "LRU", write_back=True, write_allocate=True)
    memory.load_to(level)
    memory.store_from(level)
    other = cachesim.CacheSimulator(level, memory)
    cache = Cache(capacity_bytes=sets * ways * line, line_bytes=line, ways=ways)
    rng = np.random.default_rng(seed)
    addresses = rng.integers(0, int(sets * ways * line * spread) + 1, size=400)
    writes = rng.random(400) < 0.3
    for address, write in zip(addresses.tolist(), writes.tolist(), strict=True):
        other.load(address, length=1)
        cache.run([address])
        if write:
            other.store(address, length=1)
            cache.run([address], 1, True)
    stats = level.stats()
    assert stats["MISS_count"] == cache.misses
    assert stats["HIT_count"] + stats["STORE_count"] == cache.hits  # it counts hits of loads alone
    assert stats["EVICT_byte"] == cache.written_back_bytes
    assert stats["LOAD_byte"] == 400


@pytest.mark.parametrize("sets", [1, 2, 7, 32, 60, 96, 1000, 15360, 16384, 20480])
@pytest.mark.parametrize("start", [0, 5, 12345 * 32, (1 << 32) // 128])
def test_a_range_as_large_as_the_cache_fills_every_set_evenly(sets, start):
    ways = 4
    cache = Cache(capacity_bytes=sets * ways * 128, line_bytes=128, ways=ways, balanced=True)
    run = run_lines(sets)
    aligned = start // (sets * ways) * (sets * ways)  # whole turns round the cache
    lines = aligned + np.arange(sets * ways)
    rows = np.array([index(line, sets, run) for line in lines.tolist()])
    assert np.bincount(rows, minlength=sets).tolist() == [ways] * sets
    cache.run(np.tile(lines * 128, 2), 128)
    assert (cache.misses, cache.hits) == (sets * ways, sets * ways)


@pytest.mark.parametrize("sets", [10240, 12800, 15360])  # those of the profiles
@pytest.mark.parametrize("shift", range(10))
def test_strides_of_powers_of_two_fill_sets_evenly(sets, shift):
    """Strides up to 64 KiB: as many lines as four ways hold, nowhere more than four times that."""
    run = run_lines(sets)
    lines = (np.arange(4 * sets) << shift).tolist()
    rows = np.bincount([index(line, sets, run) for line in lines], minlength=sets)
    assert rows.max() <= 16
    assert (rows > 0).mean() > 0.9


@settings(max_examples=300, deadline=None)
@given(line=st.integers(0, 1 << 44), sets=st.integers(1, 1 << 20), turn=st.integers(0, 1000))
@example(line=2505, sets=2505, turn=0)  # 2505 · (1 / 2505) < 1
@example(line=49, sets=49, turn=0)
def test_index_is_exact(twin, line, sets, turn):
    for number in (line, turn * sets, turn * sets + line % sets):
        row = index(number, sets, run_lines(sets))
        assert 0 <= row < sets
        assert row == twin.balanced_set(number, sets)


def test_sectors_and_their_number():
    for mask in range(16):
        assert popcount(mask) == bin(mask).count("1")
    for first in range(128):
        for last in range(first, 128):
            expected = sum(1 << s for s in range(first // 32, last // 32 + 1))
            assert sectors(first, last, 5) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"line_bytes": 96}, "powers of two"),
        ({"capacity_bytes": 0}, "capacity 0"),
        ({"capacity_bytes": 1000}, "not a multiple of 512"),
        ({"sector_bytes": 16}, "1 to 4 sectors of 16"),
        ({"sector_bytes": 256}, "1 to 4 sectors of 256"),
    ],
)
def test_impossible_geometry_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Cache(**{"capacity_bytes": 4096, "line_bytes": 128, "ways": 4, **change})
