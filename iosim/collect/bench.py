"""Launches the probes on the GPU of this machine and reads what they say of themselves.

    python -m iosim.collect.bench ROWS.jsonl [--repeat N] [--once] [--counted] [FAMILY …]

writes one JSON line per launch. With --once every case is launched once inside an NVTX range of its
id, for a profiler to read. Needs PyTorch and Triton.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from iosim.collect.cases import Case, probes
from iosim.collect.ncu import RANGE
from iosim.kernels.device import probes as kernels

SLOTS = 5  # numbers that a program notes: begin and end in ns and in cycles, its core
BLOCK = 4096
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "tf32": torch.float32,
}
TIMED = ("read", "private", "products", "exp", "add", "units", "stream")
Launch = Callable[[], Any]


def sides(tile: str) -> tuple[int, int, int]:
    """`64x128x64` as three numbers."""
    m, n, k = map(int, tile.split("x"))
    return m, n, k


class Bench:
    """Buffers of one GPU, and how each family of cases is launched on them."""

    def __init__(self) -> None:
        self.device = torch.cuda.get_device_properties(0)
        self.cores = self.device.multi_processor_count
        torch.manual_seed(0)
        self.big = torch.randn(3 << 29, device="cuda", dtype=torch.float16) * 0.5
        self.out = torch.zeros(1 << 29, device="cuda", dtype=torch.float16)
        self.sums = torch.zeros(1 << 20, device="cuda")
        self.times = torch.zeros(1 << 20, device="cuda", dtype=torch.int64)
        self.took = torch.zeros(1 << 17, device="cuda", dtype=torch.int32)
        self.chains: dict[int, tuple[torch.Tensor, int]] = {}

    def launch(self, case: Case) -> Launch:
        """What launches `case` once."""
        make: Callable[[dict[str, Any]], Launch] = getattr(self, case.family.replace("-", "_"))
        return make(dict(case.params))

    def chase(self, p: dict[str, Any]) -> Launch:
        """A chain through `bytes` of lines in random order, and loaders beside it."""
        following, start = self.chain(max(p["bytes"], 4096))
        mode = 0 if not p["bytes"] else 1 if p["cached"] else 2
        wrap = (self.big.numel() if p["load"] == "hbm" else 8 << 20) // BLOCK
        rounds = 4000 if p["loaders"] else 0
        return lambda: kernels.chase[(1 + p["loaders"],)](
            following, self.times, self.took, self.big, start, p["steps"], rounds, wrap, mode,
            BLOCK, num_warps=8 if p["loaders"] else 1,
        )  # fmt: skip

    def chain(self, size_bytes: int) -> tuple[torch.Tensor, int]:
        """Lines in random order, each naming the next, and where to begin."""
        if size_bytes not in self.chains:
            lines = size_bytes // 128
            order = np.random.default_rng(0).permutation(lines)
            following = np.zeros(lines * 32, dtype=np.int32)
            following[order * 32] = np.roll(order, -1) * 32
            self.chains[size_bytes] = (torch.from_numpy(following).cuda(), int(order[0] * 32))
        return self.chains[size_bytes]

    def read(self, p: dict[str, Any]) -> Launch:
        """A buffer read past L1."""
        span = p["bytes"] // 2 // BLOCK * BLOCK
        steps = p["moved"] // (p["programs"] * BLOCK * 2)
        return lambda: kernels.read[(p["programs"],)](
            self.big, self.sums, self.times, span, steps, p["own"], BLOCK, num_warps=8
        )

    def private(self, p: dict[str, Any]) -> Launch:
        """Own bytes through L1 again and again."""
        return lambda: kernels.private[(p["programs"],)](
            self.big, self.sums, self.times, p["bytes"] // 2, p["reps"], BLOCK, num_warps=8
        )

    def mixed(self, p: dict[str, Any]) -> Launch:
        """Streams read and written."""
        n = p["bytes"] // 2
        return lambda: kernels.mixed[(n // BLOCK,)](
            self.big, self.out, n, p["reads"], p["writes"], BLOCK, num_warps=8
        )

    def stored_then_read(self, p: dict[str, Any]) -> Launch:
        """A block that is written and read again."""
        return lambda: kernels.stored_then_read[(p["programs"],)](
            self.out, self.sums, p["reps"], p["bytes"] // 2, num_warps=8
        )

    def products(self, p: dict[str, Any]) -> Launch:
        """Products of tiles that stay on chip."""
        x = self.big[: 1 << 16].to(DTYPES[p["dtype"]])
        return lambda: kernels.products[(p["programs"],)](
            x, self.sums, self.times, p["steps"], *sides(p["tile"]), num_warps=p["warps"]
        )

    def exp(self, p: dict[str, Any]) -> Launch:
        """Exponentials."""
        return self._lanes(kernels.exponentials, p)

    def add(self, p: dict[str, Any]) -> Launch:
        """Multiply-adds."""
        return self._lanes(kernels.additions, p)

    def _lanes(self, kernel: Any, p: dict[str, Any]) -> Launch:
        return lambda: kernel[(p["programs"],)](
            self.big, self.sums, self.times, p["steps"], p["block"], num_warps=p["warps"]
        )

    def units(self, p: dict[str, Any]) -> Launch:
        """A product, exponentials and additions."""
        return lambda: kernels.units[(p["programs"],)](
            self.big, self.sums, self.times, p["steps"], p["exps"], p["adds"], bool(p["wait"]),
            *sides(p["tile"]), num_warps=p["warps"],
        )  # fmt: skip

    def stream(self, p: dict[str, Any]) -> Launch:
        """Tiles from memory, with products or without."""
        m, n, k = sides(p["tile"])
        size = (m + n) * k
        programs, steps = stream_blocks(p), p["steps"] * (8 if p["where"] == "l2" else 1)
        span = size * (self.big.numel() // programs // size if p["where"] == "hbm" else 4)
        return lambda: kernels.stream[(programs,)](
            self.big, self.sums, self.times, steps, span, int(p["where"] == "shared"),
            bool(p["dot"]), bool(p["wait"]), m, n, k,
            num_warps=p["warps"], num_stages=p["stages"],
        )  # fmt: skip

    def empty(self, p: dict[str, Any]) -> Launch:
        """Blocks that do nothing."""
        return lambda: kernels.empty[(p["programs"],)](self.sums, num_warps=p["warps"])

    def prepare(self, case: Case, repeat: int) -> None:
        """Caches as the case wants them: its chain in L2 where that is asked for, else flushed."""
        self.out.view(torch.int32)[: 1 << 26].fill_(repeat)
        if case.family == "chase" and case.params["bytes"] <= 32 << 20:
            self.chain(max(case.params["bytes"], 4096))[0].sum()
        torch.cuda.synchronize()

    def measure(self, case: Case, run: Launch, repeat: int) -> dict[str, Any]:
        """One launch: what it says of itself."""
        self.prepare(case, repeat)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        said: dict[str, Any] = {"id": case.id, "family": case.family, "params": dict(case.params)}
        said["event_ns"] = int(begin.elapsed_time(end) * 1e6)
        if case.family == "chase":
            said.update(latencies(self.took[: case.params["steps"]].cpu().numpy()))
        elif case.family in TIMED:
            programs = stream_blocks(dict(case.params))
            rows = self.times[: programs * SLOTS].cpu().numpy().reshape(-1, SLOTS)
            said.update(blocks(rows))
        return said


def stream_blocks(p: dict[str, Any]) -> int:
    """Blocks of a launch: those that read L2-resident tiles are fewer and longer."""
    programs = int(p["programs"])
    return programs // 8 if p.get("where") == "l2" else programs


def latencies(took: Any) -> dict[str, Any]:
    """Cycles of dependent loads, the first eighth left out: mean, and of either half."""
    took = np.sort(took[len(took) // 8 :])
    middle = (np.percentile(took, 5) + np.percentile(took, 95)) / 2
    near, far = took[took < middle], took[took >= middle]
    return {
        "mean_cycles": float(took.mean()),
        "near_cycles": float(near.mean() if near.size else took.mean()),
        "far_cycles": float(far.mean() if far.size else took.mean()),
    }


def blocks(rows: Any) -> dict[str, Any]:
    """What the notes of all programs come to: times, the clock, how unequal they are."""
    cycles = (rows[:, 3] - rows[:, 2]).astype(float)
    took_ns = (rows[:, 1] - rows[:, 0]).astype(float)
    order = np.argsort(rows[:, 0])
    cut = len(order) // 8
    steady = order[cut : len(order) - cut]
    relative, core = cycles[steady] / cycles[steady].mean(), rows[steady, 4]
    means = {c: relative[core == c].mean() for c in np.unique(core)}
    inside = np.array([r - means[c] for r, c in zip(relative, core, strict=True)])
    on_core = [rows[rows[:, 4] == c] for c in np.unique(rows[:, 4])]
    return {
        "blocks": len(rows),
        "block_cycles": float(cycles.mean()),
        "block_ns": float(took_ns.mean()),
        "span_ns": float(rows[:, 1].max() - rows[:, 0].min()),
        "span_cycles": float(max(c[:, 3].max() - c[:, 2].min() for c in on_core)),
        "clock_hz": 1e9 * float(cycles.sum() / max(1.0, took_ns.sum())),
        "spread_within_core": float(inside.std()),
        "spread_between_cores": float(np.std(list(means.values()))),
    }


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description="Launches probes; one JSON line each.")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="once, in NVTX ranges")
    parser.add_argument("--counted", action="store_true", help="only cases for a profiler")
    parser.add_argument("family", nargs="*")
    asked = parser.parse_intermixed_args()
    bench = Bench()
    with asked.rows.open("w", encoding="utf-8") as out:
        for case in probes(bench.cores):
            if (asked.family and case.family not in asked.family) or (
                asked.counted and not case.counted
            ):
                continue
            for row in rows_of(bench, case, asked.repeat, asked.once):
                out.write(json.dumps(row) + "\n")
                out.flush()


def rows_of(bench: Bench, case: Case, repeats: int, once: bool) -> list[dict[str, Any]]:
    """The launches of one case, after one that compiles; a case that cannot run says why."""
    try:
        run = bench.launch(case)
        run()
        torch.cuda.synchronize()
    except (RuntimeError, ValueError, triton.TritonError) as error:
        return [{"id": case.id, "family": case.family, "error": str(error)[:200]}]
    if not once:
        return [bench.measure(case, run, repeat) for repeat in range(repeats)]
    torch.cuda.nvtx.range_push(RANGE + case.id)
    run()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_pop()
    return []


if __name__ == "__main__":
    main()
