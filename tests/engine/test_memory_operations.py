"""Local memory, additions and multicast loads through the engines, with programs of our own."""

import dataclasses

import numpy as np
import pytest

from iosim.emit import atomic, block_program, matrix, multicast, spill, store
from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.engine.grid import run_grid
from iosim.launch import Footprint, Launch, Operand, blocks_per_core
from iosim.ops import WINDOW
from iosim.profiles import load_profile
from iosim.traffic import Work

GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")
AT, LOCAL_AT = 1 << 32, 1 << 41
LINE = 128
PARAMS = np.dtype([(name, np.int64) for name in ("steps", "bytes", "flags", "same", "cores")])


@block_program
def spilling(block, first, last, p, out, tensors):
    """Each step multiplies and spills; the block stores one line at its end."""
    n = 0
    for step in range(first, min(last, p.steps)):
        n = matrix(out, n, step, 64, 64, 64)
        n = spill(out, n, 1, step, LOCAL_AT, p.bytes)
    if last < p.steps:
        return n, False
    return store(out, n, 0, 0, p.steps - 1, AT + block * LINE, 1, LINE, LINE), True


@block_program
def adding(block, first, last, p, out, tensors):
    """Each step adds to a box: the same one in every block, or one of its own; a step each."""
    n = 0
    for step in range(first, min(last, p.steps)):
        at = AT + step * p.bytes + (0 if p.same else block * p.steps * p.bytes)
        n = atomic(out, n, 0, p.flags, step, at, 1, p.bytes, p.bytes)
    return n, last >= p.steps


@block_program
def sharing(block, first, last, p, out, tensors):
    """Each block loads its share of one box for all blocks of its cluster."""
    return multicast(out, 0, 0, 0, AT + block * p.bytes, 1, p.bytes, p.cores), True


@block_program
def filling(block, first, last, p, out, tensors):
    """Stores a stretch of its own."""
    return store(out, 0, 0, 0, 0, AT + block * p.bytes, 1, p.bytes, p.bytes), True


def launch(program, blocks, *, spilled=0, size=1 << 40, local=0, names=("X", "local"), **values):
    """A launch of 128 threads a block that spill `spilled` registers each."""
    record = np.zeros(1, dtype=PARAMS).view(np.recarray)
    for name, value in {"steps": 4, "bytes": 4096, "cores": 1, **values}.items():
        record[name] = value
    operands = [(names[0], "out", AT, size), (names[1], "scratch", LOCAL_AT, local)]
    return Launch(
        name=program.__name__,
        program=program,
        params=record[0],
        blocks=blocks,
        steps=int(record[0]["steps"]),
        ops_per_step=3,
        ops_at_ends=1,
        operands=tuple(
            Operand(name=name, role=role, address=at, size_bytes=bytes_, unique_bytes=0)
            for name, role, at, bytes_ in operands
        ),
        footprint=Footprint(
            shared_bytes=50_000, registers=64, threads=128, spilled_registers=spilled
        ),
        work=Work(),
        dtype="bf16",
    )


def ran(one, memory=None):
    memory = memory or CachedMemory(GPU)
    return run_blocks(one, GPU, memory, clock_hz=1.7e9, seed=0, soil=False)


def spilling_launch(blocks, registers=4, **more):
    """`spilling` with the local memory that it needs."""
    size = registers * 4 * 128
    empty = launch(spilling, blocks, spilled=registers)
    resident = blocks_per_core(empty.footprint, GPU.limits) * GPU.cores.count
    return launch(
        spilling, blocks, spilled=registers, bytes=size, local=resident * size, **more
    ), resident


@pytest.mark.parametrize("share", [0.25, 1, 3])
def test_resident_blocks_share_no_line_of_local_memory(share):
    """All of the operand is in L2 afterwards, once: neither two blocks in one place nor a gap."""
    _, resident = spilling_launch(1)
    blocks = int(resident * share)
    one, _ = spilling_launch(blocks)
    memory = CachedMemory(GPU)
    counts = ran(one, memory)
    lines = memory.tags[memory.tags >= 0] >> 16
    local = np.sort(lines[lines >= LOCAL_AT // LINE]) * LINE
    used = min(blocks, resident) * one.footprint.local_bytes
    assert local.tolist() == list(range(LOCAL_AT, LOCAL_AT + used, LINE))
    assert used <= one.operands[1].size_bytes
    steps = 4
    assert counts.operands["local"].l1_write_bytes == blocks * steps * one.footprint.local_bytes
    assert counts.operands["local"].l1_fill_bytes == 0
    assert counts.traffic.dirty_left_bytes == used + blocks * LINE


@pytest.mark.parametrize("steps", [1, 7, 700])
def test_long_blocks_keep_their_place(steps):
    """A refill moves the operations that are left; their place is settled once."""
    one, resident = spilling_launch(264, steps=steps)
    assert resident >= 264
    memory = CachedMemory(GPU)
    counts = ran(one, memory)
    lines = memory.tags[memory.tags >= 0] >> 16
    used = 264 * one.footprint.local_bytes
    assert (lines >= LOCAL_AT // LINE).sum() * LINE == used
    assert lines.max() * LINE < LOCAL_AT + used
    assert counts.operands["local"].l1_write_bytes == steps * used


def test_local_memory_that_is_left_dirty_is_the_next_launch_s_by_name():
    """Or nobody's, where that has none; the launches' stores turn the cache over."""
    for names, owner in ((("Y", "local"), "local"), (("Y", "other"), None)):
        memory = CachedMemory(GPU)
        first, _ = spilling_launch(132)
        ran(first, memory)
        left = 132 * first.footprint.local_bytes
        size = 1 << 16
        turned = launch(filling, 4096, bytes=size, local=1, names=names)
        counts = ran(turned, memory)
        by_name = {name: row.dram_write_bytes for name, row in counts.operands.items()}
        nobody = counts.traffic.dram_write_bytes - sum(by_name.values())
        if owner:
            assert by_name["local"] == left
            assert nobody == 0  # X of the first launch was written once more
        else:
            assert by_name["other"] == 0
            assert nobody == left


def test_additions_of_all_blocks_read_and_write_a_line_once():
    """Every block adds to the same 16 KiB: HBM gives them once, and has them back later."""
    counts = ran(launch(adding, 500, same=1))
    row = counts.operands["X"]
    assert row.l1_write_bytes == 500 * 4 * 4096
    assert row.l1_fill_bytes == 0
    assert row.dram_read_bytes == 4 * 4096
    assert row.dram_write_bytes == 0
    assert counts.traffic.dirty_left_bytes == 4 * 4096
    assert counts.traffic.l2_from_l1_bytes == row.l1_write_bytes
    half = counts.traffic.l2_fabric_bytes / row.l1_write_bytes
    assert half == pytest.approx(0.5, abs=0.1)  # from either side to either home


def test_one_request_reaches_every_core_of_a_cluster():
    counts = ran(launch(sharing, 264, cores=2))
    asked = 264 * 4096
    assert counts.traffic.l1_fill_bytes == counts.operands["X"].l1_fill_bytes == 2 * asked
    assert counts.traffic.l2_from_l1_bytes == asked
    assert counts.traffic.dram_read_bytes == asked
    assert counts.operands["X"].l2_hit_bytes == 0


def grid_counts(**values):
    one = launch(adding, 3, **values)
    fits = dataclasses.replace(one, footprint=Footprint())
    return run_grid(fits, TPU).operands["X"]


def test_an_addition_on_a_grid_reads_and_writes():
    """No memory there adds by itself: what is added to comes in and goes back."""
    row = grid_counts(same=1)
    assert row.dram_read_bytes == row.vmem_fill_bytes == 3 * 4 * 4096
    assert row.dram_write_bytes == row.vmem_drain_bytes == 3 * 4 * 4096
    assert row.fetches == 0


def test_an_addition_in_a_window_moves_when_the_block_changes():
    """Four steps of three blocks, each another box; or all of a block's steps one box."""
    row = grid_counts(flags=WINDOW, same=1)
    assert row.dram_read_bytes == row.dram_write_bytes == 3 * 4 * 4096
    assert row.fetches == 12
    row = grid_counts(flags=WINDOW, same=1, steps=1)
    assert row.dram_read_bytes == row.dram_write_bytes == 4096  # it stays from block to block
    assert row.fetches == 1
