"""The main path: what a request gives, and what it is refused for."""

from __future__ import annotations

import dataclasses

import pytest

import iosim
from iosim.errors import RequestError
from iosim.problem import Attention, Gemm, Schedule
from iosim.profiles import load_profile
from iosim.result import document
from iosim.simulation import simulate

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
