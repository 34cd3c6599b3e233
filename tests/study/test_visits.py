"""Which tile is read when: the calendar of a launch against what the algorithm says."""

import pytest

from iosim.kernels import kernel_names, load_kernel
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile, profile_names
from iosim.study.visits import BOTH, READ, WRITTEN, calendar, sketch

GPU = load_profile("h200")
CHIPS = [load_profile(name) for name in profile_names()]
SMALL = Attention(heads=1, seqlen=64, head_dim=16)
TILE = Schedule(tile=(16, 16), stages=2, warps=4)


def strips(name, problem=SMALL, schedule=TILE, columns=24):
    (launch,) = load_kernel(name).launches(problem, schedule, GPU)
    found = calendar(launch, columns)
    return found, {strip.operand: strip.marks for strip in found.strips}


def test_flash2_streams_all_keys_past_each_query_tile():
    found, marks = strips("flash2")
    assert found.steps == (4, 4, 4, 4)
    assert marks["Q"] == {(block, 4 * block): READ for block in range(4)}
    assert marks["K"] == marks["V"]
    assert marks["K"] == {(tile, 4 * b + tile): READ for b in range(4) for tile in range(4)}
    assert marks["O"] == {(block, 4 * block + 3): WRITTEN for block in range(4)}


def test_flash1_rewrites_the_output_at_every_visit():
    _, marks = strips("flash1")
    assert marks["K"] == {(tile, 4 * tile): READ for tile in range(4)}
    assert marks["O"] == {(tile, 4 * key + tile): BOTH for key in range(4) for tile in range(4)}


def test_only_whole_blocks_are_shown_and_one_at_least():
    assert strips("flash2", columns=9)[0].steps == (4, 4)
    assert strips("flash2", columns=1)[0].steps == (4,)


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_has_a_small_example(name):
    kernel = load_kernel(name)
    found = sketch(kernel, CHIPS)
    assert found
    for one in found:
        assert one.strips
        assert sum(one.steps) <= 40, "too wide for a terminal"


def test_a_chip_that_cannot_run_it_is_passed_over():
    kernel = load_kernel("flash1")
    grids = [chip for chip in CHIPS if chip.grid is not None]
    assert sketch(kernel, grids) == []
    assert sketch(kernel, [*grids, GPU]) == sketch(kernel, [GPU])
