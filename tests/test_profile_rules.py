"""Damaged chip files: one line put otherwise, and the words that the refusal must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

import iosim
from iosim.errors import ProfileError
from iosim.profiles import parse_profile

PACKAGED = Path(iosim.__file__).parent / "hardware_profiles"
TEXTS = {
    name: (PACKAGED / f"{name}.toml").read_text(encoding="utf-8")
    for name in ("h200", "a100-80gb", "tpu-v4")
}


def edit(name: str, section: str, key: str, new: str | None) -> str:
    """The text of a profile with one line of one section put otherwise; None takes it away."""
    head, found, body = TEXTS[name].partition(f"{section}\n")
    lines = body.split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{key} = "))
    lines[at : at + 1] = [] if new is None else [new]
    return head + found + "\n".join(lines)


def number(key: str, value: object) -> str:
    return f'{key} = {{ value = {value}, kind = "assumed", source = "a test" }}'


L2, HBM = "[levels.l2]", "[levels.hbm]"
# profile, section, the key of the line, what stands there instead, words of the message
BAD_LINE: list[tuple[str, str, str, str | None, list[str]]] = [
    # texts and lists
    ("h200", "schema = 1", "aliases", 'aliases = "x"', ["aliases = 'x'", "must be a list of text"]),
    ("h200", "schema = 1", "aliases", "aliases = [1]", ["aliases.0 = 1", "must be text"]),
    ("h200", "schema = 1", "aliases", 'aliases = [""]', ["aliases.0 = ''", "must not be empty"]),
    ("h200", "schema = 1", "aliases", 'aliases = ["a", "a"]', ["aliases = 'a'", "must differ"]),
    ("h200", "schema = 1", "aliases", 'aliases = ["h200"]', ["aliases = 'h200'", "must differ"]),
    ("h200", "schema = 1", "aliases", "aliasses = []", ["aliasses = []", "did you mean 'aliases'"]),
    ("h200", "schema = 1", "aliases", "grid = 1", ["grid = 1", "unknown section of a gpu"]),
    ("tpu-v4", "schema = 1", "aliases", "limits = 1", ["limits = 1", "unknown section of a tpu"]),
    ("h200", "[cores]", "name", "name = 1", ["cores.name = 1", "must be text"]),
    ("h200", "[cores]", "name", None, ["cores.name is missing", "must be text"]),
    ("h200", "[[rates]]", "unit", 'unit = "matrx"', ["'matrx'", "must be one of", "mean 'matrix'"]),
    ("h200", "[[rates]]", "dtype", 'dtype = "pf16"', ["rates.0.dtype = 'pf16'", "mean 'fp16'"]),
    ("h200", "[[rates]]", "dtype", 'dtype = ""', ["rates.0.dtype = ''", "must name a dtype"]),
    ("h200", "[[rates]]", "dtype", 'dtype = "int8"', ["peaks.0.path = 'wgmma'", "needs a matrix"]),
    ("h200", L2, "managed", 'managed = "hardwired"', ["levels.l2.managed", "must be one of"]),
    ("h200", L2, "scope", 'scope = "chips"', ["levels.l2.scope", "did you mean 'chip'"]),
    ("h200", L2, "counter", 'counter = ""', ["levels.l2.counter = ''", "must not be empty"]),
    ("h200", L2, "counter", 'name = "l2"', ["levels.l2.name = 'l2'", "unknown key"]),
    ("h200", "[cores]", "clock_hz", number("clock_mhz", 1755), ["cores.clock_mhz", "'clock_hz'"]),
    # cores and limits
    ("h200", "[cores]", "clock_hz", number("clock_hz", 1755), ["cores.clock_hz = 1755", "in Hz"]),
    ("tpu-v4", "[cores]", "per_device", number("per_device", 3), ["= 3", "cores.count = 2"]),
    (
        "h200",
        "[cores]",
        "resident_speed_spread",
        number("resident_speed_spread", 5),
        ["cores.resident_speed_spread = 5", "below 1"],
    ),
    (
        "h200",
        "[limits]",
        "shared_per_block_bytes",
        number("shared_per_block_bytes", 233473),
        ["limits.shared_per_block_bytes = 233473", "must not exceed", "232448"],
    ),
    (
        "h200",
        "[limits]",
        "warps_per_block",
        number("warps_per_block", 65),
        ["limits.warps_per_block = 65", "warps_per_core = 64"],
    ),
    (
        "tpu-v4",
        "[grid]",
        "scoped_limit_bytes",
        number("scoped_limit_bytes", 16777217),
        ["grid.scoped_limit_bytes = 16777217", "levels.vmem.capacity_bytes = 16777216"],
    ),
    # rates and peaks
    ("h200", "[[peaks]]", "dtype", 'dtype = "bf16"', ["peaks.1.dtype = 'bf16'", "already"]),
    ("h200", "[[peaks]]", "dtype", 'dtype = ""', ["peaks.0.dtype = ''", "must name a dtype"]),
    ("h200", "[[peaks]]", "path", 'path = "mma"', ["peaks.0.path = 'mma'", "needs a matrix rate"]),
    (
        "h200",
        "[[peaks]]",
        "flops_per_s",
        number("flops_per_s", 1979e12),
        ["peaks.0.flops_per_s = 1979", "cores × rate", "sparsity"],
    ),
    (
        "a100-80gb",
        "[[peaks]]",
        "flops_per_s",
        number("flops_per_s", 624e12),
        ["peaks.0.flops_per_s = 624", "= 3.119e+14 within 1 %", "sparsity"],
    ),
    (
        "h200",
        "[[peaks]]",
        "flops_per_s",
        number("flops_per_s", 950e12),
        ["peaks.0.flops_per_s = 950", "= 9.894e+14 within 1 %"],
    ),
    # levels
    ("h200", L2, "partitions", number("partitions", 3), ["l2.partitions = 3", "must be 1 or 2"]),
    ("h200", L2, "scope", 'scope = "chip"', ["levels.l2.scope = 'chip'", "must be partition"]),
    ("h200", L2, "line_bytes", None, ["levels.l2.line_bytes is missing", "a cache needs it"]),
    ("h200", L2, "ways", None, ["levels.l2.ways is missing", "a cache needs it"]),
    ("h200", L2, "line_bytes", number("line_bytes", 100), ["line_bytes = 100", "power of two"]),
    ("h200", L2, "line_bytes", number("line_bytes", 16), ["line_bytes = 16", "1 to 4 sectors"]),
    ("h200", L2, "line_bytes", number("line_bytes", 256), ["line_bytes = 256", "1 to 4 sectors"]),
    ("h200", L2, "sector_bytes", number("sector_bytes", 48), ["sector_bytes = 48", "power of two"]),
    ("h200", L2, "ways", number("ways", 17), ["levels.l2.capacity_bytes = 31457280", "= 2176"]),
    ("h200", L2, "far_latency_cycles", None, ["far_latency_cycles is missing", "two partitions"]),
    (
        "h200",
        L2,
        "far_latency_cycles",
        number("far_latency_cycles", 200),
        ["levels.l2.far_latency_cycles = 200", "at least latency_cycles = 269"],
    ),
    (
        "h200",
        L2,
        "home_run_bytes",
        number("home_run_bytes", 1000),
        ["levels.l2.home_run_bytes = 1000", "a power of two, at least line_bytes = 128"],
    ),
    ("h200", L2, "managed", 'managed = "software"', ["levels.l2.line_bytes = 128", "only a cache"]),
    (
        "tpu-v4",
        "[levels.vmem]",
        "capacity_bytes",
        number("capacity_bytes", 1 << 24) + "\n" + number("partitions", 2),
        ["levels.vmem.partitions = 2", "only a cache has it"],
    ),
    ("h200", L2, "bandwidth_bytes_per_s", None, ["bandwidth_bytes_per_s is missing", "needs it"]),
    ("h200", HBM, "bandwidth_bytes_per_s", None, ["hbm.bandwidth_bytes_per_s is missing"]),
    (
        "h200",
        HBM,
        "answer_bytes",
        number("bandwidth_bytes_per_clock", 1),
        ["levels.hbm.bandwidth_bytes_per_clock = 1", "beside bandwidth_bytes_per_s"],
    ),
    (
        "h200",
        HBM,
        "sustained_bytes_per_s",
        number("sustained_bytes_per_s", 4.9e12),
        ["levels.hbm.sustained_bytes_per_s = 49", "nominal bandwidth = 4.8e+12"],
    ),
    (
        "h200",
        HBM,
        "far_miss_latency_cycles",
        number("far_miss_latency_cycles", 500),
        ["levels.hbm.far_miss_latency_cycles = 500", "latency_cycles = 563"],
    ),
    ("h200", HBM, "scope", 'scope = "core"', ["levels.hbm.scope = 'core'", "must be chip"]),
]


@pytest.mark.parametrize(("name", "section", "key", "new", "words"), BAD_LINE)
def test_bad_line(name: str, section: str, key: str, new: str | None, words: list[str]) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_profile(edit(name, section, key, new), "x.toml")
    message = str(caught.value)
    assert message.startswith("x.toml: ")
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message
