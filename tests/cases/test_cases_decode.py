"""Cases of decoding with a right value; each test is named by its id."""

import pytest

from iosim.kernels import load_kernel
from iosim.problem import Attention, Schedule
from iosim.problem_variants import Decode
from iosim.profiles import load_profile
from iosim.simulation import simulate

H200, A100 = load_profile("h200"), load_profile("a100")


def unique_bytes(problem, names):
    launches = load_kernel("flash-decode").launches(problem, Schedule(tile=(16, 64)), H200)
    return sum({o.name: o.unique_bytes for run in launches for o in run.operands}[n] for n in names)


@pytest.mark.parametrize(
    ("batch", "seqlen_k"), [(256, 256), (64, 1024), (16, 4096), (4, 16384), (1, 65536)]
)
def test_a10_the_same_keys_and_values_whatever_the_batch(batch, seqlen_k):
    problem = Decode(batch=batch, heads=16, kv_heads=2, seqlen_k=seqlen_k, head_dim=128)
    assert unique_bytes(problem, "KV") == pytest.approx(67.1e6, rel=1e-3)
    chosen = load_kernel("flash-decode").default_schedule(problem, A100)
    first, _ = load_kernel("flash-decode").launches(problem, chosen, A100)
    assert first.blocks >= 0.8 * A100.cores.count  # the splits fill the chip


def test_a10_flash_attention_2_has_16_blocks_for_108_cores():
    problem = Attention(heads=16, kv_heads=2, seqlen=1, seqlen_k=65536, head_dim=128)
    (launch,) = load_kernel("flash2").launches(problem, Schedule(tile=(128, 64), warps=8), A100)
    assert launch.blocks == 16
    assert A100.cores.count == 108


def test_a11_keys_and_values_scale_with_kv_heads():
    size = {"heads": 32, "seqlen_k": 4096, "head_dim": 128}
    moved = {n: unique_bytes(Decode(**size, kv_heads=n), "KV") for n in (32, 8, 1)}
    assert moved[32] == 4 * moved[8] == 32 * moved[1] == 32 * 2 * 4096 * 128 * 2


def test_a5_output_does_not_grow_with_the_keys():
    size = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    short, long = (Decode(**size, seqlen_k=n) for n in (512, 4096))
    assert unique_bytes(short, "O") == unique_bytes(long, "O") == 32 * 128 * 2
    assert unique_bytes(long, "KV") == 2 * 4096 * 8 * 128 * 2


def test_b4_packing_the_group_spares_l2_and_not_hbm():
    """24 query and 4 KV heads, K and V of 42 MB: a sixth of the bytes from L2, as many from HBM."""
    size = {"heads": 24, "kv_heads": 4, "head_dim": 128, "seqlen_k": 42_000_000 // (2 * 4 * 256)}
    problem = Decode(**size)
    packed = simulate("flash-decode", problem, H200, Schedule(tile=(16, 64)))
    apart = simulate("flash2", problem, H200, Schedule(tile=(16, 64), stages=2, warps=4))
    for name in "KV":
        one, other = apart.operands[name], packed.operands[name]
        assert one.l1_fill_bytes == 6 * other.l1_fill_bytes
        assert one.dram_read_bytes == pytest.approx(other.dram_read_bytes, rel=0.01)


def test_kv_in_8_bits_halves_the_keys_and_values():
    problem = {"heads": 8, "kv_heads": 2, "seqlen_k": 4096, "head_dim": 128}
    wide, narrow = Decode(**problem), Decode(**problem, kv_dtype="fp8")
    scales = 2 * 2 * 4096 * 4
    assert unique_bytes(narrow, "KV") == unique_bytes(wide, "KV") / 2
    assert unique_bytes(narrow, ("K_scale", "V_scale")) == scales
