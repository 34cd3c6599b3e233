"""What holds for any kernel, problem, schedule and chip with caches."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.kernels import load_kernel
from iosim.problem import Attention, Gemm, Schedule, Stream
from iosim.profiles import load_profile, profile_names
from iosim.simulation import complete, simulate

CHIPS = {chip.name: chip for chip in map(load_profile, profile_names()) if chip.grid is None}
CHIP = load_profile("h200")
ATTENTION = ("flash2", "flash1", "standard")


@st.composite
def attention(draw):
    """Small attention problems, any mask, rows that are no whole sectors among them."""
    kv_heads = draw(st.integers(1, 3))
    return Attention(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        seqlen=draw(st.integers(1, 300)),
        seqlen_k=draw(st.integers(1, 300)),
        head_dim=draw(st.sampled_from([8, 16, 40, 64, 128])),
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.sampled_from([0, 0, 1, 7, 100])),
    )


@st.composite
def requests(draw, kernels=(*ATTENTION, "gemm", "copy")):
    """(kernel, problem, schedule) of a small run."""
    kernel = draw(st.sampled_from(kernels))
    if kernel == "copy":
        stream = Stream(elements=draw(st.integers(1, 100_000)))
        return kernel, stream, Schedule(tile=(draw(st.sampled_from([256, 1024, 4096])),))
    side = st.sampled_from([16, 32, 64, 128])
    stages, warps = draw(st.integers(1, 3)), draw(st.sampled_from([4, 8]))
    if kernel == "gemm":
        sizes = {name: draw(st.integers(1, 300)) for name in "mnk"}
        tile = (draw(side), draw(side), draw(st.sampled_from([16, 32, 64])))
        group = draw(st.integers(1, 4))
        return kernel, Gemm(**sizes), Schedule(tile=tile, group=group, stages=stages, warps=warps)
    tile, order = (draw(side), draw(side)), draw(st.sampled_from(["query", "head"]))
    problem = draw(attention())
    if kernel == "flash1":  # it never comes to rows that see no key: O is 0 there beforehand
        longer = max(problem.seqlen, problem.seqlen_k)
        problem = dataclasses.replace(problem, seqlen_k=longer)
    return (
        kernel,
        problem,
        Schedule(tile=tile, order=order, stages=stages, warps=warps),
    )


def run(kernel, problem, schedule, chip=CHIP, **how):
    """The result, where the blocks fit."""
    result = simulate(kernel, problem, chip, schedule, **how)
    assume(result.fits)
    return result


def capacity(chip):
    level = chip.levels["l2"]
    return level.capacity_bytes * level.partitions


def residue(chip):
    """Dirty bytes before a cold run: whole lines of what the profiler left."""
    level = chip.levels["l2"]
    return level.dirty_before_bytes // level.line_bytes * level.line_bytes


@settings(max_examples=80, deadline=None)
@given(
    request=requests(), name=st.sampled_from(sorted(CHIPS)), cache=st.sampled_from(["cold", "warm"])
)
def test_a_level_moves_no_more_than_the_one_above_asks_for(request, name, cache):
    chip = CHIPS[name]
    result = run(*request, chip, cache=cache)
    pair = max(1, chip.dram.answer_bytes // chip.levels["l2"].sector_bytes)  # what DRAM answers
    for launch in result.launches:
        for label, row in launch.operands.items():
            assert row.dram_read_bytes <= pair * row.l1_fill_bytes, label
            assert row.l2_hit_bytes <= row.l1_fill_bytes
        t = launch.traffic
        assert t.l2_from_l1_bytes == t.l1_fill_bytes + t.l1_write_bytes
        assert t.l2_fabric_bytes <= pair * t.l1_fill_bytes + t.l1_write_bytes
        for field in ("dram_read_bytes", "l1_fill_bytes", "l1_write_bytes"):
            parts = sum(getattr(row, field) for row in launch.operands.values())
            assert getattr(t, field) == parts, field  # every byte belongs to an operand
    if chip.levels["l2"].partitions == 1:
        assert result.traffic.l2_fabric_bytes == 0


@settings(max_examples=80, deadline=None)
@given(request=requests(), name=st.sampled_from(sorted(CHIPS)))
def test_cold_reads_are_at_least_what_is_compulsory(request, name):
    chip = CHIPS[name]
    result = run(*request, chip)
    for launch in result.launches:
        roles = {operand.name: operand for operand in launch.launch.operands}
        for label, row in launch.operands.items():
            if roles[label].role == "in":
                assert row.dram_read_bytes >= roles[label].unique_bytes, label
                assert row.l1_fill_bytes >= roles[label].unique_bytes, label
            elif roles[label].role == "out":
                assert row.l1_write_bytes >= roles[label].unique_bytes, label
    assert result.traffic.dram_read_bytes >= result.compulsory[0]


@settings(max_examples=80, deadline=None)
@given(request=requests(), name=st.sampled_from(sorted(CHIPS)))
def test_what_is_written_is_drained_or_still_dirty(request, name):
    chip = CHIPS[name]
    t = run(*request, chip).traffic
    result_written = t.dram_write_bytes + t.dirty_left_bytes - residue(chip)
    assert result_written <= t.l1_write_bytes
    assert result_written >= sum(
        operand.unique_bytes
        for operand in {o.name: o for o in planned_operands(*request, chip)}.values()
        if operand.role != "in"
    )
    assert 0 <= t.dirty_left_bytes <= capacity(chip)


def planned_operands(kernel, problem, schedule, chip):
    algorithm = load_kernel(kernel)
    full = complete(algorithm, problem, chip, schedule)
    return [o for one in algorithm.launches(problem, full, chip) for o in one.operands]


@pytest.mark.parametrize("elements", [1 << 24, 1 << 26])
@pytest.mark.parametrize("kernel", ["fill", "copy"])
def test_what_is_written_is_drained_or_still_dirty_beyond_the_cache(kernel, elements):
    t = simulate(kernel, Stream(elements=elements), CHIP).traffic
    assert t.l1_write_bytes == 2 * elements
    assert t.dram_write_bytes + t.dirty_left_bytes - residue(CHIP) == 2 * elements
    most = CHIP.levels["l2"].dirty_max_bytes
    assert t.dirty_left_bytes <= most + CHIP.levels["l2"].line_bytes
    assert t.dirty_left_bytes > 0.9 * min(most, 2 * elements)


@settings(max_examples=25, deadline=None)
@given(
    kernel=st.sampled_from(ATTENTION),
    kv_heads=st.integers(1, 4),
    seqlen=st.sampled_from([64, 96, 192]),
    name=st.sampled_from(sorted(CHIPS)),
)
def test_bytes_of_keys_and_values_grow_with_their_heads(kernel, kv_heads, seqlen, name):
    chip = CHIPS[name]
    problem = Attention(heads=12, kv_heads=kv_heads, seqlen=seqlen, head_dim=64)
    result = run(kernel, problem, Schedule(tile=(32, 32), warps=4), chip)
    for label in "KV":
        row = result.operands[label]
        assert row.dram_read_bytes == kv_heads * seqlen * 64 * 2 == row.unique_bytes


@settings(max_examples=40, deadline=None)
@given(request=requests(kernels=("flash2", "gemm")), name=st.sampled_from(sorted(CHIPS)))
def test_order_changes_hits_and_never_requests(request, name):
    """Loads past L1: what L1 holds depends on which blocks share a core."""
    chip = CHIPS[name]
    kernel, problem, schedule = request
    schedule = dataclasses.replace(schedule, stages=2)
    other = {"order": "head" if schedule.order == "query" else "query", "group": 5}
    one = run(kernel, problem, schedule, chip)
    two = run(kernel, problem, dataclasses.replace(schedule, **other), chip)
    passing = [label for label in one.operands if label in ("K", "V", "A", "B")]
    for label in passing:
        assert one.operands[label].l1_fill_bytes == two.operands[label].l1_fill_bytes > 0, label
    assert one.traffic.l1_write_bytes == two.traffic.l1_write_bytes
    assert one.work == two.work


def even(chip, factor):
    """One partition, no drift between cores; `factor` of the capacity of the L2."""
    level = chip.levels["l2"]
    row = level.line_bytes * level.ways * 32
    size = max(row, int(level.capacity_bytes * factor) // row * row)
    one = dataclasses.replace(
        level, partitions=1, capacity_bytes=size, dirty_max_bytes=0, dirty_before_bytes=0
    )
    cores = dataclasses.replace(
        chip.cores, resident_speed_spread=0.0, core_speed_spread=0.0, jitter_cycles=0.0
    )
    return dataclasses.replace(chip, levels={**chip.levels, "l2": one}, cores=cores)


@pytest.mark.parametrize("kernel", ATTENTION)
@pytest.mark.parametrize("causal", [False, True])
def test_reads_never_rise_with_the_capacity(kernel, causal):
    problem = Attention(heads=4, seqlen=1024, head_dim=64, causal=causal)
    schedule = Schedule(tile=(64, 64), stages=2, warps=4)
    reads = [
        simulate(kernel, problem, even(CHIP, factor), schedule).traffic.dram_read_bytes
        for factor in (1 / 512, 1 / 128, 1 / 32, 1 / 8, 1 / 2, 2)
    ]
    assert all(after <= before * 1.01 for before, after in pairwise(reads)), reads
    assert reads[0] > 1.1 * reads[-1]
    rows = 4 * 1024
    output = rows * (64 * 2 + 2 * 4) if kernel == "flash1" else 0  # it reads O, l and m as well
    assert reads[-1] == 3 * rows * 64 * 2 + output


@settings(max_examples=20, deadline=None)
@given(request=requests(), name=st.sampled_from(sorted(CHIPS)), seed=st.integers(0, 1 << 31))
def test_the_same_seed_gives_the_same_bits(request, name, seed):
    chip = CHIPS[name]
    one, two = (run(*request, chip, seeds=(seed,)).launches for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert a.traffic == b.traffic
        assert a.operands == b.operands
        assert a.makespan_cycles == b.makespan_cycles


@settings(max_examples=15, deadline=None)
@given(
    request=requests(),
    name=st.sampled_from(sorted(CHIPS)),
    seeds=st.lists(st.integers(0, 99), min_size=2),
)
def test_the_band_holds_the_values_of_all_seeds(request, name, seeds):
    chip = CHIPS[name]
    seeds = seeds[:4]
    together = run(*request, chip, seeds=seeds)
    each = [run(*request, chip, seeds=(seed,)).traffic for seed in seeds]
    assert together.traffic == each[0]
    for label, band in together.band.items():
        values = [getattr(traffic, label) for traffic in each]
        assert band == (min(values), max(values)), label


@settings(max_examples=40, deadline=None)
@given(request=requests(), name=st.sampled_from(sorted(CHIPS)))
def test_a_warm_cache_that_holds_all_reads_nothing(request, name):
    chip = CHIPS[name]
    t = run(*request, chip, cache="warm").traffic
    cold = run(*request, chip).traffic
    assert t.dram_read_bytes == 0
    assert t.l1_write_bytes == cold.l1_write_bytes


@settings(max_examples=200, deadline=None)
@given(problem=attention(), m=st.integers(1, 70), n=st.integers(1, 70))
def test_tiles_of_a_mask_are_those_that_hold_a_visible_pair(problem, m, n):
    schedule = Schedule(tile=(m, n), stages=2, warps=4)
    (launch,) = load_kernel("flash2").launches(problem, schedule, CHIP)
    visited = 0
    for row0 in range(0, problem.seqlen, m):
        spans = [problem.visible(row) for row in range(row0, min(row0 + m, problem.seqlen))]
        seen = {key // n for first, last in spans for key in range(first, last)}
        visited += len(seen)
    heads = problem.batch * problem.heads
    assert launch.work.issued_flops == 4 * m * n * problem.head_dim * visited * heads


@pytest.mark.parametrize("side", [1, 2, 7, 32])
def test_causal_and_windowed_tiles_by_closed_form(side):
    def tiles(**mask):
        problem = Attention(heads=1, seqlen=side * 32, head_dim=16, **mask)
        (launch,) = load_kernel("flash2").launches(
            problem, Schedule(tile=(32, 32), stages=2, warps=4), CHIP
        )
        return launch.work.issued_flops // (4 * 32 * 32 * 16)

    assert tiles() == side * side
    assert tiles(causal=True) == side * (side + 1) // 2
    assert tiles(causal=True, window=1) == side
    assert tiles(causal=True, window=33) == 2 * side - 1
    assert tiles(causal=True, window=34) == max(2 * side - 1, 3 * side - 3)
    assert tiles(window=2) == 3 * side - 2


def test_a_launch_leaves_its_bytes_to_the_next():
    """Nobody's lines: what another launch wrote is no operand of the next one."""
    memory = CachedMemory(CHIP)
    kernel = load_kernel("copy")
    problem = Stream(elements=1 << 16)
    (launch,) = kernel.launches(problem, kernel.default_schedule(problem, CHIP), CHIP)
    how = {"clock_hz": CHIP.cores.clock_hz, "seed": 0, "soil": False}
    first = run_blocks(launch, CHIP, memory, **how)
    again = run_blocks(launch, CHIP, memory, **how)
    assert first.traffic.dram_read_bytes == 2 << 16
    assert again.traffic.dram_read_bytes == 0
    assert again.traffic.dirty_left_bytes == first.traffic.dirty_left_bytes == 2 << 16
