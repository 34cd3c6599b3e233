"""The main path: what a request gives, and what it is refused for."""

from __future__ import annotations

import dataclasses

import pytest

import iosim
from iosim.errors import RequestError
from iosim.kernels import load_kernel
from iosim.problem import Attention, Gemm, Schedule
from iosim.profiles import load_profile
from iosim.result import document
from iosim.simulation import complete, simulate

SMALL = Attention(heads=2, seqlen=256, head_dim=64)


def test_the_package_gives_the_function_whatever_was_imported_before() -> None:
    assert iosim.simulate is simulate
    assert "simulate" in iosim.__all__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = iosim.nonsense  # type: ignore[attr-defined]


def test_every_public_name_exists() -> None:
    for name in iosim.__all__:
        assert getattr(iosim, name) is not None


def test_same_seed_same_result_to_the_bit() -> None:
    chip = load_profile("h200")
    first, second = (simulate("flash2", SMALL, chip, seeds=(7,)).as_json() for _ in range(2))
    assert first == second
    assert first["seeds"] == [7]


def test_tensors_must_fit_the_memory() -> None:
    chip = load_profile("a100-40gb")
    result = simulate("standard", Attention(heads=16, seqlen=64 * 1024), chip)
    assert not result.fits
    assert "tensors of" in (result.why_not or "")
    assert "HBM of 40" in (result.why_not or "")
    assert simulate("flash2", Attention(heads=16, seqlen=1024), chip).fits


def test_a_block_that_does_not_fit_is_an_answer() -> None:
    result = simulate("flash2", SMALL, load_profile("h200"), Schedule(tile=(1024, 1024)))
    assert result.launches == ()
    entry = document([result])["results"][0]
    assert entry["fits"] is False
    assert entry["traffic"] is None
    assert "shared memory" in entry["why_not"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: simulate("flash9", SMALL, c), "unknown kernel 'flash9'"),
        (lambda c: simulate("flash2", Gemm(), c), "attention"),
        (lambda c: simulate("flash2", SMALL, c, cache="hot"), "cold, warm"),
        (lambda c: simulate("flash1", SMALL, load_profile("tpu-v5e")), "has no form"),
    ],
)
def test_what_does_not_go_together(call: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        call(load_profile("h200"))  # type: ignore[operator]


def test_cycles_are_not_predicted_yet() -> None:
    entry = simulate("flash2", SMALL, load_profile("h200")).as_json()
    assert entry["sm_cycles"] is None
    assert entry["time_s"] is None


def test_a_warm_cache_keeps_what_fits() -> None:
    chip = load_profile("h200")
    warm = simulate("flash2", SMALL, chip, cache="warm").traffic
    assert warm.dram_read_bytes == 0
    cold = simulate("flash2", SMALL, chip).traffic
    assert dataclasses.replace(warm, dram_read_bytes=0).l1_fill_bytes == cold.l1_fill_bytes


def test_seeds_give_a_band_around_the_value() -> None:
    problem = Attention(batch=2, heads=16, seqlen=2048, head_dim=128)
    schedule = Schedule(tile=(64, 64), order="head")
    result = simulate("flash2", problem, load_profile("h200"), schedule, seeds=(0, 1, 2))
    low, high = result.band["dram_read_bytes"]
    assert low <= result.traffic.dram_read_bytes <= high


def test_what_a_launch_left_dirty_stays_its_operand_s() -> None:
    """Scores beyond the L2 are written back while the next launch reads them: still scores."""
    problem = Attention(heads=16, seqlen=2048, head_dim=64)
    result = simulate("standard", problem, load_profile("h200"))
    size = 16 * 2048**2 * 2
    for name in ("S", "P"):
        assert 0.9 * size <= result.operands[name].dram_write_bytes <= size
    named = sum(row.dram_write_bytes for row in result.operands.values())
    assert named <= result.traffic.dram_write_bytes


def test_a_schedule_is_completed_by_the_kernel() -> None:
    """What it leaves open is the kernel's own, and its first variant; a number asked for stays."""
    own = Schedule(tile=(64, 64), stages=3, warps=8, splits=4, cluster=2)
    kernel = dataclasses.replace(
        load_kernel("flash2"), default_schedule=lambda *_: own, variants=("in order", "swizzled")
    )
    chip = load_profile("h200")
    assert complete(kernel, SMALL, chip, Schedule()) == dataclasses.replace(own, variant="in order")
    asked = Schedule(tile=(32, 16), stages=1, warps=4, splits=7, cluster=1, variant="swizzled")
    assert complete(kernel, SMALL, chip, asked) == asked
    assert complete(kernel, SMALL, chip, Schedule(spills=0)).spills == 0


def test_a_variant_that_there_is_not_says_what_there_is() -> None:
    plain = load_kernel("flash2")
    kernel = dataclasses.replace(plain, variants=("in order", "swizzled"))
    chip = load_profile("h200")
    with pytest.raises(RequestError) as refused:
        complete(kernel, SMALL, chip, Schedule(variant="sideways"))
    assert str(refused.value) == ("flash2 has no variant 'sideways'; it has in order, swizzled")
    with pytest.raises(RequestError, match=r"^flash2 has no variant 'sideways'$"):
        complete(dataclasses.replace(plain, variants=()), SMALL, chip, Schedule(variant="sideways"))


def test_more_registers_than_a_thread_may_have_do_not_fit() -> None:
    result = simulate("flash2", SMALL, load_profile("h200"), Schedule(warps=4, registers=300))
    assert result.why_not == "300 registers of a thread > 255"
