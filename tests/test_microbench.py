"""The numbers that a chip file takes from reports/h200-microbench follow from its rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iosim import load_profile

ROWS = Path(__file__).resolve().parents[1] / "reports" / "h200-microbench" / "rows.jsonl"
LONG_STEPS, SHORT_STEPS = 256, 16
COPY_CLOCK_HZ = 1.98e9  # nothing in a stream of tiles pulls the clock down
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def blocks_of_8_warps(rows: Rows) -> Rows:
    return [r for r in rows if r.get("probe") == "stream" and r["tile"] == [128, 128, 64]]


def mean(rows: Rows, field: str) -> float:
    assert rows
    return float(np.mean([row[field] for row in rows]))


def chase(rows: Rows, *, warm: int, percentile: str) -> float:
    found = [r for r in rows if r.get("probe") == "chase" and r["warm"] == warm]
    assert found
    return float(np.mean([r["percentiles"][percentile] for r in found]))


def test_spread_of_speeds(rows: Rows) -> None:
    cores = load_profile("h200").cores
    long = [r for r in blocks_of_8_warps(rows) if r["steps"] >= LONG_STEPS]
    assert cores.resident_speed_spread == pytest.approx(mean(long, "spread_within_core"), abs=6e-4)
    assert cores.core_speed_spread == pytest.approx(mean(long, "spread_between_cores"), abs=5e-4)


def test_jitter(rows: Rows) -> None:
    own = [r for r in blocks_of_8_warps(rows) if not r["shared"]]
    short = [r for r in own if r["steps"] == SHORT_STEPS]
    long = [r for r in own if r["steps"] >= LONG_STEPS]
    variance = mean(short, "spread") ** 2 - mean(long, "spread_within_core") ** 2
    cycles = mean(short, "mean_ns") * 1e-9 * COPY_CLOCK_HZ
    assert load_profile("h200").cores.jitter_cycles == pytest.approx(variance * cycles, rel=0.05)


def test_latencies(rows: Rows) -> None:
    """To 2 %: the rows hold percentiles, not the distributions whose modes the file gives."""
    chip = load_profile("h200")
    dram = chip.dram
    near, far = (chase(rows, warm=0, percentile=quartile) for quartile in ("25", "75"))
    assert dram.latency_cycles == pytest.approx(near, rel=0.005)
    assert dram.far_miss_latency_cycles == pytest.approx(far, rel=0.005)
    hit = mean([r for r in rows if r.get("probe") == "chase" and r["warm"]], "low_half_mean")
    assert chip.levels["l2"].latency_cycles == pytest.approx(hit, rel=0.005)


def test_blocks_on_a_core_follow_from_the_time_of_a_launch(rows: Rows) -> None:
    for tile, resident in (([128, 128, 64], 2), ([64, 64, 64], 6)):
        found = [r for r in rows if r.get("probe") == "stream" and r["tile"] == tile and r["dot"]]
        on_a_core = [r["blocks"] * r["mean_ns"] / r["total_ns"] / rows[0]["sms"] for r in found]
        assert resident - 1 < np.median(on_a_core) <= resident
