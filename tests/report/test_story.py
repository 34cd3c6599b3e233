"""The sentences under a comparison say what the tables say."""

from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile
from iosim.report.story import story
from iosim.simulation import simulate
from iosim.units import format_bytes

CHIP = load_profile("h200")
PROBLEM = Attention(heads=4, seqlen=2048, head_dim=64)
TILE = Schedule(tile=(64, 64), stages=2, warps=4)


def test_three_kernels_in_a_sentence_each():
    results = [simulate(name, PROBLEM, CHIP, TILE) for name in ("standard", "flash1", "flash2")]
    standard, first, second = story(results, "cold")
    scores = results[0].operands
    moved = sum(scores[name].l1_fill_bytes + scores[name].l1_write_bytes for name in "SP")
    assert f"most moved: S and P, {format_bytes(moved)} at the SMs" in standard
    assert "less than" not in standard
    assert "less than standard" in first
    assert "4 blocks for 132 SMs" in first
    assert "O, 64.0 × of what it holds at the SMs" in first
    assert "K and V, 32.0 × of what they hold at the SMs, 1.00 × at HBM" in second
    assert "blocks for" in second or second.count(";") == 2


def test_one_kernel_has_nothing_to_be_compared_with():
    assert story([simulate("flash2", PROBLEM, CHIP, TILE)], "cold") == []


def test_what_does_not_fit_is_left_out():
    huge = simulate("flash2", PROBLEM, CHIP, Schedule(tile=(1024, 1024)))
    assert not huge.fits
    assert story([huge, simulate("flash1", PROBLEM, CHIP, TILE)], "cold") == []
