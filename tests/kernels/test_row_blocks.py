"""How rows are cut: as PyTorch cuts them, one pass where they fit, refused where they do not."""

from pathlib import Path

import pytest

from iosim.counters.table import read_table
from iosim.errors import RequestError
from iosim.kernels import load_kernel
from iosim.launch import occupancy, why_not
from iosim.problem import Attention, Gemm, Rows, Schedule
from iosim.profiles import load_profile
from iosim.simulation import complete, simulate
from iosim.validation.requests import request_of

COUNTERS = Path(__file__).resolve().parents[2] / "reports" / "accuracy" / "h200.jsonl"
NAMES = ("softmax", "layernorm")
STREAMED = {"softmax": "online", "layernorm": "two-reads"}
CHIPS = ("h200", "a100", "tpu-v4", "tpu-v5e", "tpu-v6e")


def planned(name, problem, chip, **schedule):
    """The schedule, complete, and the launch."""
    kernel = load_kernel(name)
    full = complete(kernel, problem, chip, Schedule(**schedule))
    (launch,) = kernel.launches(problem, full, chip)
    return full, launch


def rows_of(*families):
    return [row for row in read_table(COUNTERS).rows if row.family in families]


def test_launch_facts_agree_with_the_counters():
    """Without a look at the facts the softmax takes PyTorch's blocks, and registers to a tenth."""
    chip = load_profile("h200")
    rows = rows_of("naive-softmax")
    assert len(rows) == 5
    for row in rows:
        p, facts = row.fields["params"], row.fields
        problem = Rows(rows=p["B"] * p["H"] * p["N"], cols=p["N"])
        _, launch = planned("softmax", problem, chip)
        assert launch.blocks == facts["grid"], row.id
        assert launch.footprint.threads == facts["block"], row.id
        assert launch.footprint.registers == pytest.approx(facts["registers"], rel=0.1), row.id


@pytest.mark.parametrize("family", ["naive-softmax", "layernorm"])
def test_requests_use_the_launch_facts(family):
    chip = load_profile("h200")
    for row in rows_of(family):
        request = request_of(row, chip)
        full, launch = planned(request.kernel, request.problem, chip, **vars(request.schedule))
        facts = row.fields
        allowed = occupancy(launch.footprint, chip.limits)
        assert (launch.blocks, launch.footprint.threads) == (facts["grid"], facts["block"])
        assert launch.footprint.registers == facts["registers"]
        assert launch.footprint.shared_bytes + 1024 == facts["smem_per_block"]
        assert (allowed["registers"], allowed["warps"]) == (facts["occ_regs"], facts["occ_warps"])
        assert full.variant == ("one-pass" if family == "naive-softmax" else "two-reads")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("profile", CHIPS)
@pytest.mark.parametrize("rows", [1, 100, 5000])
def test_default_schedules_fit_and_read_once_if_they_can(name, dtype, profile, rows):
    chip = load_profile(profile)
    read_once = []
    for cols in (1, 100, 2048, 2049, 16384, 40_000, 100_000, 1 << 20):
        schedule, launch = planned(name, Rows(rows=rows, cols=cols, dtype=dtype), chip)
        assert why_not(launch.footprint, chip) is None, cols
        read_once.append(schedule.variant == "one-pass")
    assert read_once == sorted(read_once, reverse=True)  # from some length on no longer
    assert read_once[4]
    assert not read_once[-1]


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_row_of_one_pass_is_what_shared_memory_holds(name):
    chip = load_profile("h200")
    longest = chip.limits.shared_per_block_bytes // 2
    for cols, variant in ((longest, "one-pass"), (longest + 1, STREAMED[name])):
        schedule, launch = planned(name, Rows(rows=4, cols=cols), chip)
        assert schedule.variant == variant
        assert launch.steps == (1 if variant == "one-pass" else 2 * -(-cols // schedule.tile[1]))


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_of_a_row_too_long_is_refused(name):
    problem = Rows(rows=4, cols=1 << 20)
    on_gpu = simulate(name, problem, load_profile("h200"), Schedule(variant="one-pass"))
    assert "shared memory 2,097,152 bytes > 232,448" in on_gpu.why_not
    on_tpu = simulate(name, problem, load_profile("tpu-v5e"), Schedule(variant="one-pass"))
    assert "> scoped limit" in on_tpu.why_not


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_for_wins(name):
    chip = load_profile("h200")
    schedule, _ = planned(name, Rows(cols=1024), chip, variant=STREAMED[name], tile=(2, 256))
    assert (schedule.variant, schedule.tile) == (STREAMED[name], (2, 256))
    with pytest.raises(
        RequestError, match=f"has no variant 'three'; it has one-pass, {STREAMED[name]}"
    ):
        planned(name, Rows(), chip, variant="three")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_chunks_in_flight_take_shared_memory(name, stages):
    chip = load_profile("h200")
    problem = Rows(rows=64, cols=1 << 20)
    schedule = {"tile": (2, 512), "stages": stages, "warps": 4, "variant": STREAMED[name]}
    _, launch = planned(name, problem, chip, **schedule)
    assert launch.footprint.shared_bytes == (0 if stages == 1 else stages * 2 * 512 * 2)
    assert launch.stages == stages


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("problem", [Attention(), Gemm(), Rows(dtype="fp8"), Rows(dtype="tf32")])
def test_another_problem_is_refused(name, problem):
    with pytest.raises(RequestError, match=r"rows × columns|fp32, fp16, bf16, not"):
        planned(name, problem, load_profile("h200"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("profile", "tile"),
    [("h200", (4,)), ("h200", (4, 4, 4)), ("tpu-v5e", (100, 128)), ("tpu-v5e", (16, 100))],
)
def test_tiles_that_cannot_be(name, profile, tile):
    kernel, problem = load_kernel(name), Rows(dtype="bf16")
    with pytest.raises(RequestError, match="tile"):
        kernel.launches(problem, Schedule(tile=tile, variant=STREAMED[name]), load_profile(profile))


@pytest.mark.parametrize("name", NAMES)
def test_the_sketch_is_small_and_streams(name, harness):
    kernel, chip = load_kernel(name), load_profile("h200")
    problem, schedule = kernel.sketch
    (launch,) = kernel.launches(problem, schedule, chip)
    assert (launch.blocks, launch.steps) == (4, 8)
    assert len(harness.count(launch, 0)) < 100


def test_standard_attention_cuts_its_rows_the_same_way():
    chip = load_profile("h200")
    for keys in (1000, 2048, 5000, 16384, 30_000):
        problem = Attention(heads=2, seqlen=64, seqlen_k=keys, head_dim=16)
        launches = load_kernel("standard").launches(problem, Schedule(tile=(64, 64)), chip)
        _, launch = planned("softmax", Rows(rows=128, cols=keys), chip)
        assert launches[1].footprint == launch.footprint
        assert launches[1].blocks == launch.blocks
