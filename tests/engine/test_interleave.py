"""Resident blocks: how many, in which order, what they wait for; with block programs of our own."""

import dataclasses

import numpy as np
import pytest

from iosim.emit import async_matrix, barrier, block_program, exps, load, matrix, store
from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.launch import Footprint, Launch, Operand, blocks_per_core, occupancy
from iosim.ops import L1_BYPASS
from iosim.profiles import load_profile
from iosim.traffic import Work

CHIP = load_profile("h200")
AT = 1 << 32
PARAMS = np.dtype(
    [(name, np.int64) for name in ("steps", "bytes", "m", "slow", "long", "gap", "shared", "apart")]
)
MATRIX_CYCLES = 2 * 64 * 64 * 64 / CHIP.rate("matrix", "fp16").per_core_per_clock


@block_program
def stream(block, first, last, p, out, tensors):
    """Each step loads `bytes` of its own and multiplies once; every `slow`th block `long` times.

    `gap` is added to the step numbers from step 1 on: a program that is wrong. `apart`: nothing
    waits for the products.
    """
    n = 0
    for step in range(first, min(last, p.steps)):
        number = step + (p.gap if step else 0)
        at = AT + (0 if p.shared else block * p.steps * p.bytes) + step * p.bytes
        n = load(out, n, 0, L1_BYPASS, number, at, 1, p.bytes, p.bytes)
        times = p.long if p.slow and block % p.slow == 0 else 1
        if p.apart:
            n = async_matrix(out, n, number, p.m * times, 64, 64)
        else:
            n = matrix(out, n, number, p.m * times, 64, 64)
    if last < p.steps:
        return n, False
    at = AT + (1 << 40) + block * 32
    return store(out, n, 1, 0, p.steps - 1 + p.gap, at, 1, 32, 32), True


@block_program
def ordered(block, first, last, p, out, tensors):
    """Stores its number, in order of the launch, into one line of many sectors."""
    n = barrier(out, 0, 0)
    n = exps(out, n, 0, p.m, 64)
    return store(out, n, 1, 0, 0, AT + (1 << 40) + block * 32, 1, 32, 32), True


def params(**values):
    record = np.zeros(1, dtype=PARAMS).view(np.recarray)
    usual = {"steps": 8, "bytes": 4096, "m": 64, "long": 1}
    for name, value in {**usual, **values}.items():
        record[name] = value
    return record[0]


def launch(blocks=1, *, program=stream, stages=2, footprint=None, **values):
    p = params(**values)
    return Launch(
        name="own",
        program=program,
        params=p,
        blocks=blocks,
        steps=int(p["steps"]),
        ops_per_step=2,
        ops_at_ends=3,
        operands=(
            Operand(name="X", role="in", address=AT, size_bytes=1 << 40, unique_bytes=0),
            Operand(name="Y", role="out", address=AT + (1 << 40), size_bytes=1, unique_bytes=0),
        ),
        footprint=footprint or Footprint(shared_bytes=200000, registers=64, threads=128),
        work=Work(),
        dtype="fp16",
        stages=stages,
    )


def quiet(chip=CHIP, cores=0, **limits):
    """A chip whose cores are all alike, with other limits or fewer cores."""
    return dataclasses.replace(
        chip,
        cores=dataclasses.replace(
            chip.cores,
            count=cores or chip.cores.count,
            resident_speed_spread=0.0,
            core_speed_spread=0.0,
            jitter_cycles=0.0,
        ),
        limits=dataclasses.replace(chip.limits, **limits),
    )


def ran(one, chip=None):
    chip = chip or quiet()
    return run_blocks(
        one, chip, CachedMemory(chip), clock_hz=chip.cores.clock_hz, seed=0, soil=False
    )


@pytest.mark.parametrize(
    ("shared_bytes", "registers", "threads", "blocks", "because"),
    [
        (232448, 32, 128, 1, "shared memory"),  # the most that one block may take
        (65536, 32, 128, 3, "shared memory"),  # ⌊233472 / (65536 + 1024)⌋
        (76800, 32, 128, 3, "shared memory"),  # 3 × (76800 + 1024) is the whole pool
        (76801, 32, 128, 2, "shared memory"),
        (0, 255, 256, 1, "registers"),  # 256 · 32 a warp: 8 warps are all of 65536
        (0, 128, 256, 2, "registers"),
        (0, 129, 256, 1, "registers"),  # 136 in units of 256 a warp
        (0, 64, 256, 4, "registers"),
        (0, 65, 256, 3, "registers"),
        (0, 32, 1024, 2, "warps"),
        (0, 32, 256, 8, "warps"),
        (0, 16, 32, 32, "blocks"),
        (0, 16, 1, 32, "blocks"),
    ],
)
def test_occupancy_is_what_cuda_says(shared_bytes, registers, threads, blocks, because):
    footprint = Footprint(shared_bytes=shared_bytes, registers=registers, threads=threads)
    allowed = occupancy(footprint, CHIP.limits)
    assert blocks_per_core(footprint, CHIP.limits) == blocks == allowed[because]


def waves(blocks, cores, resident):
    """Makespan of equal blocks that only compute."""
    chip = quiet(cores=cores, blocks_per_core=resident, block_launch_cycles=0)
    small = Footprint(shared_bytes=0, registers=16, threads=32)
    return ran(launch(blocks, program=ordered, m=64, footprint=small), chip).makespan_cycles


def test_blocks_run_in_waves():
    one = waves(4, 4, 1)
    for count in (2, 3, 5):
        assert waves(4 * count, 4, 1) == pytest.approx(count * one, rel=0.02)
    assert waves(5, 4, 1) == pytest.approx(2 * one, rel=0.02)  # one block in the last wave


def test_residents_share_a_core():
    """Two to a core take twice as long each: the time of all is that of one after the other."""
    assert waves(8, 4, 2) == pytest.approx(waves(8, 4, 1), rel=0.05)


def test_the_next_block_starts_where_another_has_finished():
    """Two cores, one block each. Block 0 is as long as the seven others: all of them run beside."""
    chip = quiet(cores=2, block_launch_cycles=0)
    usual = {"m": 20 * 64, "shared": 1, "long": 7}  # products take longer than loads
    even = ran(launch(8, **usual), chip).makespan_cycles
    alone = ran(launch(1, slow=8, **usual), chip).makespan_cycles
    uneven = ran(launch(8, slow=8, **usual), chip).makespan_cycles
    assert even == pytest.approx(alone * 4 / 7, rel=0.25)
    assert alone <= uneven < 1.25 * alone  # equal shares would take 10/7 of it


def test_blocks_start_in_launch_order():
    """With one place, one block after the other: memory is read in the order of their numbers."""
    chip = quiet(cores=1)
    seen = []

    def watched(block, first, last, p, out, tensors):
        seen.append((block, first))
        return stream(block, first, last, p, out, tensors)

    ran(dataclasses.replace(launch(20), program=watched), chip)
    assert seen == [(block, 0) for block in range(20)]
    seen.clear()
    ran(dataclasses.replace(launch(20), program=watched), quiet(cores=6))
    assert [block for block, _ in seen] == list(range(20))


def test_steps_are_asked_for_in_order_and_once():
    """A long block comes in pieces, whatever fits the buffer."""
    seen = []

    def watched(block, first, last, p, out, tensors):
        seen.append((first, last))
        return stream(block, first, last, p, out, tensors)

    counts = ran(dataclasses.replace(launch(1, steps=1000), program=watched))
    assert seen[0][0] == 0
    assert [b for _, b in seen[:-1]] == [a for a, _ in seen[1:]]
    assert seen[-2][1] < 1000 <= seen[-1][1]
    assert counts.traffic.l1_fill_bytes == 1000 * 4096


@pytest.mark.parametrize("apart", [0, 1])
def test_one_stage_exposes_the_latency_of_each_step(apart):
    """More stages hide it. A load takes the room of a product, which must have ended, or, where
    the program does not wait for products, must have begun."""
    steps = 64
    time = {
        stages: ran(launch(1, m=256, steps=steps, stages=stages, apart=apart)).makespan_cycles
        for stages in (1, 2, 3, 8)
    }
    products = steps * MATRIX_CYCLES * 256 / 64
    latencies = CHIP.dram.latency_cycles, CHIP.dram.far_miss_latency_cycles
    assert time[1] >= products + steps * min(latencies)
    assert time[1] >= time[2] > time[3] >= time[8] >= products
    assert (time[1] > time[2]) == bool(apart)
    load = max(latencies) + 4096 / 64 + 100
    assert load < 6 * MATRIX_CYCLES * 256 / 64  # so many products hide a load
    assert time[8] <= products + 2 * load


def test_bytes_do_not_depend_on_the_stages():
    for blocks in (1, 50, 400):
        fills = {ran(launch(blocks, stages=s)).traffic.l1_fill_bytes for s in (1, 2, 4)}
        assert fills == {blocks * 8 * 4096}


@pytest.mark.parametrize("stages", [2, 3])
def test_a_program_with_gaps_in_its_steps_is_refused(stages):
    with pytest.raises(RuntimeError, match="own: 3 blocks wait for each other for ever"):
        ran(launch(3, stages=stages, gap=10))


def test_no_gap_too_wide_for_the_stages_is_no_deadlock():
    assert ran(launch(3, stages=8, gap=5)).traffic.l1_fill_bytes == 3 * 8 * 4096


def test_slow_slots_stay_slow():
    """Blocks that share a core get unequal shares of it where the chip says so: it takes longer."""
    small = Footprint(shared_bytes=100000, registers=64, threads=128)
    even = quiet()
    uneven = dataclasses.replace(
        even, cores=dataclasses.replace(even.cores, resident_speed_spread=0.2)
    )
    one = launch(2 * CHIP.cores.count, footprint=small, steps=64)
    times = [ran(one, chip).makespan_cycles for chip in (even, uneven)]
    assert 1.1 < times[1] / times[0] < 1.3
