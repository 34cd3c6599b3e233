"""A chip's own arithmetic, and the numbers of the packaged chips against known right ones."""

from __future__ import annotations

import dataclasses

import pytest

from iosim.chip import Level
from iosim.errors import RequestError
from iosim.profiles import load_profile, profile_names

MIB = 1 << 20


def test_peak_names_what_the_chip_has() -> None:
    chip = load_profile("a100-80gb")
    assert chip.peak("bf16").path == "mma_sync"
    with pytest.raises(RequestError, match=r"a100-80gb has no matrix unit for fp8 .*tf32"):
        chip.peak("fp8")


def test_rate_is_the_fastest_that_the_rows_allow() -> None:
    chip = load_profile("h200")
    assert chip.rate("matrix", "fp16", rows=64).path == "wgmma"
    assert chip.rate("matrix", "fp16", rows=32).path == "mma_sync"
    assert chip.rate("exp", "fp16").per_core_per_clock == 16


def test_rate_says_what_is_missing() -> None:
    chip = load_profile("h200")
    with pytest.raises(RequestError, match=r"h200 has no matrix unit for int8 \(it has: bf16, "):
        chip.rate("matrix", "int8")
    only_tall = dataclasses.replace(chip, rates=tuple(r for r in chip.rates if r.path == "wgmma"))
    with pytest.raises(RequestError, match="no matrix unit for fp16 and a tile of 32 rows"):
        only_tall.rate("matrix", "fp16", rows=32)
    with pytest.raises(RequestError, match=r"no exp unit for fp16 \(it has: none\)"):
        only_tall.rate("exp", "fp16")


def test_cores_used_are_those_of_one_program() -> None:
    assert load_profile("h200").cores_used == 132
    assert load_profile("tpu-v4").cores_used == 1
    assert load_profile("tpu-v5p").cores_used == 2


@pytest.mark.parametrize(
    ("bandwidths", "expected"),
    [
        ({"bandwidth_bytes_per_clock": 128.0}, 128.0),
        ({"bandwidth_bytes_per_s": 4e12}, 2000.0),
        ({"bandwidth_bytes_per_s": 4e12, "sustained_bytes_per_s": 3e12}, 1500.0),
        ({"bandwidth_bytes_per_clock": 2000.0, "sustained_bytes_per_s": 3e12}, 1500.0),
    ],
)
def test_bytes_per_cycle(bandwidths: dict[str, float], expected: float) -> None:
    level = Level(
        name="x",
        managed="software",
        scope="chip",
        counter="",
        capacity_bytes=1,
        latency_cycles=1.0,
        **bandwidths,  # type: ignore[arg-type]
    )
    assert level.bytes_per_cycle(2e9) == expected


def test_ridge_of_v5e() -> None:
    # jax-ml/jax#20021: 197e12 / 819e9
    assert load_profile("tpu-v5e").ridge_flops_per_byte("bf16") == pytest.approx(240.5, abs=0.05)


def test_v4_counts_per_core_and_per_chip() -> None:
    # jax tpu_info.py: 16 MiB of VMEM and 64 MiB of CMEM per TensorCore, two of them on a chip
    chip = load_profile("tpu-v4")
    vmem, cmem = chip.levels["vmem"], chip.levels["cmem"]
    assert chip.cores.count == 2
    assert (vmem.scope, vmem.capacity_bytes) == ("core", 16 * MIB)
    assert (cmem.scope, cmem.capacity_bytes) == ("core", 64 * MIB)
    assert cmem.capacity_bytes * chip.cores.count == 128 * MIB
    assert [value for value, _ in chip.facts["levels.cmem.capacity_bytes"].other] == [128 * MIB]


@pytest.mark.parametrize(
    ("name", "count", "per_block", "per_core", "l1_kib", "l2_mib"),
    [
        ("a100-40gb", 108, 166_912, 167_936, 192, 40),
        ("a100-80gb", 108, 166_912, 167_936, 192, 40),
        ("h100-sxm", 132, 232_448, 233_472, 256, 50),
        ("h100-pcie", 114, 232_448, 233_472, 256, 50),
        ("h200", 132, 232_448, 233_472, 256, 60),
    ],
)
def test_gpu_sizes(
    name: str, count: int, per_block: int, per_core: int, l1_kib: int, l2_mib: int
) -> None:
    chip = load_profile(name)
    assert chip.limits is not None
    assert chip.cores.count == count
    assert chip.limits.shared_per_block_bytes == per_block
    assert chip.limits.shared_per_core_bytes == per_core == chip.levels["shared"].capacity_bytes
    assert chip.levels["l1"].capacity_bytes == l1_kib * 1024
    l2 = chip.levels["l2"]
    assert l2.partitions == 2
    assert l2.capacity_bytes * l2.partitions == l2_mib * MIB


@pytest.mark.parametrize(
    ("name", "vmem_mib", "scoped_mib", "hbm_bytes"),
    [
        ("tpu-v4", 16, 16, 32 * 1024 * MIB),
        ("tpu-v5e", 128, 16, 16 * 10**9),
        ("tpu-v5p", 64, 16, 95 * 10**9),
        ("tpu-v6e", 128, 32, 32 * 10**9),
    ],
)
def test_tpu_sizes(name: str, vmem_mib: int, scoped_mib: int, hbm_bytes: int) -> None:
    chip = load_profile(name)
    assert chip.grid is not None
    assert (chip.grid.sublanes, chip.grid.lanes) == (8, 128)
    assert chip.levels["vmem"].capacity_bytes == vmem_mib * MIB
    assert chip.grid.scoped_limit_bytes == scoped_mib * MIB
    assert chip.dram.capacity_bytes == hbm_bytes


@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "gbytes_per_s"),
    [
        ("a100-40gb", "fp16", 312, 1555),
        ("a100-80gb", "bf16", 312, 2039),
        ("a100-80gb", "tf32", 156, 2039),
        ("a100-80gb", "fp32", 19.5, 2039),
        ("h100-sxm", "fp16", 989.4, 3350),
        ("h100-sxm", "fp8", 1978.9, 3350),
        ("h100-pcie", "fp16", 756.5, 2000),
        ("h200", "fp16", 989.5, 4800),
        ("tpu-v4", "bf16", 275, 1200),
        ("tpu-v4", "int8", 275, 1200),
        ("tpu-v5e", "bf16", 197, 819),
        ("tpu-v5e", "int8", 393, 819),
        ("tpu-v5p", "bf16", 459, 2765),
        ("tpu-v6e", "bf16", 918, 1638),
        ("tpu-v6e", "int8", 1836, 1638),
    ],
)
def test_published_peaks(name: str, dtype: str, tflops: float, gbytes_per_s: float) -> None:
    chip = load_profile(name)
    assert chip.peak(dtype).flops_per_s == pytest.approx(tflops * 1e12)
    assert chip.dram.bandwidth_bytes_per_s == pytest.approx(gbytes_per_s * 1e9)


@pytest.mark.parametrize(
    ("name", "exps_per_s"),
    [("tpu-v4", 5.38e11), ("tpu-v5e", 1.536e12), ("tpu-v6e", 1.79e12)],
)
def test_tpu_transcendentals_per_core(name: str, exps_per_s: float) -> None:
    chip = load_profile(name)
    rate = chip.rate("exp", "bf16").per_core_per_clock
    assert rate * chip.cores.clock_hz == pytest.approx(exps_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("a100-80gb", "peaks.0.flops_per_s", 624e12),  # 2:4 sparsity
        ("a100-80gb", "levels.hbm.bandwidth_bytes_per_s", 1.935e12),  # PCIe
        ("h100-pcie", "levels.hbm.bandwidth_bytes_per_s", 2.039e12),
        ("tpu-v5p", "levels.hbm.bandwidth_bytes_per_s", 2.46e12),
        ("tpu-v5p", "cores.peak_clock_hz", 1.5e9),
        ("tpu-v6e", "rates.0.per_core_per_clock", 262_144),  # the published MXU count
    ],
)
def test_facts_keep_what_other_sources_say(name: str, field: str, value: float) -> None:
    assert value in [v for v, _ in load_profile(name).facts[field].other]


@pytest.mark.parametrize("name", profile_names())
def test_dense_peaks_are_cores_times_rate_times_clock(name: str) -> None:
    chip = load_profile(name)
    for peak in chip.peaks:
        rate = next(
            r.per_core_per_clock
            for r in chip.rates
            if (r.unit, r.dtype, r.path) == ("matrix", peak.dtype, peak.path)
        )
        dense = chip.cores.count * rate * chip.cores.peak_clock_hz
        assert peak.flops_per_s == pytest.approx(dense, rel=0.01), peak.dtype
