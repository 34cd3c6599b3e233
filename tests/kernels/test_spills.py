"""Registers that spill: what goes through local memory, where it lies, how little of it is HBM's.

The rule is read off FlashAttention-2's own binary on one H200 (table BINARY): what a step stores is
there, and of what it loads again nothing.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.kernels import load_kernel
from iosim.kernels.masks import visited
from iosim.launch import blocks_per_core
from iosim.memory.model import gpu_model
from iosim.ops import LOAD, LOCAL, STORE
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile

GPU = load_profile("h200")
KERNELS = ["flash1", "flash2"]
SIZE = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen": 256, "seqlen_k": 256, "head_dim": 64}


def the_launch(kernel, problem, schedule, chip=GPU):
    (launch,) = load_kernel(kernel).launches(problem, schedule, chip)
    return launch


def forms_of(kernel, problem, schedule):
    forms = load_kernel(kernel).closed_forms(problem, schedule, GPU)
    return {form.quantity: form.value for form in forms}


def ran(launch, chip=GPU):
    return run_blocks(launch, chip, CachedMemory(chip), clock_hz=1.7e9, seed=0, soil=False)


def spilled(kernel, problem, schedule, chip=GPU):
    """Spilled registers of a thread."""
    return the_launch(kernel, problem, schedule, chip).footprint.spilled_registers


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), spills=st.integers(0, 20), cuts=st.lists(st.integers(1, 60), max_size=3))
def test_a_step_loads_what_the_one_before_stored(harness, kernel, data, spills, cuts):
    problem = data.draw(harness.attention_problems())
    launch = the_launch(kernel, problem, Schedule(tile=(5, 4), warps=2, spills=spills))
    size = 64 * 4 * spills
    assert launch.footprint.local_bytes == size
    [local] = [o for o in launch.operands if o.name == "local"]
    for block in range(min(launch.blocks, 4)):
        edges = sorted({cut % max(launch.steps, 1) for cut in cuts} - {0})
        ops = harness.count(launch, block, edges)
        mine = ops[ops["flags"] & LOCAL != 0]
        steps = np.unique(ops["step"][ops["m"] > 0]).tolist()
        expected = [
            (step, kind) for step in steps for kind in (LOAD, STORE) if step or kind == STORE
        ]
        assert list(zip(mine["step"], mine["kind"], strict=True)) == (expected if spills else [])
        assert (mine["address"] == local.address).all()
        assert (mine["row_bytes"] * mine["rows"] == size).all()


SHAPES = {
    "whole tiles": {},
    "causal": {"causal": True},
    "ragged": {"seqlen": 200, "seqlen_k": 328},
    "window": {"window": 70, "seqlen": 328, "seqlen_k": 328},
    "rows without keys": {"causal": True, "seqlen": 328, "seqlen_k": 200},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_writes_grow_by_what_spills_and_fills_do_not(kernel, shape):
    problem = Attention(**{**SIZE, **SHAPES[shape]})
    kept, lost = (Schedule(tile=(64, 48), stages=2, warps=4, spills=n) for n in (0, 6))
    without, counts = (ran(the_launch(kernel, problem, s)) for s in (kept, lost))
    heads = problem.batch * problem.heads
    through = heads * visited(problem, lost) * 128 * 6 * 4
    assert counts.traffic.l1_write_bytes == without.traffic.l1_write_bytes + through
    assert counts.traffic.l1_write_bytes == forms_of(kernel, problem, lost)["l1_write_bytes"]
    assert without.traffic.l1_write_bytes == forms_of(kernel, problem, kept)["l1_write_bytes"]
    assert counts.traffic.l1_fill_bytes == without.traffic.l1_fill_bytes  # loads hit L1
    assert counts.operands["local"].l1_write_bytes == through
    assert counts.operands["local"].unique_bytes == 0
    assert "local" not in without.operands


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_region_is_a_resident_block_s_and_not_a_block_s(kernel):
    """So L2 holds it dirty from block to block, and HBM sees next to nothing of it."""
    problem = Attention(batch=64, heads=16, seqlen=256, head_dim=64)
    launch = the_launch(kernel, problem, Schedule(tile=(64, 64), stages=2, warps=4, spills=8))
    counts = ran(launch)
    resident = blocks_per_core(launch.footprint, GPU.limits) * GPU.cores.count
    [local] = [o for o in launch.operands if o.name == "local"]
    assert local.size_bytes == resident * 128 * 8 * 4
    assert launch.blocks > resident
    row = counts.operands["local"]
    assert row.l1_write_bytes > 2 * local.size_bytes
    assert row.dram_read_bytes == 0
    assert row.dram_write_bytes <= local.size_bytes
    others = [o for o in launch.operands if o.size_bytes and o is not local]
    for operand in others:
        ends = operand.address + operand.size_bytes
        assert ends <= local.address or local.address + local.size_bytes <= operand.address


def test_what_l1_cannot_keep_comes_again():
    """Shared memory that leaves L1 a few lines: then loads of spills miss it and ask L2."""
    problem = Attention(**SIZE)
    schedule = Schedule(tile=(64, 48), stages=2, warps=4, spills=64, shared_bytes=227 * 1024)
    launch = the_launch("flash2", problem, schedule)
    model = gpu_model(GPU, launch, 1.7e9, 1)
    assert model["l1_sets"] * model["l1_ways"] * 128 < launch.footprint.local_bytes
    row = ran(launch).operands["local"]
    assert row.l1_fill_bytes > 0
    assert row.dram_read_bytes == 0


# head_dim, key rows of a tile, N, bytes that the SMs receive, bytes that they write; Nsight
# Compute, one H200, fp16, no mask, 33.5 M elements of Q; PyTorch 2.11, flash_fwd_kernel with
# traits <64, 128, 128, 4> and <128, 128, 64, 4>, 255 registers both
BINARY = [
    (64, 128, 512, 605149824, 165675008),
    (64, 128, 2048, 2215989376, 316669952),
    (64, 128, 4096, 4363588480, 517996544),
    (64, 128, 16384, 17248374272, 1725956096),
    (128, 64, 512, 604566144, 200278016),
    (128, 64, 2048, 2215214208, 552599552),
    (128, 64, 4096, 4362721152, 1022361600),
    (128, 64, 16384, 17247667584, 3840933888),
]
#: head_dim: registers of a thread that go out at every step, and once in a block
PER_STEP = {64: (6, 22), 128: (14, 14)}


@pytest.mark.parametrize("row", BINARY, ids=str)
def test_the_rule_is_that_of_a_measured_kernel(row):
    """Stores go through L1, loads hit it. What goes out once a block has no place in the model."""
    head_dim, n, seqlen, filled, written = row
    heads = (1 << 25) // (seqlen * head_dim)
    per_step, once = PER_STEP[head_dim]
    problem = Attention(heads=heads, seqlen=seqlen, head_dim=head_dim)
    schedule = Schedule(tile=(128, n), stages=2, warps=4, registers=255, spills=per_step)
    forms = forms_of("flash2", problem, schedule)
    blocks = heads * seqlen // 128
    assert written == forms["l1_write_bytes"] + blocks * once * 128 * 4
    assert filled == pytest.approx(forms["l1_fill_bytes"], rel=0.002)


# d, tile, stages or 0 for flash1, warps: registers; Triton 3.6 for one H200, which spilled none
COMPILED = {
    (64, (32, 32), 2, 4): 72,
    (64, (32, 64), 2, 4): 84,
    (64, (64, 32), 2, 4): 93,
    (64, (64, 64), 2, 4): 112,
    (64, (64, 128), 2, 4): 155,
    (64, (128, 32), 2, 4): 152,
    (64, (128, 64), 2, 4): 202,
    (64, (128, 64), 3, 4): 202,
    (64, (128, 128), 2, 4): 229,
    (128, (32, 32), 2, 4): 98,
    (128, (32, 64), 2, 4): 127,
    (128, (64, 32), 2, 4): 124,
    (128, (64, 64), 2, 4): 150,
    (128, (128, 64), 2, 8): 149,
    (128, (128, 128), 2, 8): 198,
    (64, (32, 32), 0, 4): 96,
    (64, (64, 32), 0, 4): 107,
    (64, (64, 64), 0, 4): 124,
    (64, (64, 128), 0, 4): 144,
    (128, (32, 32), 0, 8): 94,
    (128, (64, 64), 0, 8): 130,
    (128, (64, 128), 0, 8): 176,
}


@pytest.mark.parametrize("key", COMPILED, ids=str)
def test_nothing_spills_where_a_compiler_found_room(key):
    """Neither with the registers that it took nor with all that a thread may have."""
    head_dim, tile, stages, warps = key
    kernel = "flash2" if stages else "flash1"
    for registers in (COMPILED[key], 0):
        schedule = Schedule(tile=tile, stages=stages or 1, warps=warps, registers=registers)
        assert spilled(kernel, Attention(head_dim=head_dim), schedule) == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_few_registers_spill_what_has_no_room(kernel):
    """Scores and accumulator, 64 × (64 + 64) values of 128 threads, and 32 more must live."""
    problem, needed = Attention(head_dim=64), 64 + 32
    for registers in (needed + 1, needed, needed - 1, 40):
        schedule = Schedule(tile=(64, 64), stages=2, warps=4, registers=registers)
        footprint = the_launch(kernel, problem, schedule).footprint
        assert footprint.registers == registers
        assert footprint.spilled_registers == max(0, needed - registers)
    said = Schedule(tile=(64, 64), stages=2, warps=4, registers=40, spills=3)
    assert spilled(kernel, problem, said) == 3
    assert spilled(kernel, problem, Schedule(tile=(64, 64), warps=4, spills=0)) == 0


def test_bigger_tiles_spill_and_others_of_the_same_size_do_not():
    """FlashAttention's notes on an A100, d 64, 4 warps: 256×64 is 85 % slower than 128×128 as it
    spills; 64×256 (27 % slower) does not."""
    problem, chip = Attention(head_dim=64), load_profile("a100-40gb")
    found = {
        tile: spilled("flash2", problem, Schedule(tile=tile, stages=1, warps=4), chip)
        for tile in ((128, 128), (64, 256), (256, 64))
    }
    assert found == {(128, 128): 0, (64, 256): 0, (256, 64): 33}
    assert spilled("flash2", problem, Schedule(tile=(256, 64), stages=1, warps=8), chip) == 0


def test_a_block_of_many_warps_has_fewer_registers_for_each():
    """16 warps share the 65,536 of a core: 128 for a thread."""
    problem = Attention(head_dim=128)
    footprint = the_launch(
        "flash2", problem, Schedule(tile=(256, 128), stages=1, warps=16)
    ).footprint
    assert footprint.registers == 128
    assert footprint.spilled_registers == 64 + 64 + 32 - 128


def test_standard_attention_moves_no_spills_and_says_none():
    schedule = Schedule(tile=(256, 256), stages=1, warps=4)
    for launch in load_kernel("standard").launches(Attention(), schedule, GPU):
        assert launch.footprint.spilled_registers == 0
