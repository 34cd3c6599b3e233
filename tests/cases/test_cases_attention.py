"""Cases with a right value, met by people who count attention; each test is named by its id."""

import dataclasses

import pytest

from iosim.kernels import load_kernel
from iosim.launch import occupancy, why_not
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile
from iosim.simulation import simulate

H200 = load_profile("h200")
GPT2 = {"batch": 64, "heads": 16, "seqlen": 1024, "head_dim": 64}


def forms(kernel, problem, schedule, chip=H200):
    made = load_kernel(kernel).closed_forms(problem, schedule, chip)
    return {form.quantity: form.value for form in made}


def launches(kernel, problem, schedule, chip=H200):
    return load_kernel(kernel).launches(problem, schedule, chip)


def unique_bytes(kernel, problem, schedule):
    """Bytes that have to be moved once, by operand."""
    every = (o for launch in launches(kernel, problem, schedule) for o in launch.operands)
    return {operand.name: operand.unique_bytes for operand in every}


def test_a1_flops_forward_and_backward():
    problem = Attention(**GPT2)
    assert problem.matrix_flops() == pytest.approx(274.88e9, rel=1e-4)
    assert problem.matrix_flops(products=6) == pytest.approx(824.63e9, rel=1e-4)
    assert problem.matrix_flops(products=7) == pytest.approx(962.07e9, rel=1e-4)
    for kernel in ("standard", "flash1", "flash2"):
        works = [launch.work for launch in launches(kernel, problem, Schedule(tile=(64, 64)))]
        assert sum(work.flops for work in works) == problem.matrix_flops()


@pytest.mark.parametrize(
    ("key_rows", "units", "gigabytes"),
    [(64, 50, 6.71), (128, 26, 3.49), (256, 14, 1.88), (512, 8, 1.07)],
)
def test_a3_flash1_traffic_by_key_tile(key_rows, units, gigabytes):
    problem = Attention(**GPT2)
    moved = forms("flash1", problem, Schedule(tile=(64, key_rows), spills=0))
    rows = 1024 * 16 * 64
    statistics = 4 * (1024 // key_rows) * rows * 4
    tiles = moved["l1_fill_bytes"] + moved["l1_write_bytes"] - statistics
    assert tiles == units * rows * 64 * 2
    assert tiles / 1e9 == pytest.approx(gigabytes, abs=0.005)


@pytest.mark.parametrize("seqlen", [512, 1024, 2048])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a4_flash1_traffic_does_not_depend_on_the_query_tile(seqlen, head_dim):
    problem = Attention(heads=4, seqlen=seqlen, head_dim=head_dim)
    moved = {}
    for query_rows in (16, 64, 128):
        for key_rows in (64, 128):
            # of the algorithm alone: what spills of a large tile in 4 warps comes besides
            form = forms("flash1", problem, Schedule(tile=(query_rows, key_rows), spills=0))
            moved[query_rows, key_rows] = form["l1_fill_bytes"] + form["l1_write_bytes"]
    for key_rows in (64, 128):
        assert len({moved[query_rows, key_rows] for query_rows in (16, 64, 128)}) == 1
        visits = seqlen // key_rows
        rows = 4 * seqlen
        assert moved[64, key_rows] == rows * ((2 + 3 * visits) * head_dim * 2 + 16 * visits)


@pytest.mark.parametrize("seqlen_k", [512, 4096])
def test_a5_decode_reads_the_kv_heads_and_writes_one_row(seqlen_k):
    size = {"batch": 2, "heads": 32, "seqlen": 1, "seqlen_k": seqlen_k, "head_dim": 128}
    schedule = Schedule(tile=(16, 64))
    grouped = unique_bytes("flash2", Attention(**size, kv_heads=8, causal=True), schedule)
    assert grouped["K"] + grouped["V"] == 2 * (2 * seqlen_k * 8 * 128 * 2)
    multi = unique_bytes("flash2", Attention(**size, causal=True), schedule)
    assert (multi["K"] + multi["V"]) / (grouped["K"] + grouped["V"]) == 32 / 8
    assert grouped["O"] == 2 * 32 * 128 * 2


def test_a7_causal_halves_flops_and_reads_again_but_nothing_compulsory():
    size = {"batch": 1, "heads": 4, "seqlen": 1024, "head_dim": 64}
    full, causal = Attention(**size), Attention(**size, causal=True)
    assert causal.matrix_flops() / full.matrix_flops() == (1024 + 1) / (2 * 1024)
    schedule = Schedule(tile=(64, 64), stages=2, warps=4)
    assert unique_bytes("flash2", full, schedule) == unique_bytes("flash2", causal, schedule)
    one, other = (simulate("flash2", problem, H200, schedule) for problem in (full, causal))
    assert one.compulsory == other.compulsory
    assert one.traffic.dram_read_bytes == other.traffic.dram_read_bytes
    for name in ("K", "V"):
        again = other.operands[name].l1_fill_bytes / one.operands[name].l1_fill_bytes
        assert again == (16 + 1) / (2 * 16)
    assert other.operands["Q"].l1_fill_bytes == one.operands["Q"].l1_fill_bytes


def test_a11_unique_bytes_scale_with_kv_heads():
    size = {"heads": 32, "seqlen": 1, "seqlen_k": 4096, "head_dim": 128}
    schedule = Schedule(tile=(16, 64))
    unique = {
        kv_heads: unique_bytes("flash2", Attention(**size, kv_heads=kv_heads), schedule)
        for kv_heads in (32, 8, 1)
    }
    for kv_heads in (32, 8, 1):
        assert unique[kv_heads]["K"] == unique[kv_heads]["V"] == kv_heads * 4096 * 128 * 2
        assert unique[kv_heads]["Q"] == unique[kv_heads]["O"] == 32 * 128 * 2


@pytest.mark.parametrize("seqlen", [1, 8192])
def test_a12_a_window_of_4096_shows_4096_keys(seqlen):
    problem = Attention(heads=1, seqlen=seqlen, seqlen_k=8192, causal=True, window=4096)
    first, last = problem.visible(seqlen - 1)
    assert (first, last) == (8192 - 4096, 8192)
    decode = dataclasses.replace(problem, seqlen=1)
    assert unique_bytes("flash2", decode, Schedule(tile=(16, 64)))["K"] == 4096 * 128 * 2


def test_c9_a_head_of_512_with_tiles_of_32_and_16():
    assert H200.limits is not None
    limits = dataclasses.replace(H200.limits, shared_per_block_bytes=65_536)
    small = dataclasses.replace(H200, limits=limits)
    problem = Attention(head_dim=512)
    (wide,) = launches("flash2", problem, Schedule(tile=(32, 32), stages=1), small)
    assert wide.footprint.shared_bytes == 98_304
    assert "98,304 bytes > 65,536" in why_not(wide.footprint, small)
    (narrow,) = launches("flash2", problem, Schedule(tile=(16, 16), stages=1), small)
    assert narrow.footprint.shared_bytes <= 65_536
    assert why_not(narrow.footprint, small) is None


def test_c12_a_head_of_256_takes_another_tile_on_each_chip():
    problem = Attention(head_dim=256)
    older, newer = load_profile("a100"), load_profile("h100")

    def blocks(tile, chip):
        (launch,) = launches("flash2", problem, Schedule(tile=tile, stages=1, warps=8), chip)
        return launch.footprint.shared_bytes, occupancy(launch.footprint, chip.limits)

    shared, resident = blocks((128, 64), older)
    assert (shared, resident["shared memory"]) == (131_072, 1)
    assert shared <= older.limits.shared_per_block_bytes == 166_912
    shared, resident = blocks((64, 64), newer)
    assert (shared, resident["shared memory"]) == (98_304, 2)
    assert blocks((64, 64), older)[1]["shared memory"] == 1


@pytest.mark.parametrize("profile", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"])
def test_d3_every_window_is_there_twice(profile):
    chip = load_profile(profile)
    problem = Attention(heads=4, seqlen=4096, head_dim=128, dtype="bf16")
    (flash,) = launches("flash2", problem, Schedule(tile=(512, 1024)), chip)
    window_in, window_out = (512 + 2 * 1024) * 256, 512 * 256
    assert flash.footprint.window_bytes == 2 * (window_in + window_out)
    assert flash.footprint.scratch_bytes == 512 * (128 + 128 + 128) * 4
    scores, _, output = launches("standard", problem, Schedule(tile=(512, 1024)), chip)
    tile = 512 * 1024 * 2
    assert scores.footprint.window_bytes == 2 * ((512 + 1024) * 256 + tile)
    assert output.footprint.window_bytes == 2 * (tile + (1024 + 512) * 256)
    assert output.footprint.scratch_bytes == 512 * 128 * 4


@pytest.mark.parametrize("kernel", ["standard", "flash1", "flash2"])
def test_f12_twice_the_element_twice_the_bytes(kernel):
    size = {"heads": 4, "seqlen": 256, "head_dim": 128}
    moved = {}
    for dtype in ("fp8", "fp16"):
        result = simulate(
            kernel, Attention(**size, dtype=dtype), H200, Schedule(tile=(64, 64), stages=2, warps=4)
        )
        moved[dtype] = result.operands
    for name in moved["fp8"].keys() & {"Q", "K", "V", "O", "S", "P"}:
        one, two = moved["fp8"][name], moved["fp16"][name]
        assert two.unique_bytes == 2 * one.unique_bytes
        assert two.l1_fill_bytes == 2 * one.l1_fill_bytes
        assert two.l1_write_bytes == 2 * one.l1_write_bytes
