"""Public cases about matrix products: small inputs whose right value is known from elsewhere."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from iosim.engine.blocks import CachedMemory, run_blocks
from iosim.errors import DoesNotFitError
from iosim.kernels import load_kernel
from iosim.launch import blocks_per_core, require_fit, why_not
from iosim.ops import LOAD, OP_DTYPE
from iosim.problem import Gemm, Schedule
from iosim.profiles import load_profile
from iosim.simulation import complete

PROFILES = Path(__file__).resolve().parents[2] / "hardware_profiles"
KERNEL = load_kernel("gemm")
L2_BYTES = 31457280  # of one partition of the h200


def planned(problem, chip, **schedule):
    (launch,) = KERNEL.launches(
        problem, complete(KERNEL, problem, chip, Schedule(**schedule)), chip
    )
    return launch


def counted(problem, chip, **schedule):
    launch = planned(problem, chip, **schedule)
    return run_blocks(
        launch, chip, CachedMemory(chip), clock_hz=chip.cores.clock_hz, seed=0, soil=False
    )


def chip_file(path, profile, **changes):
    """A user's own chip: `profile` with some numbers changed, `field=(old, new)`."""
    text = (PROFILES / f"{profile}.toml").read_text(encoding="utf-8")
    for field, (old, new) in changes.items():
        before = f"{field} = {{ value = {old},"
        assert text.count(before) == 1, before
        text = text.replace(before, f"{field} = {{ value = {new},")
    path.write_text(text, encoding="utf-8")
    return load_profile(str(path))


def tiles_loaded(launch, blocks):
    """Distinct tiles that the first blocks load."""
    out = np.zeros(launch.ops_per_step * launch.steps + launch.ops_at_ends, dtype=OP_DTYPE)
    seen = set()
    for block in range(blocks):
        count, done = launch.program(block, 0, launch.steps, launch.params, out, None)
        assert done
        loads = out[:count][out[:count]["kind"] == LOAD]
        seen.update(zip(loads["tensor"].tolist(), loads["address"].tolist(), strict=True))
    return len(seen)


@pytest.mark.parametrize(("group", "expected"), [(1, 90), (3, 54)])
def test_b8_grouped_order_loads_fewer_tiles(group, expected):
    nine = 9 * 32
    launch = planned(
        Gemm(m=nine, n=nine, k=nine), load_profile("a100"), tile=(32, 32, 32), group=group
    )
    assert launch.blocks == 81
    assert tiles_loaded(launch, 9) == expected


@pytest.mark.parametrize("side", [256, 384, 512])
@pytest.mark.parametrize("tile", [(128, 128, 64), (32, 32, 32)])
def test_b9_order_changes_nothing_where_the_operands_fit(side, tile):
    chip, problem = load_profile("a100"), Gemm(m=side, n=side, k=side)
    by_row, grouped = (
        counted(problem, chip, tile=tile, group=group, warps=4).traffic.dram_read_bytes
        for group in (1, 8)
    )
    assert grouped == pytest.approx(by_row, rel=0.01)
    assert by_row == pytest.approx(2 * side * side * 2, rel=0.01)  # A and B once


@pytest.mark.parametrize(
    ("stages", "shared_bytes", "fits"), [(4, 196608, False), (3, 147456, True)]
)
def test_c1_stages_of_a_wide_tile(stages, shared_bytes, fits):
    chip = load_profile("a100")
    launch = planned(Gemm(), chip, tile=(128, 256, 64), stages=stages)
    assert launch.footprint.shared_bytes == shared_bytes
    if fits:
        require_fit(launch, chip)
        assert blocks_per_core(launch.footprint, chip.limits) == 1
    else:
        reason = why_not(launch.footprint, chip)
        assert reason == "shared memory 196,608 bytes > 166,912 that one block may use"


def test_c2_tf32_on_a_chip_with_less_shared_memory(tmp_path):
    chip = chip_file(
        tmp_path / "smaller.toml", "a100-80gb", shared_per_block_bytes=("166912", "101376")
    )
    launch = planned(Gemm(dtype="tf32"), chip, tile=(256, 64, 32), stages=4)
    assert launch.footprint.shared_bytes == 163840
    with pytest.raises(DoesNotFitError, match="163,840 bytes > 101,376"):
        require_fit(launch, chip)


def test_d6_ridge_of_a_tpu():
    chip = load_profile("tpu-v5e")
    assert chip.ridge_flops_per_byte("bf16") == pytest.approx(240.5, abs=0.05)
    below, above = (
        launch.work.flops / sum(operand.unique_bytes for operand in launch.operands)
        for launch in (planned(Gemm(m=n, n=n, k=n, dtype="bf16"), chip) for n in (640, 768))
    )  # n / 3 flops per byte
    assert below < chip.ridge_flops_per_byte("bf16") < above


@pytest.mark.parametrize("group", [1, 8])
def test_f11_reads_never_rise_with_the_capacity(tmp_path, group):
    problem = Gemm(m=4096, n=4096, k=1024)
    reads = []
    for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4):
        chip = chip_file(
            tmp_path / f"l2-{factor}.toml",
            "h200",
            capacity_bytes=(L2_BYTES, int(L2_BYTES * factor)),
            resident_speed_spread=("0.029", "1e-9"),
        )
        reads.append(counted(problem, chip, group=group).traffic.dram_read_bytes)
    compulsory = 2 * 4096 * 1024 * 2
    assert all(after <= before * 1.01 for before, after in pairwise(reads))
    assert reads[0] > 2 * compulsory
    assert reads[-1] == pytest.approx(compulsory, rel=0.01)
    assert min(reads) >= compulsory


@pytest.mark.parametrize("shape", [(1024, 1024, 1024), (256, 768, 4096)])
def test_f12_twice_the_element_twice_the_bytes(shape):
    m, n, k = shape
    chip = load_profile("h200")
    one, two = (
        counted(Gemm(m=m, n=n, k=k, dtype=dtype), chip).traffic for dtype in ("fp8", "fp16")
    )
    for field in ("dram_read_bytes", "l1_fill_bytes", "l1_write_bytes", "dirty_left_bytes"):
        assert getattr(two, field) == 2 * getattr(one, field) > 0, field


def test_f13_only_the_first_latency_is_exposed(tmp_path):
    """One block, steps of 1024 cycles of matrix work and 768 of transfer; two steps hide a load."""
    chip = chip_file(tmp_path / "even.toml", "h200", resident_speed_spread=("0.029", "1e-9"))
    steps, tile = 100, (128, 256, 64)
    problem = Gemm(m=128, n=256, k=64 * steps)
    pipelined, plain = (
        counted(problem, chip, tile=tile, stages=stages).makespan_cycles for stages in (3, 1)
    )
    port = chip.levels["l1"].bytes_per_cycle(chip.cores.clock_hz)
    matrix = 2 * 128 * 256 * 64 / chip.rate("matrix", "fp16").per_core_per_clock
    loaded = (128 * 64 + 64 * 256) * 2 / port
    stored = 128 * 256 * 2 / port
    per_step, latency = max(matrix, loaded), chip.dram.far_miss_latency_cycles
    assert pipelined >= steps * per_step
    assert pipelined < latency + loaded + 1.05 * steps * per_step + stored
    assert plain > steps * (matrix + loaded + chip.dram.latency_cycles)
