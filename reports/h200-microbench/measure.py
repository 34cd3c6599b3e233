"""Latencies and the spread of block speeds of the GPU in this machine, as JSON lines on stdout.

Needs NumPy, PyTorch, Triton and CuPy. Nothing here runs an attention or a GEMM: the probes stream
L2-resident tiles, with and without matrix products, and note when every block began and ended.
"""

import json
import sys

import cupy as cp
import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

CHASE = r"""
extern "C" __global__ void chase(const unsigned* next, unsigned start, int steps, unsigned* took,
                                 unsigned* at) {
    unsigned p = start;
    for (int i = 0; i < steps; i++) {
        unsigned t0 = clock();
        p = __ldcg(next + p);
        asm volatile("" :: "r"(p) : "memory");
        unsigned q = p + 1;
        asm volatile("add.u32 %0, %0, 0;" : "+r"(q));
        took[i] = clock() - t0;
        at[i] = q;
    }
}
"""


def emit(**record):
    print(json.dumps(record), flush=True)


def chase(footprint_bytes, steps, warm):
    """Latency of dependent loads over lines in random order, in cycles (percentiles)."""
    lines = footprint_bytes // 128
    order = np.random.default_rng(0).permutation(lines)
    following = np.zeros(lines * 32, dtype=np.uint32)
    following[order * 32] = np.roll(order, -1) * 32
    next_ = cp.asarray(following)
    took = cp.zeros(steps, dtype=cp.uint32)
    at = cp.zeros(steps, dtype=cp.uint32)
    kernel = cp.RawKernel(CHASE, "chase")
    start = int(order[0] * 32)
    for _ in range(1 + warm):
        kernel((1,), (1,), (next_, np.uint32(start), np.int32(steps), took, at))
    values = np.sort(took.get()[steps // 8 :])
    points = {str(q): int(np.percentile(values, q)) for q in (1, 10, 25, 50, 75, 90, 99)}
    middle = (np.percentile(values, 5) + np.percentile(values, 95)) / 2
    emit(
        probe="chase",
        footprint_bytes=footprint_bytes,
        warm=warm,
        mean=float(values.mean()),
        low_half_mean=float(values[values < middle].mean()),
        high_half_mean=float(values[values >= middle].mean()),
        percentiles=points,
    )


@triton.jit
def k_probe(
    X,
    Y,
    T,
    steps,
    span,
    step_elements,
    shared,
    DOT: tl.constexpr,
    WAIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Streams `span` elements of an L2-resident buffer again and again, `steps` tiles in all."""
    pid = tl.program_id(0)
    begin = globaltimer()
    om = tl.arange(0, BM)
    on = tl.arange(0, BN)
    ok = tl.arange(0, BK)
    base = tl.where(shared != 0, 0, pid % 264) * span
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for s in range(steps):
        off = base + (s * step_elements) % span
        a = tl.load(X + off + om[:, None] * BK + ok[None, :])
        b = tl.load(X + off + BM * BK + ok[:, None] * BN + on[None, :])
        if WAIT:
            acc = acc * 0.5 + tl.exp2(tl.dot(a, b))
        elif DOT:
            acc += tl.dot(a, b)
        else:
            acc += tl.sum(a.to(tl.float32)) + tl.sum(b.to(tl.float32))
    end = globaltimer()
    tl.store(Y + pid, tl.sum(acc))
    tl.store(T + pid * 3, begin)
    tl.store(T + pid * 3 + 1, end)
    tl.store(T + pid * 3 + 2, smid().to(tl.int64))


@triton.jit
def k_compute(X, Y, T, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Matrix products of two tiles that stay on chip."""
    pid = tl.program_id(0)
    a = tl.load(X + tl.arange(0, BM)[:, None] * BK + tl.arange(0, BK)[None, :])
    b = tl.load(X + tl.arange(0, BK)[:, None] * BN + tl.arange(0, BN)[None, :])
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    begin = globaltimer()
    for _ in range(steps):
        acc = tl.dot(a, b, acc)
    end = globaltimer()
    tl.store(Y + pid, tl.sum(acc))
    tl.store(T + pid * 3, begin)
    tl.store(T + pid * 3 + 1, end)
    tl.store(T + pid * 3 + 2, smid().to(tl.int64))


def spread(name, times, blocks, **facts):
    """Emits how much the durations of equal blocks differ, within a core and between cores."""
    t = times.cpu().numpy().reshape(-1, 3)
    took = (t[:, 1] - t[:, 0]).astype(float)
    steady = np.argsort(t[:, 0])[264 : blocks - 264]
    core = t[steady, 2]
    rel = took[steady] / took[steady].mean()
    means = np.array([rel[core == c].mean() for c in np.unique(core)])
    inside = np.array(
        [rel[i] - means[np.searchsorted(np.unique(core), core[i])] for i in range(len(rel))]
    )
    emit(
        probe=name,
        blocks=blocks,
        mean_ns=float(took[steady].mean()),
        spread=float(rel.std()),
        spread_between_cores=float(means.std()),
        spread_within_core=float(inside.std()),
        percentiles={str(q): float(np.percentile(rel, q)) for q in (1, 10, 50, 90, 99)},
        total_ns=int(t[:, 1].max() - t[:, 0].min()),
        **facts,
    )


def main():
    p = torch.cuda.get_device_properties(0)
    emit(
        device=p.name,
        sms=p.multi_processor_count,
        torch=torch.__version__,
        triton=triton.__version__,
    )
    x = (torch.randn(64 << 20, device="cuda") * 0.01).half()
    if sys.argv[1:] == ["wait"]:
        waits(x)
        return
    for footprint, steps, warm in (
        (4 << 20, 20000, 1),
        (16 << 20, 60000, 1),
        (28 << 20, 120000, 1),
        (1 << 30, 60000, 0),
    ):
        for _ in range(2):
            chase(footprint, steps, warm)
    shapes = ((True, 128, 128, 64, 8, 3), (True, 64, 64, 64, 4, 3), (False, 64, 64, 64, 4, 3))
    for repeat in range(3):
        for steps in (16, 32, 64, 128, 256, 512, 1024):
            for dot, bm, bn, bk, warps, stages in shapes:
                for shared in (0, 1):
                    stream(x, dot, False, bm, bn, bk, warps, stages, shared, steps, repeat)
        for bm, bn, warps in ((128, 128, 8), (64, 64, 4)):
            blocks = 264 * 8
            y = torch.zeros(blocks, device="cuda")
            t = torch.zeros(blocks * 3, dtype=torch.int64, device="cuda")
            k_compute[(blocks,)](x, y, t, 512, bm, bn, 64, num_warps=warps)
            torch.cuda.synchronize()
            spread("compute", t, blocks, tile=[bm, bn, 64], warps=warps, repeat=repeat)


def waits(x):
    """Does it matter whether a block waits for every product? The same stream, both ways."""
    for repeat in range(3):
        for wait in (True, False):
            for bm, bn, bk, warps, stages in (
                (128, 128, 64, 8, 3),
                (128, 64, 64, 8, 2),
                (64, 64, 64, 4, 2),
                (64, 64, 64, 4, 3),
                (64, 64, 32, 4, 3),
                (64, 128, 64, 4, 2),
            ):
                for shared in (0, 1):
                    for steps in (64, 256):
                        stream(x, True, wait, bm, bn, bk, warps, stages, shared, steps, repeat)


def stream(x, dot, wait, bm, bn, bk, warps, stages, shared, steps, repeat):
    """One launch of the streaming probe, after one to warm up."""
    blocks = 264 * 8
    y = torch.zeros(blocks, device="cuda")
    t = torch.zeros(blocks * 3, dtype=torch.int64, device="cuda")
    tile = (bm + bn) * bk
    for _ in range(2):
        k_probe[(blocks,)](
            x,
            y,
            t,
            steps,
            4 * tile,
            tile,
            shared,
            dot,
            wait,
            bm,
            bn,
            bk,
            num_warps=warps,
            num_stages=stages,
        )
    torch.cuda.synchronize()
    spread(
        "stream",
        t,
        blocks,
        dot=dot,
        wait=wait,
        tile=[bm, bn, bk],
        warps=warps,
        stages=stages,
        steps=steps,
        shared=bool(shared),
        repeat=repeat,
        fill_bytes=blocks * steps * tile * 2,
    )


if __name__ == "__main__":
    main()
