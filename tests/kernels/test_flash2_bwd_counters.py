"""The backward pass beside Nsight Compute counters of PyTorch's FlashAttention-2 kernels.

NVIDIA H200, PyTorch 2.11, scaled_dot_product_attention in fp16; heads is batch · heads. Of each
launch the bytes that arrive at the SMs and those that they write.
"""

import numpy as np
import pytest

from iosim.kernels import load_kernel
from iosim.ops import LOAD
from iosim.problem import Attention, Schedule
from iosim.profiles import load_profile

GPU = load_profile("h200")
TILES = {64: (128, 128), 128: (64, 128)}  # FlashAttention's Flash_bwd_kernel_traits, 8 warps
# heads, seqlen, head_dim, causal: dkdv filled and written, delta filled and written
MEASURED = {
    (128, 4096, 64, False): (4579784960, 4508876800, 134217728, 138330848),
    (128, 4096, 64, True): (2425676032, 2399141888, 134217728, 138332512),
    (64, 4096, 128, False): (4497205632, 4433379328, 134217728, 136287584),
    (64, 4096, 128, True): (2384022752, 2355101696, 134217728, 136289472),
    (32, 16384, 64, False): (17901224192, 17393778688, 134217728, 138327168),
    (32, 16384, 64, True): (9082654336, 8841592832, 134217728, 138330944),
    (16, 16384, 128, False): (17584981504, 17318281216, 134217728, 136284832),
    (16, 16384, 128, True): (8927841248, 8797552640, 134217728, 136287424),
}
CONVERTED = (134217728, 67108864)  # filled and written, the same on every row
THREADS, REGISTER_BYTES = 256, 4
SPILLED = {(64, False): 19, (64, True): 12, (128, False): 2, (128, True): 3}  # found below


def bytes_of_launches(harness, key):
    """{launch: (filled, written)} of one head by its operations, times the heads."""
    heads, seqlen, head_dim, causal = key
    problem = Attention(heads=1, seqlen=seqlen, head_dim=head_dim, causal=causal)
    schedule = Schedule(tile=TILES[head_dim], stages=2, warps=8, spills=0)
    found = {}
    for launch in load_kernel("flash2-bwd").launches(problem, schedule, GPU):
        ops = np.concatenate([harness.count(launch, block) for block in range(launch.blocks)])
        size = ops["rows"].astype(np.int64) * ops["row_bytes"]
        filled = int(size[ops["kind"] == LOAD].sum())
        found[launch.name] = heads * filled, heads * (int(size.sum()) - filled)
    return found


@pytest.mark.parametrize("key", MEASURED, ids=str)
def test_launches_move_what_the_counters_show(harness, key):
    heads, seqlen, head_dim, causal = key
    filled, written, read, prepared = MEASURED[key]
    found = bytes_of_launches(harness, key)
    assert found["convert"] == CONVERTED
    assert found["delta"][0] == read
    # A warp has a few rows and stores 16 or 32 bytes of delta: a sector in two parts counts twice.
    assert 0 <= prepared - found["delta"][1] <= heads * seqlen * 4
    # lse and delta come to several warps, not always from L1, and spilled registers come back.
    assert 0 <= filled - found["dkdv"][0] <= 0.005 * filled
    # What is written besides is a whole number of registers of every thread of a block, once, and
    # the same at both lengths. The additions are counted by the byte.
    blocks = heads * seqlen // TILES[head_dim][1]
    besides = written - found["dkdv"][1]
    assert besides == SPILLED[head_dim, causal] * blocks * THREADS * REGISTER_BYTES
