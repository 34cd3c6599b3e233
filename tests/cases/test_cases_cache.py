"""Public cases about caches: small inputs whose right value is known from elsewhere."""

import numpy as np
import pytest

from iosim.memory.cache import Cache
from iosim.problem import Attention, Schedule, Stream
from iosim.profiles import load_profile
from iosim.simulation import simulate

MIB = 1 << 20


def cache(**changes):
    """One set-associative cache of 128-byte lines in sectors of 32."""
    usual = {"capacity_bytes": 64 * 1024, "line_bytes": 128, "ways": 4, "sector_bytes": 32}
    return Cache(**{**usual, **changes})


@pytest.mark.parametrize("sector_bytes", [32, 128])
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("up", [32, 33, 40])
def test_f1_a_tag_is_never_cut(sector_bytes, balanced, up):
    both = [0xF, 0xF + (1 << up)] * 2
    seen = cache(sector_bytes=sector_bytes, balanced=balanced)
    seen.run(both)
    assert (seen.misses, seen.hits) == (2, 2)


@pytest.mark.parametrize("write", [False, True])
def test_f2_an_access_across_lines_touches_each(write):
    seen = cache()
    seen.run([120], 16, write)
    assert (seen.misses, seen.hits) == (2, 0)
    seen.run([120, 100], [16, 160], write)  # lines 0 and 1 again; line 0, more of line 1, line 2
    assert (seen.misses, seen.hits) == (2 + 2, 2 + 1)


def test_f4_an_empty_way_never_hits():
    seen = Cache(capacity_bytes=64, line_bytes=8, ways=2)
    seen.run([0x38, 0x18])  # both in set 3
    assert (seen.misses, seen.hits) == (2, 0)
    for address in (0, 8):  # tag 0, as a cleared way would have
        empty = Cache(capacity_bytes=64, line_bytes=8, ways=2)
        empty.run([address])
        assert (empty.misses, empty.hits) == (1, 0)


@pytest.mark.parametrize("dirty_bytes", [32, 64, 128])
def test_f6_only_dirty_sectors_are_written_back(dirty_bytes):
    seen = cache(capacity_bytes=128, ways=1)
    seen.run([0], 128)
    seen.run([0], dirty_bytes, True)
    assert (seen.dirty_bytes, seen.written_back_bytes) == (dirty_bytes, 0)
    seen.run([128], 32)
    assert (seen.dirty_bytes, seen.written_back_bytes) == (0, dirty_bytes)


def test_f7_a_write_miss_fetches_nothing_and_is_paid_later():
    seen = cache(capacity_bytes=1024, ways=1)
    seen.run(np.arange(0, 1024, 128), 128, True)
    assert (seen.fetched_bytes, seen.written_back_bytes, seen.dirty_bytes) == (0, 0, 1024)
    seen.run(np.arange(1024, 2048, 128), 128)
    assert (seen.fetched_bytes, seen.written_back_bytes, seen.dirty_bytes) == (1024, 1024, 0)


def test_f7_on_a_chip_a_fill_reads_nothing_and_writes_once():
    fill = simulate("fill", Stream(elements=64 * MIB), load_profile("a100-80gb")).traffic
    left_by_others = load_profile("a100-80gb").levels["l2"].dirty_before_bytes
    assert fill.dram_read_bytes == 0
    assert fill.l1_write_bytes == 128 * MIB
    written = fill.dram_write_bytes + fill.dirty_left_bytes
    assert 128 * MIB <= written <= 128 * MIB + left_by_others


@pytest.mark.parametrize(("sector_bytes", "times"), [(32, 1), (128, 4)])
def test_f8_a_sector_miss_fetches_the_sector_not_the_line(sector_bytes, times):
    seen = cache(sector_bytes=sector_bytes)
    seen.run(np.arange(0, 1 << 20, 128), 4)
    assert seen.fetched_bytes == (1 << 20) // 128 * 32 * times
    seen = cache(capacity_bytes=1 << 20, sector_bytes=sector_bytes)
    seen.run(np.arange(0, 1 << 20, 32), 32)
    assert seen.fetched_bytes == 1 << 20


@pytest.mark.parametrize("profile", ["h200", "a100-80gb"])
def test_f8_on_a_chip_a_strided_read_brings_sectors(profile):
    chip = load_profile(profile)
    read = simulate("strided", Stream(elements=1 << 18, stride=64), chip).traffic  # one in 128 B
    assert read.l1_fill_bytes == (1 << 18) * 32
    assert read.dram_read_bytes == (1 << 18) * max(32, chip.dram.answer_bytes)


@pytest.mark.parametrize("profile", ["h200", "a100-80gb"])
def test_b2_what_never_left_the_cache_is_no_hbm_traffic(profile):
    chip = load_profile(profile)
    size = 8 * MIB
    fill = simulate("fill", Stream(elements=size // 2), chip).traffic
    assert fill.l1_write_bytes == size
    assert fill.dram_write_bytes < size // 4
    assert fill.dirty_left_bytes >= size - fill.dram_write_bytes


def test_b3_each_level_apart():
    """d 256 and 2 KV heads, many query heads: gigabytes reach the cores, HBM gives K and V once."""
    chip = load_profile("h200")
    problem = Attention(heads=16, kv_heads=2, seqlen=4096, head_dim=256)
    unique = 2 * 2 * 4096 * 256 * 2
    assert unique == 8388608  # 8.39 MB
    result = simulate("flash2", problem, chip, Schedule(tile=(64, 32), stages=2, warps=8))
    operands = result.launches[0].operands
    moved = {name: operands[name] for name in "KV"}
    assert sum(one.unique_bytes for one in moved.values()) == unique
    assert sum(one.l1_fill_bytes for one in moved.values()) == unique * 8 * 64
    from_hbm = sum(one.dram_read_bytes for one in moved.values())
    assert unique <= from_hbm < 1.05 * unique
