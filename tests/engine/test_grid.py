"""Grids of windows: what is fetched and written back, by core, against a plain twin."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from iosim.engine.grid import run_grid
from iosim.kernels import load_kernel
from iosim.launch import why_not
from iosim.ops import LOAD, OP_DTYPE, STORE, WINDOW
from iosim.problem import Attention, Gemm, Schedule, Stream
from iosim.profiles import load_profile, profile_names
from iosim.simulation import complete, simulate

CHIPS = {chip.name: chip for chip in map(load_profile, profile_names()) if chip.grid is not None}
CHIP = load_profile("tpu-v5e")


def operations(launch, block):
    """All operations of a block, as dicts in plain Python numbers."""
    out = np.zeros(launch.ops_per_step * launch.steps + launch.ops_at_ends, dtype=OP_DTYPE)
    count, done = launch.program(block, 0, max(launch.steps, 1), launch.params, out, None)
    assert done
    return [dict(zip(OP_DTYPE.names, op, strict=True)) for op in out[:count].tolist()]


def plain(launch, cores):
    """(read, written, fetches) by operand: each core with windows of its own.

    A window's block is fetched where it is another one than before. What a step writes goes back
    when a later one writes another block, and at the end.
    """
    read, written, fetches = Counter(), Counter(), Counter()
    each, rest = divmod(launch.blocks, cores)
    first = 0
    for core in range(cores):
        last = first + each + (core < rest)
        ops = [op for block in range(first, last) for op in operations(launch, block)]
        first = last
        for kind in (LOAD, STORE):
            by_window: dict = {}
            for op in ops:
                if op["kind"] == kind:
                    assert op["flags"] & WINDOW
                    where = (op["address"], op["tensor"], op["rows"] * op["row_bytes"])
                    by_window.setdefault(op["slot"], []).append(where)
            for boxes in by_window.values():
                for i, (address, tensor, size) in enumerate(boxes):
                    if i == 0 or boxes[i - 1][0] != address:
                        (read if kind == LOAD else written)[tensor] += size
                        fetches[tensor] += kind == LOAD
    return read, written, fetches


@st.composite
def launches(draw):
    """A launch of any kernel that has a form for grids, on any such chip, one or two cores."""
    chip = CHIPS[draw(st.sampled_from(sorted(CHIPS)))]
    cores = dataclasses.replace(chip.cores, count=4, per_device=draw(st.integers(1, 3)))
    chip = dataclasses.replace(chip, cores=cores)
    kernel = load_kernel(draw(st.sampled_from(["flash2", "standard", "gemm", "copy"])))
    if kernel.name == "copy":
        problem, schedule = Stream(elements=draw(st.integers(1, 3_000_000))), Schedule()
    elif kernel.name == "gemm":
        sizes = {name: draw(st.integers(1, 900)) for name in "mnk"}
        problem = Gemm(**sizes, dtype="bf16")
        schedule = Schedule(tile=tuple(draw(st.sampled_from([128, 256])) for _ in "mnk"))
    else:
        kv_heads = draw(st.integers(1, 2))
        problem = Attention(
            heads=kv_heads * draw(st.integers(1, 3)),
            kv_heads=kv_heads,
            seqlen=draw(st.integers(1, 600)),
            seqlen_k=draw(st.integers(1, 900)),
            head_dim=draw(st.sampled_from([64, 80, 128])),
            causal=draw(st.booleans()),
            window=draw(st.sampled_from([0, 0, 1, 150])),
            dtype="bf16",
        )
        tile = (draw(st.sampled_from([16, 64, 128, 256])), draw(st.sampled_from([128, 256])))
        schedule = Schedule(tile=tile, order=draw(st.sampled_from(["query", "head"])))
    planned = kernel.launches(problem, complete(kernel, problem, chip, schedule), chip)
    launch = draw(st.sampled_from(planned))
    assume(why_not(launch.footprint, chip) is None)
    return launch, chip


@settings(max_examples=80, deadline=None)
@given(made=launches())
def test_windows_move_only_when_their_block_changes(made):
    launch, chip = made
    counts = run_grid(launch, chip)
    read, written, fetches = plain(launch, chip.cores_used)
    for index, operand in enumerate(launch.operands):
        if not operand.size_bytes:
            assert operand.name not in counts.operands
            continue
        row = counts.operands[operand.name]
        assert row.vmem_fill_bytes == row.dram_read_bytes == read[index], operand.name
        assert row.vmem_drain_bytes == row.dram_write_bytes == written[index], operand.name
        assert row.fetches == fetches[index], operand.name
        if operand.role == "in" and operand.unique_bytes == operand.size_bytes:
            assert row.vmem_fill_bytes >= operand.unique_bytes
    assert counts.traffic.vmem_fill_bytes == read.total()
    assert counts.traffic.vmem_drain_bytes == written.total()
    assert counts.traffic.cmem_read_bytes == counts.traffic.cmem_write_bytes == 0
    assert counts.makespan_cycles is None


def flash2(chip, **size):
    problem = Attention(
        **{"heads": 4, "seqlen": 512, "head_dim": 128, "dtype": "bf16", **size},
    )
    result = simulate("flash2", problem, chip, Schedule(tile=(128, 128)))
    assert result.fits
    return result


def test_a_query_window_stays_while_keys_pass():
    """4 heads × 4 query tiles: Q once each, K and V four times, and O once."""
    operands = flash2(CHIP).operands
    rows = 4 * 512 * 128 * 2
    assert operands["Q"].dram_read_bytes == rows
    assert operands["Q"].fetches == 16
    assert operands["K"].dram_read_bytes == operands["V"].dram_read_bytes == 4 * rows
    assert operands["K"].fetches == 64
    assert operands["O"].dram_write_bytes == rows


def test_one_key_window_stays_for_all_queries_of_a_head():
    operands = flash2(CHIP, seqlen_k=128).operands
    assert operands["K"].fetches == operands["V"].fetches == 4  # one a head
    shared = flash2(CHIP, seqlen_k=128, kv_heads=1).operands
    assert shared["K"].fetches == 1  # the next head asks for the same block


def test_lanes_pad_the_last_dimension():
    """d = 80 costs the bytes of 128."""
    narrow, wide = (flash2(CHIP, head_dim=d).traffic for d in (80, 128))
    assert narrow.dram_read_bytes == wide.dram_read_bytes
    assert narrow.dram_write_bytes == wide.dram_write_bytes


def test_each_core_has_windows_of_its_own():
    """One key window for all: every core that takes part fetches it once."""
    for cores in (1, 2, 3, 4):
        own = dataclasses.replace(CHIP.cores, count=4, per_device=cores)
        chip = dataclasses.replace(CHIP, cores=own)
        result = flash2(chip, heads=2, kv_heads=1, seqlen_k=128)
        assert result.operands["K"].fetches == cores
        assert result.operands["Q"].fetches == 8
        assert result.traffic.dram_write_bytes == 2 * 512 * 128 * 2


def unfused(profile, seqlen):
    problem = Attention(heads=4, seqlen=seqlen, head_dim=128, dtype="bf16")
    result = simulate("standard", problem, load_profile(profile))
    assert result.fits
    return result


@pytest.mark.parametrize(("seqlen", "fits"), [(1024, True), (1536, True), (2048, False)])
def test_scores_pass_through_cmem_where_they_fit(seqlen, fits):
    """S and P of 4 heads are 16, 36 and 64 MiB together: all of CMEM is not left for them."""
    result = unfused("tpu-v4", seqlen)
    both = 2 * 4 * seqlen * seqlen * 2
    level = load_profile("tpu-v4").levels["cmem"]
    assert (both < level.capacity_bytes) == fits
    for name in "SP":
        row = result.operands[name]
        assert (row.dram_read_bytes == 0) == fits
        assert (row.dram_write_bytes == 0) == fits
        assert row.vmem_drain_bytes == both // 2
    assert result.traffic.cmem_write_bytes == (both if fits else 0)
    assert (result.traffic.cmem_read_bytes >= both) == fits
    for name in "QKV":
        assert result.operands[name].dram_read_bytes > 0


def test_without_cmem_scores_go_through_hbm():
    assert "cmem" not in CHIP.levels
    result = unfused("tpu-v5e", 1024)
    assert result.operands["S"].dram_write_bytes == 4 * 1024 * 1024 * 2
    assert result.traffic.cmem_write_bytes == 0
