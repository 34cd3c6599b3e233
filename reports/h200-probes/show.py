"""What the rows of rows.jsonl come to: the figures that the page beside this file states."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROWS = Path(__file__).with_name("rows.jsonl")


def sides(row: Row) -> tuple[int, int, int]:
    m, n, k = map(int, row["params"]["tile"].split("x"))
    return m, n, k


def flops_per_clock(row: Row, cores: int) -> float:
    m, n, k = sides(row)
    p = row["params"]
    return 2 * m * n * k * p["steps"] * p["programs"] / row["probe"]["span_cycles"] / cores


def stream_bytes_per_s(row: Row) -> float:
    m, n, k = sides(row)
    p, said = row["params"], row["probe"]
    steps = p["steps"] * (8 if p["where"] == "l2" else 1)
    return (m + n) * k * 2 * steps * said["blocks"] / said["span_ns"] * 1e9


def span(values: Iterator[float], digits: int = 0) -> str:
    found = list(values)
    return f"{min(found):,.{digits}f} to {max(found):,.{digits}f}"


def lines(cores: int, rows: list[Row]) -> Iterator[str]:
    def family(name: str) -> list[Row]:
        return [row for row in rows if row["family"] == name]

    yield f"cases: {len(rows)}, with counters: {sum('dram_read_bytes' in r for r in rows)}"
    [stored] = family("stored-then-read")
    yield f"stored-then-read: bytes that arrive at the SMs: {stored['l1_fill_bytes']}"
    half = [r for r in family("products") if r["params"]["dtype"] == "fp16"]
    groups = {
        "64 rows and columns or more": lambda m, n: m >= 64 and n >= 64,
        "64 rows or more, 32 columns": lambda m, n: m >= 64 and n == 32,
        "fewer than 64 rows": lambda m, n: m < 64,
    }
    for name, inside in groups.items():
        chosen = (flops_per_clock(r, cores) for r in half if inside(*sides(r)[:2]))
        yield f"products, fp16 flops per SM and clock, {name}: {span(chosen)}"
    for dtype in ("fp16", "bf16", "fp8", "tf32"):
        found = [r for r in family("products") if r["params"]["dtype"] == dtype]
        full = [r["probe"]["clock_hz"] / 1e9 for r in found if sides(r) == (128, 128, 64)]
        yield f"products, clock at 128 × 128 × 64, {dtype}: {span(iter(full), 2)} GHz"
    busy = family("products") + family("units")
    busy += [r for r in family("stream") if r["params"]["dot"]]
    yield f"clock with products, highest: {max(r['probe']['clock_hz'] for r in busy) / 1e9:.2f} GHz"
    idle = [r for r in family("stream") if not r["params"]["dot"]]
    best = max(r["probe"]["clock_hz"] for r in idle + family("read")) / 1e9
    yield f"clock without products, highest: {best:.2f} GHz"
    rates = [
        r["params"]["block"] * r["params"]["programs"] * r["params"]["steps"]
        / r["probe"]["span_cycles"] / cores
        for r in family("exp")
    ]  # fmt: skip
    yield f"exp, per SM and clock: {span(iter(rates), 1)}"
    for where in ("hbm", "l2"):
        fast = max(stream_bytes_per_s(r) for r in idle if r["params"]["where"] == where)
        yield f"stream without products, {where}, fastest: {fast / 1e12:.2f} TB/s"
    for reads in (0, 1):
        [row] = [
            r for r in family("mixed")
            if (r["params"]["reads"], r["params"]["writes"], r["params"]["bytes"])
            == (reads, 1, 128 << 20)
        ]  # fmt: skip
        left = (row["params"]["bytes"] - row["dram_write_bytes"]) / 1e6
        yield f"mixed, 128 MiB, {reads} read and 1 written: {left:.1f} MB more stored than drained"
    for row in family("units"):
        p = row["params"]
        if (p["tile"], p["exps"], p["adds"]) == ("128x64x64", 1, 0):
            blocks = p["programs"] // cores
            took = row["probe"]["span_cycles"] / p["steps"] / blocks
            how = "waits" if p["wait"] else "does not wait"
            yield f"units, 256 cycles of product and 512 of exp, {how}, {blocks} a core: {took:.0f}"


def main() -> None:
    head, *rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    print("\n".join(lines(head["sms"], rows)))


if __name__ == "__main__":
    main()
