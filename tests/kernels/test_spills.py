"""Registers that spill: through local memory at every step, stores to L2, loads from L1."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.kernels import load_kernel
from iosim.ops import LOAD, LOCAL, OP_DTYPE, STORE
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile
from iosim.simulation import simulate

GPU, A100 = load_profile("h200"), load_profile("a100")
PROBLEM = Attention(heads=16, seqlen=1024, head_dim=64)
COUNTERS = Path(__file__).resolve().parents[2] / "reports" / "accuracy" / "h200.jsonl"


def schedule(**changes):
    return Schedule(**{"tile": (128, 64), "stages": 2, "warps": 4, "spills": 0, **changes})


@pytest.mark.parametrize("kernel", ["flash1", "flash2", "flash3"])
@pytest.mark.parametrize("stages", [2, 3])
def test_every_step_stores_them_and_loads_come_from_l1(kernel, stages):
    warps = 0 if kernel == "flash3" else 4
    dry = simulate(kernel, PROBLEM, GPU, schedule(stages=stages, warps=warps))
    wet = simulate(kernel, PROBLEM, GPU, schedule(stages=stages, warps=warps, spills=6))
    forms = {form.quantity: form.value for form in wet.closed_forms}
    before = {form.quantity: form.value for form in dry.closed_forms}
    stored = wet.operands["local"].l1_write_bytes
    assert stored == forms["l1_write_bytes"] - before["l1_write_bytes"] > 0
    assert wet.traffic.l1_write_bytes == forms["l1_write_bytes"]
    assert wet.operands["local"].l1_fill_bytes == 0
    assert wet.operands["local"].dram_read_bytes == 0
    resident = wet.planned[0].operands[-1].size_bytes
    assert wet.operands["local"].dram_write_bytes <= resident < stored


def test_a_block_reloads_what_it_stored_before():
    (launch,) = load_kernel("flash2").launches(PROBLEM, schedule(spills=3), GPU)

    out = np.zeros(400, dtype=OP_DTYPE)
    count, _ = launch.program(0, 0, launch.steps, launch.params, out, None)
    local = [op for op in out[:count] if op["flags"] & LOCAL]
    assert [op["kind"] for op in local] == [STORE] + [LOAD, STORE] * (launch.steps - 1)
    assert {int(op["row_bytes"]) for op in local} == {3 * 4 * 128}


def test_resident_blocks_have_their_own_and_launches_share_it():
    """Twice the blocks on as many places need no more memory, and write no more of it back."""
    few, many = (
        simulate("flash2", Attention(heads=h, seqlen=2048, head_dim=64), GPU, schedule(spills=20))
        for h in (64, 128)
    )
    sizes = [r.planned[0].operands[-1].size_bytes for r in (few, many)]
    assert sizes[0] == sizes[1]
    assert many.operands["local"].dram_write_bytes <= sizes[1] * 2


@pytest.mark.parametrize("registers", [0, 255, 128, 96])
def test_what_exceeds_the_registers_of_a_thread_spills(registers):
    """fp32 accumulator and scores and 16-bit probabilities of 128 × 64 tiles, over 128 threads."""
    (launch,) = load_kernel("flash2").launches(
        PROBLEM, schedule(registers=registers, spills=None), GPU
    )
    needed = (128 * 64 + 128 * 64 + 128 * 32) // 128 + 40
    assert launch.footprint.spilled_registers == max(0, needed - (registers or 255))


def test_c16_bigger_is_not_faster():
    """A100, d 64: 256 × 64 with 4 warps spills, 128 × 64 does not."""
    wide, usual = (
        load_kernel("flash2").launches(PROBLEM, schedule(tile=tile, spills=None), A100)[0]
        for tile in ((256, 64), (128, 64))
    )
    assert wide.footprint.registers == 255
    assert wide.footprint.spilled_registers > 100
    assert usual.footprint.spilled_registers == 0


def excess_by_steps():
    """Bytes that PyTorch's FlashAttention-2 (tile 128 × 128, d 64, unmasked) writes beside O and
    the log-sum-exp, per block, by its number of key tiles; and fills over tile loads."""
    found = defaultdict(list)
    for row in map(json.loads, COUNTERS.read_text().splitlines()[1:]):
        p = row.get("params", {})
        if row.get("family") != "sdpa-flash" or p["bwd"] or p["causal"] or p["D"] != 64:
            continue
        heads, n = p["B"] * p["H"], p["N"]
        blocks, steps = heads * n // 128, n // 128
        written = heads * n * (64 * 2 + 4)
        fills = heads * (n + 2 * n * n // 128) * 64 * 2
        found[steps].append(
            ((row["l1_write_bytes"] - written) / blocks, row["l1_fill_bytes"] / fills)
        )
    return found


def test_the_rule_is_what_a_spilling_kernel_was_seen_to_do():
    """Six registers of 128 threads at every step, stored and not filled: counters of an H200."""
    found = excess_by_steps()
    assert len(found) >= 3
    steps = sorted(found)
    short, long = (found[n][0][0] for n in (steps[0], steps[-1]))
    per_step = (long - short) / (steps[-1] - steps[0])
    assert per_step == pytest.approx(6 * 4 * 128, rel=0.01)
    for rows in found.values():
        for _, fills in rows:
            assert fills == pytest.approx(1, abs=0.005), "reloads would show here"


def test_loads_of_what_l1_lost_come_from_l2():
    """A block that takes nearly all memory of a core leaves L1 no room for what it spills."""
    problem = Attention(heads=4, seqlen=512, head_dim=256)
    (launch,) = load_kernel("flash2").launches(
        problem, Schedule(tile=(64, 64), stages=3, warps=4, spills=200), GPU
    )
    counts = run_blocks(launch, GPU, CachedMemory(GPU), clock_hz=1.7e9, seed=0, soil=False)
    local = counts.operands["local"]
    assert 0 < local.l1_fill_bytes <= local.l1_write_bytes
    assert local.dram_read_bytes == 0
