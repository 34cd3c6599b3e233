"""Collects: runs the probes by themselves and under the profiler, and writes one table.

On a host without a GPU, or without leave to read its counters, there is one line that says so and
the command for a host that has them.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from iosim.collect import ncu
from iosim.errors import RequestError
from iosim.report.files import require_writable, write_whole

BENCH = "iosim.collect.bench"
_FACTS = ("id", "family", "params")
_PROBE = "probe"  # the part of a row that the launch says of itself


def collect(
    output: Path,
    families: Sequence[str] = (),
    repeats: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Runs the probes of `families` (all) `repeats` times each and writes `output`.

    Returns the number of rows. Raises RequestError where this machine cannot do it, CountersError
    where the profiler gives nothing.
    """
    device = _device(families)
    require_writable(output)
    with tempfile.TemporaryDirectory() as folder:
        say(f"running the probes on {device['device']}, {repeats} times each")
        said = _bench(Path(folder), families, repeats)
        counted: list[tuple[str, dict[str, Any]]] = []
        profiler = ncu.found()
        for turn in range(repeats if profiler else 0):
            say(f"reading counters, {turn + 1} of {repeats}")
            counted += _profiled(Path(folder), families, str(profiler))
    rows = joined(said, counted)
    head = {
        **device,
        "taken": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "how": ncu.HOW if profiler else "no profiler on this machine: times only",
        "repeats": repeats,
    }
    write_whole(output, "".join(json.dumps(row) + "\n" for row in [head, *rows]))
    return len(rows)


def joined(
    said: Iterable[dict[str, Any]], counted: Iterable[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """One row per case: its counters, and under `probe` what its launches said of themselves.

    Medians over the repeats; `range` (also inside `probe`) has the least and greatest.
    """
    cases: dict[str, dict[str, Any]] = {}
    own: dict[str, list[dict[str, Any]]] = {}
    for row in said:
        cases.setdefault(row["id"], {k: row[k] for k in (*_FACTS, "error") if k in row})
        values = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        own.setdefault(row["id"], []).append(values)
    counters: dict[str, list[dict[str, Any]]] = {}
    for name, values in counted:
        counters.setdefault(name, []).append(values)
    rows = []
    for name, facts in cases.items():
        row = dict(facts)
        if name in counters:
            row.update(ncu.together(counters[name]))
        if "error" not in facts:
            row[_PROBE] = ncu.together(own[name])
        rows.append(row)
    return rows


def elsewhere(families: Sequence[str]) -> str:
    """The command for a machine that has a GPU."""
    return " ".join(["python -m iosim.collect counters.jsonl", *families])


def _device(families: Sequence[str]) -> dict[str, Any]:
    """What this machine's GPU is. Raises RequestError where there is none or no PyTorch."""
    try:
        import torch
        import triton
    except ImportError as error:
        raise RequestError(
            f"collecting needs {error.name}; on a machine with a GPU, PyTorch and Triton run: "
            f"{elsewhere(families)}"
        ) from error
    if not torch.cuda.is_available():
        raise RequestError(
            f"there is no GPU here; on a machine that has one run: {elsewhere(families)}"
        )
    p = torch.cuda.get_device_properties(0)
    return {
        "device": p.name,
        "sms": p.multi_processor_count,
        "l2_bytes": p.L2_cache_size,
        "torch": torch.__version__,
        "triton": triton.__version__,
        **_driver(),
    }


def _driver() -> dict[str, str]:
    """Driver and greatest clocks as nvidia-smi tells them; nothing where it is not there."""
    fields = {"driver": "driver_version", "max_sm": "clocks.max.sm", "max_mem": "clocks.max.mem"}
    ask = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    first = answer.stdout.splitlines()[0] if answer.stdout else ""
    return dict(zip(fields, (part.strip() for part in first.split(",")), strict=False))


def _program(rows: Path, families: Sequence[str], *flags: str) -> list[str]:
    return [sys.executable, "-m", BENCH, str(rows), *flags, *families]


def _bench(folder: Path, families: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    rows = folder / "rows.jsonl"
    run = subprocess.run(
        _program(rows, families, "--repeat", str(repeats)), capture_output=True, text=True
    )
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RequestError(f"the probes could not run: {last[0][:200]}")
    return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]


def _profiled(
    folder: Path, families: Sequence[str], profiler: str
) -> list[tuple[str, dict[str, Any]]]:
    program = _program(folder / "once.jsonl", families, "--once", "--counted")
    run = subprocess.run(ncu.command(program, profiler), capture_output=True, text=True)
    return ncu.launches(run.stdout)
