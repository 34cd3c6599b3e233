"""FlashAttention-3: the order of its work, what a library of the same shape moves, sizes, refusals.

What it computes and counts is in test_flash3.py.
"""

import dataclasses

import numpy as np
import pytest

from iosim.errors import RequestError
from iosim.kernels import load_kernel
from iosim.launch import blocks_per_core, why_not
from iosim.ops import ASYNC, EXP, LOAD, LOCAL, MATRIX, MULTICAST, STORE, VECTOR
from iosim.problem import Attention, Schedule, tiles
from iosim.profiles import load_profile

KERNEL = load_kernel("flash3")
GPU = load_profile("h200")
Q, K = range(2)
VARIANTS = list(KERNEL.variants)


def the_launch(problem, schedule, chip=GPU):
    (launch,) = KERNEL.launches(problem, schedule, chip)
    return launch


# B, H, N, d, causal: bytes that arrive at the cores and that leave them in the counters of
# cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x…_4x1x1_cga1x1x1:
# two groups of 64 query rows, 128 key rows, 132 persistent blocks, without a log-sum-exp
CUDNN = [
    (32, 32, 512, 64, False, 604115072, 67244160),
    (32, 32, 512, 64, True, 402788480, 67244160),
    (32, 16, 512, 128, False, 604049536, 67178624),
    (32, 16, 512, 128, True, 402722944, 67178624),
    (8, 32, 2048, 64, False, 2214727808, 67244160),
    (8, 32, 2048, 64, True, 1208094848, 67244160),
    (8, 16, 2048, 128, False, 2214662272, 67178624),
    (8, 16, 2048, 128, True, 1208029312, 67178624),
    (4, 32, 4096, 64, False, 4362211456, 67244160),
    (4, 32, 4096, 64, True, 2281836672, 67244160),
    (4, 16, 4096, 128, False, 4362145920, 67178624),
    (4, 16, 4096, 128, True, 2281771136, 67178624),
    (1, 32, 16384, 64, False, 17247113344, 67244160),
    (1, 32, 16384, 64, True, 8724287616, 67244160),
    (1, 16, 16384, 128, False, 17247047808, 67178624),
    (1, 16, 16384, 128, True, 8724222080, 67178624),
]


@pytest.mark.parametrize("row", CUDNN, ids=str)
def test_moves_what_a_library_s_kernel_of_the_same_shape_moves(row):
    """What is left over is one sector both ways for each work tile and each block.

    A scheduler that takes work tiles off a shared counter moves that; this one deals them out.
    """
    batch, heads, seqlen, head_dim, causal, filled, written = row
    problem = Attention(
        batch=batch, heads=heads, seqlen=seqlen, head_dim=head_dim, causal=causal, dtype="fp16"
    )
    schedule = Schedule(tile=(128, 128), stages=2)
    launch = the_launch(problem, schedule)
    forms = {form.quantity: form.value for form in KERNEL.closed_forms(problem, schedule, GPU)}
    work_tiles = batch * heads * tiles(seqlen, 128)
    scheduler = 32 * (work_tiles + launch.blocks)
    assert launch.blocks == 132
    assert launch.footprint.threads == 384
    assert launch.footprint.registers == 168
    assert filled - forms["l1_fill_bytes"] == scheduler
    lse = 4 * batch * heads * seqlen
    assert written - (forms["l1_write_bytes"] - lse) == scheduler


@pytest.mark.parametrize("order", ["query", "head"])
@pytest.mark.parametrize("causal", [False, True])
def test_work_tiles_are_dealt_out_heaviest_first(harness, order, causal):
    problem = Attention(heads=3, seqlen=40, head_dim=16, causal=causal)
    launch = the_launch(problem, Schedule(tile=(8, 8), order=order), harness.chip_of(4))
    queries = range(4, -1, -1) if causal else range(5)
    if order == "head":
        expected = [(head, query) for query in queries for head in range(3)]
    else:
        expected = [(head, query) for head in range(3) for query in queries]
    assert launch.blocks == 4
    blocks, busy = [[], [], [], []], [0, 0, 0, 0]
    for head, query in expected:
        first = busy.index(min(busy))  # the block that is free first, the lowest of equals
        blocks[first].append((head, query))
        busy[first] += query + 1 if causal else 5  # key tiles that it sees
    if not causal:
        assert blocks == [expected[block::4] for block in range(4)]
    assert [work_of(harness, launch, block) for block in range(4)] == blocks
    assert launch.steps == max(busy)


@pytest.mark.parametrize("order", ["query", "head"])
def test_a_cluster_works_on_neighbours_of_one_head(harness, order):
    problem = Attention(heads=3, seqlen=40, head_dim=16)
    schedule = Schedule(tile=(8, 8), order=order, cluster=2)
    launch = the_launch(problem, schedule, harness.chip_of(5))
    pairs = [(0, 1), (2, 3), (4,)]  # one block of the last has no rows
    if order == "head":
        expected = [(head, pair) for pair in pairs for head in range(3)]
    else:
        expected = [(head, pair) for head in range(3) for pair in pairs]
    assert launch.blocks == 4
    for block in range(4):
        mine = expected[block // 2 :: 2]
        rank = block % 2
        assert work_of(harness, launch, block) == [
            (head, pair[rank]) for head, pair in mine if rank < len(pair)
        ]


def work_of(harness, launch, block):
    """(head, query tile) of the Q tiles that a block loads: 40 rows of 32 bytes, in tiles of 8."""
    ops = harness.count(launch, block)
    loads = ops["address"][(ops["kind"] == LOAD) & (ops["tensor"] == Q)]
    rows = (loads - launch.operands[Q].address) // 32
    return [(int(row) // 40, int(row) % 40 // 8) for row in rows]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_buffers_are_as_many_as_stages(harness, stages):
    """The engine issues a load once the step `launch.stages` - 1 before its own has ended."""
    problem = Attention(heads=1, seqlen=128, seqlen_k=1024, head_dim=64)
    launch = the_launch(problem, Schedule(tile=(128, 64), stages=stages))
    ops = harness.count(launch, 0)
    loads = ops[(ops["kind"] == LOAD) & (ops["tensor"] == K)]
    ahead = launch.stages - 1  # steps whose loads go out before any has ended
    assert (loads["step"] < ahead).sum() == stages
    tile_bytes = 64 * 64 * 2
    buffers = launch.footprint.shared_bytes - 128 * 128 - 128
    assert buffers // (2 * tile_bytes) == stages


def test_fewer_work_tiles_than_cores(harness):
    assert the_launch(Attention(heads=3, seqlen=256), Schedule(tile=(128, 64))).blocks == 6
    clusters = Schedule(tile=(128, 64), cluster=4)
    assert the_launch(Attention(heads=3, seqlen=256), clusters).blocks == 12
    many = Attention(heads=64, seqlen=4096)
    assert the_launch(many, clusters).blocks == 132
    assert the_launch(many, clusters, harness.chip_of(135, 64)).blocks == 132


def middle(harness, variant, consumers=2):
    """The compute operations of a step in the middle of a work tile, as (what, consumer)."""
    problem = Attention(heads=1, seqlen=192, seqlen_k=640, head_dim=128)
    schedule = Schedule(tile=(64 * consumers, 128), stages=2, variant=variant)
    ops = harness.count(the_launch(problem, schedule), 0)
    ops = ops[(ops["step"] == 2) & (ops["kind"] >= MATRIX)]
    names = {
        (MATRIX, 128, 128): "product", (VECTOR, 128, 5): "row",
        (VECTOR, 128, 1): "rescale", (EXP, 128, 1): "exp",
    }  # fmt: skip
    return [(names[op["kind"], op["n"], op["k"]], int(op["slot"])) for op in ops], ops


def test_ping_pong_puts_a_softmax_beside_the_next_consumer_s_products(harness):
    products = ("product", "rescale", "product")
    softmax = ("row", "exp")
    order, ops = middle(harness, "ping-pong", 3)
    parts = [(products, 1), (products, 2), (softmax, 1), (products, 3), (softmax, 2), (softmax, 3)]
    assert order == [(name, consumer) for names, consumer in parts for name in names]
    assert (ops["flags"][ops["kind"] == MATRIX] == ASYNC).all()  # nothing waits before its softmax
    together, _ = middle(harness, "cooperative", 3)
    assert sorted(together) == sorted(order)
    last_product = max(i for i, (name, _) in enumerate(together) if name == "product")
    assert all(name == "product" or name == "rescale" for name, _ in together[:last_product])


def test_scores_of_the_next_tile_are_issued_before_the_output_of_this_one(harness):
    problem = Attention(heads=1, seqlen=128, seqlen_k=300, head_dim=64)
    launch = the_launch(problem, Schedule(tile=(128, 100), stages=2))
    ops = harness.count(launch, 0)
    loads = ops[ops["kind"] == LOAD]
    address = {name: launch.operands[name].address for name in (K, K + 1)}
    order = [
        ("QKV"[op["tensor"]], int(op["address"] - address.get(op["tensor"], 0)) // 12800)
        if op["tensor"] != Q
        else ("Q", 0)
        for op in loads
    ]
    assert order == [("Q", 0), ("K", 2), ("K", 1), ("V", 2), ("K", 0), ("V", 1), ("V", 0)]
    waits = ops[ops["kind"] == MATRIX]
    assert [bool(flag) for flag in waits["flags"] & ASYNC] == [False] * 2 + [True] * 8 + [False] * 2


def test_variants_move_the_same_bytes(harness):
    problem = Attention(heads=2, seqlen=256, causal=True, head_dim=64)
    kinds = []
    for variant in VARIANTS:
        launch = the_launch(problem, Schedule(tile=(128, 64), stages=2, variant=variant))
        ops = np.concatenate([harness.count(launch, block) for block in range(launch.blocks)])
        kinds.append(ops[(ops["kind"] <= STORE)].tobytes())
    assert kinds[0] == kinds[1]


def test_each_block_of_a_cluster_asks_for_its_share(harness):
    problem = Attention(heads=1, seqlen=256, seqlen_k=176, head_dim=128)
    launch = the_launch(problem, Schedule(tile=(128, 176), stages=2, cluster=2))
    assert launch.cluster == launch.blocks == 2
    keys = launch.operands[K].address
    for block in range(2):
        ops = harness.count(launch, block)
        (load,) = ops[(ops["kind"] == LOAD) & (ops["tensor"] == K)]
        assert load["flags"] & MULTICAST
        assert load["slot"] == 2
        assert (load["address"] - keys, load["rows"]) == (block * 88 * 256, 88)


# head_dim, dtype, causal: tile, cluster at 8192 rows; shared memory, threads and registers
DEFAULTS = {
    (64, "fp16", False): ((192, 128), 1, 192 * 128 + 4 * 128 * 128 + 128, 512, 128),
    (64, "fp16", True): ((192, 128), 1, 192 * 128 + 4 * 128 * 128 + 128, 512, 128),
    (128, "fp16", False): ((128, 176), 2, 212_992 + 128, 384, 168),
    (128, "bf16", True): ((128, 128), 1, 163_840 + 128, 384, 168),
    (256, "bf16", False): ((128, 80), 2, 229_376 + 128, 384, 168),
    (256, "fp16", True): ((128, 80), 1, 229_376 + 128, 384, 168),
    (128, "fp8", False): ((128, 176), 2, 106_496 + 128, 384, 168),
}


@pytest.mark.parametrize("key", DEFAULTS, ids=str)
@pytest.mark.parametrize("profile", ["h200", "h100-sxm", "h100-pcie"])
def test_defaults_are_the_library_s(key, profile):
    chip = load_profile(profile)
    head_dim, dtype, causal = key
    tile, cluster, shared_bytes, threads, registers = DEFAULTS[key]
    problem = Attention(seqlen=8192, head_dim=head_dim, dtype=dtype, causal=causal)
    schedule = KERNEL.default_schedule(problem, chip)
    assert (schedule.tile, schedule.stages, schedule.cluster) == (tile, 2, cluster)
    block = the_launch(problem, schedule, chip).footprint
    assert block.shared_bytes == shared_bytes <= chip.limits.shared_per_block_bytes
    assert (block.threads, block.registers, block.spilled_registers) == (threads, registers, 0)
    assert blocks_per_core(block, chip.limits) == 1


def test_no_default_cluster_where_it_would_not_be_whole():
    odd = Attention(seqlen=128 * 5, head_dim=128)
    assert KERNEL.default_schedule(odd, GPU).cluster == 1
    even = dataclasses.replace(odd, seqlen=128 * 5 + 1)
    assert KERNEL.default_schedule(even, GPU).cluster == 2
    assert KERNEL.default_schedule(dataclasses.replace(even, window=64), GPU).cluster == 1


@pytest.mark.parametrize("head_dim", [1, 16, 80, 192, 512])
@pytest.mark.parametrize("seqlen", [1, 100, 8192])
def test_default_schedules_fit(head_dim, seqlen):
    problem = Attention(seqlen=seqlen, seqlen_k=8192, head_dim=head_dim)
    schedule = KERNEL.default_schedule(problem, GPU)
    assert why_not(the_launch(problem, schedule).footprint, GPU) is None


def test_what_does_not_fit_spills_or_is_said_to_be_too_large():
    problem = Attention(head_dim=256)
    block = the_launch(problem, Schedule(tile=(128, 128), stages=1)).footprint
    assert block.spilled_registers == 128 + 64 + 32 + 24 - 240
    block = the_launch(problem, Schedule(tile=(128, 128), stages=2)).footprint
    assert "shared memory" in why_not(block, GPU)


REFUSED = {
    "no warp-group products": ("a100-80gb", {}, {}, "a100-80gb has no warp-group.*take flash2"),
    "a grid": ("tpu-v5e", {"dtype": "bf16"}, {}, "tpu-v5e has no warp-group.*take flash2"),
    "no unit of that kind": ("h200", {"dtype": "fp32"}, {}, "no warp-group products of fp32"),
    "four bytes": ("h200", {"dtype": "tf32"}, {}, "not tf32"),
    "scales": ("h200", {"kv_dtype": "fp8"}, {}, "reads K and V in the dtype of Q"),
    "one consumer": ("h200", {}, {"tile": (64, 64)}, "128 or 192 rows"),
    "half a consumer": ("h200", {}, {"tile": (160, 64)}, "128 or 192 rows.*not 160"),
    "one size": ("h200", {}, {"tile": (128,)}, "needs a tile"),
    "other warps": ("h200", {}, {"warps": 8}, "12 warps for 128 query rows"),
    "causal cluster": ("h200", {"causal": True}, {"cluster": 2}, "causal or windowed mask"),
    "windowed cluster": ("h200", {"window": 9}, {"cluster": 2}, "causal or windowed mask"),
    "too large a cluster": ("h200", {}, {"cluster": 16}, "at most 8 blocks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(case):
    profile, problem, schedule, match = REFUSED[case]
    with pytest.raises(RequestError, match=match) as refused:
        KERNEL.launches(
            Attention(**problem), Schedule(**{"tile": (128, 64), **schedule}), load_profile(profile)
        )
    assert "\n" not in str(refused.value)


def test_local_memory_is_that_of_the_consumers(harness):
    problem = Attention(heads=1, seqlen=128, head_dim=64)
    launch = the_launch(problem, Schedule(tile=(128, 64), spills=2))
    ops = harness.count(launch, 0)
    local = ops[ops["flags"] & LOCAL != 0]
    assert set(local["row_bytes"]) == {2 * 128 * 2 * 4}
    assert [int(op["kind"]) for op in local] == [STORE, LOAD, STORE]


def test_the_sketch_shows_clusters_and_several_steps(harness):
    problem, schedule = KERNEL.sketch
    launch = the_launch(problem, schedule)
    assert (launch.blocks, launch.steps, launch.cluster) == (4, 4, 2)
    assert len({harness.count(launch, block).size for block in range(4)}) == 1
