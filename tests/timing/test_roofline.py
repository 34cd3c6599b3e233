"""The floor: each resource at its nominal rate, whatever the kernel."""

from __future__ import annotations

import pytest

from iosim.problem import Attention, Gemm, Schedule
from iosim.profiles import load_profile, profile_names
from iosim.simulation import simulate
from iosim.timing.roofline import limiter


def test_a_matmul_cannot_beat_the_peak() -> None:
    """keras-io#2284: 8192³ on this chip takes at least 2·8192³ / 197e12 s = 5.58 ms."""
    result = simulate("gemm", Gemm(m=8192, n=8192, k=8192, dtype="bf16"), load_profile("tpu-v5e"))
    assert result.floor_s == pytest.approx(2 * 8192**3 / 197e12, rel=0.01)
    assert result.limiter == "tensor"


def test_below_64_rows_the_slower_path_sets_the_floor() -> None:
    chip = load_profile("h200")
    problem = Attention(heads=32, seqlen=512, head_dim=64)  # more blocks than cores either way
    tall = simulate("flash2", problem, chip, Schedule(tile=(64, 64)))
    flat = simulate("flash2", problem, chip, Schedule(tile=(32, 64)))
    times = [r.launches[0].floor_times_s["tensor"] for r in (tall, flat)]
    assert times[1] / times[0] == pytest.approx(4096 / 2580)


KERNELS = ("flash1", "flash2")


@pytest.mark.parametrize("name", profile_names())
def test_no_level_moves_more_than_its_peak_within_the_floor(name: str) -> None:
    chip = load_profile(name)
    dtype = "bf16" if chip.machine == "tpu" else "fp16"
    for kernel in ("standard", "flash2"):
        result = simulate(kernel, Attention(heads=4, seqlen=1024, dtype=dtype), chip)
        moved = result.traffic.dram_read_bytes + result.traffic.dram_write_bytes
        assert moved / result.floor_s <= chip.dram.bandwidth_bytes_per_s * (1 + 1e-12)
        assert result.work.issued_flops / result.floor_s <= chip.peak(dtype).flops_per_s * 1.01
        assert result.work.flops <= result.work.issued_flops


def test_a_launch_of_few_blocks_leaves_cores_idle() -> None:
    """FlashAttention-1 has a block per head: 4 heads of 8 take as long on 132 cores as on 8."""
    chip = load_profile("h200")
    problem = Attention(heads=4, seqlen=512, head_dim=64)
    few, many = (simulate(name, problem, chip, Schedule(tile=(64, 64))) for name in KERNELS)
    assert (few.planned[0].blocks, many.planned[0].blocks) == (4, 32)
    one, other = (r.launches[0].floor_times_s["exp"] for r in (few, many))
    assert one == pytest.approx(other * 32 / 4)


def test_nothing_limits_nothing() -> None:
    assert limiter({"hbm": 0.0, "tensor": 0.0}) is None
    assert limiter({"hbm": 1.0, "tensor": 2.0}) == "tensor"
