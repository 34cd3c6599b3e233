"""Blocks of the backward pass: on-chip memory, what is taken by default, what is refused."""

import pytest

from iosim.errors import RequestError
from iosim.kernels import load_kernel
from iosim.launch import why_not
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile
from iosim.simulation import complete, simulate

KERNEL = load_kernel("flash2-bwd")
GPU, TPU = load_profile("h200"), load_profile("tpu-v5e")


def planned(problem, schedule, chip):
    return KERNEL.launches(problem, schedule, chip)


# tile, stages: shared memory without the reserve; Triton 3.6 for such loops in fp16, warp groups
COMPILED = {
    "dkdv": [
        (64, (64, 64), 1, 32768),
        (64, (64, 64), 2, 49664),
        (64, (32, 128), 2, 49408),
        (64, (128, 128), 2, 99328),
        (128, (64, 64), 2, 98816),
        (128, (64, 128), 2, 131584),
        (128, (64, 128), 1, 98304),
        (512, (32, 64), 2, 262400),
        (512, (32, 64), 1, 196608),
    ],
    "dq": [
        (64, (64, 64), 1, 32768),
        (64, (64, 64), 2, 49152),
        (64, (128, 32), 2, 49152),
        (64, (128, 128), 2, 98304),
        (128, (64, 64), 2, 98304),
        (128, (64, 128), 2, 163840),
        (128, (64, 128), 1, 98304),
        (512, (64, 32), 2, 262144),
        (512, (64, 32), 1, 196608),
    ],
}
# the same on a chip without warp groups; whether P or dS pass through shared memory differs
COMPILED_BEFORE = {
    "dkdv": [
        (64, (64, 64), 33280),
        (64, (32, 128), 41216),
        (64, (128, 128), 66560),
        (128, (64, 64), 74240),
        (128, (64, 128), 98816),
        (512, (32, 64), 200960),
    ],
    "dq": [
        (64, (64, 64), 32768),
        (64, (128, 32), 40960),
        (64, (128, 128), 65536),
        (128, (64, 64), 73728),
        (128, (64, 128), 114688),
        (512, (64, 32), 200704),
    ],
}


def footprint_of(name, problem, schedule, chip):
    launches = {launch.name: launch for launch in planned(problem, schedule, chip)}
    return launches[name].footprint


@pytest.mark.parametrize("name", COMPILED)
def test_two_pass_takes_the_shared_memory_that_a_compiler_takes(name):
    for head_dim, tile, stages, shared in COMPILED[name]:
        problem = Attention(head_dim=head_dim)
        schedule = Schedule(tile=tile, stages=stages, warps=8, variant="two-pass")
        assert footprint_of(name, problem, schedule, GPU).shared_bytes == shared
    for head_dim, tile, shared in COMPILED_BEFORE[name]:
        problem = Attention(head_dim=head_dim)
        schedule = Schedule(tile=tile, stages=2, warps=8, variant="two-pass")
        block = footprint_of(name, problem, schedule, load_profile("a100"))
        assert block.shared_bytes - shared in (0, tile[0] * tile[1] * 2)


@pytest.mark.parametrize(
    "profile", ["h200", "h100", "a100", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"]
)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_default_schedules_fit(profile, head_dim):
    chip = load_profile(profile)
    problem = Attention(seqlen=1000, head_dim=head_dim, dtype="bf16", causal=True)
    schedule = complete(KERNEL, problem, chip, Schedule())
    assert schedule.variant == ("two-pass" if chip.grid else "atomics")
    for launch in planned(problem, schedule, chip):
        assert why_not(launch.footprint, chip) is None


def test_default_tiles_are_those_of_flash_attention():
    def chosen(head_dim, chip=GPU):
        schedule = KERNEL.default_schedule(Attention(head_dim=head_dim), chip)
        return schedule.tile, schedule.stages, schedule.warps

    assert chosen(64) == ((128, 128), 2, 8)
    assert chosen(128) == ((64, 128), 2, 8)
    assert chosen(256) == ((64, 64), 2, 8)
    assert chosen(256, load_profile("a100")) == ((64, 64), 1, 8)


def test_a_variant_is_the_schedule_s_the_chip_s_or_the_first():
    problem = Attention(heads=1, seqlen=256, head_dim=64, dtype="bf16")
    assert simulate("flash2-bwd", problem, TPU).schedule.variant == "two-pass"
    assert complete(KERNEL, problem, GPU, Schedule()).variant == KERNEL.variants[0] == "atomics"
    asked = complete(KERNEL, problem, GPU, Schedule(variant="two-pass"))
    assert asked.variant == "two-pass"
    with pytest.raises(RequestError, match=r"no variant 'three-pass'; it has atomics, two-pass"):
        complete(KERNEL, problem, GPU, Schedule(variant="three-pass"))


@pytest.mark.parametrize("variant", ["atomics", "reread-dq"])
def test_a_grid_adds_to_nothing_in_memory(variant):
    with pytest.raises(RequestError, match=f"no variant {variant}") as error:
        planned(Attention(), Schedule(tile=(128, 128), variant=variant), TPU)
    assert "\n" not in str(error.value)


def test_refusals():
    schedule = Schedule(tile=(64, 64))
    with pytest.raises(RequestError, match="K and V in the dtype of Q"):
        planned(Attention(kv_dtype="fp8"), schedule, GPU)
    with pytest.raises(RequestError, match="query rows × key rows"):
        planned(Attention(), Schedule(tile=(64,)), GPU)
    with pytest.raises(RequestError, match="multiples of"):
        planned(Attention(dtype="bf16"), Schedule(tile=(24, 100)), TPU)
