"""Counter tables as JSON lines: one kernel launch a line, the first says how they were taken."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iosim.errors import CountersError

#: what a row must hold to be of a kind
_KINDS = {
    "gpu": ("id", "family", "kernel", "params"),
    "tpu-flash": ("chip", "batch", "heads", "seqlen", "head_dim", "block_q", "block_k_major"),
    "tpu-xla": ("chip", "seqlen", "head_dim", "heads", "hbm_read_bytes"),
}

#: measured fields by kind, in the order in which they are printed
MEASURED = {
    "gpu": (
        "dram_read_bytes",
        "dram_write_bytes",
        "l1_fill_bytes",
        "l1_write_bytes",
        "l2_from_l1_bytes",
        "l2_fabric_bytes",
        "sm_cycles",
        "time_ns_cold",
    ),
    "tpu-flash": ("read_bytes", "write_bytes", "vmem_bytes"),
    "tpu-xla": ("hbm_read_bytes", "hbm_write_bytes"),
}


@dataclass(frozen=True, kw_only=True)
class CounterRow:
    """One row: `kind` (gpu, tpu-flash, tpu-xla), its id or number from 1, all its fields."""

    kind: str
    id: str | int
    fields: dict[str, Any]

    @property
    def family(self) -> str:
        """The family of the row; TPU rows form one per chip."""
        if self.kind == "gpu":
            return str(self.fields["family"])
        return f"{self.kind}/{self.fields['chip']}"

    @property
    def measured(self) -> dict[str, Any]:
        """The counters of the row that were read."""
        values = {name: self.fields.get(name) for name in MEASURED[self.kind]}
        if self.kind == "tpu-flash":
            values["fits"] = "error" not in self.fields
        return {name: value for name, value in values.items() if value is not None}

    def range_of(self, field: str) -> tuple[float, float] | None:
        """Least and greatest of the repeats of a counter, where there were any."""
        span = (self.fields.get("range") or {}).get(field)
        return (span[0], span[1]) if span else None


@dataclass(frozen=True, kw_only=True)
class CounterTable:
    """The rows of one file, in order, and what its first line says."""

    header: dict[str, Any]
    rows: tuple[CounterRow, ...]


def read_table(path: Path) -> CounterTable:
    """The counter table of a JSONL file. Raises CountersError with the line and the reason."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise CountersError(f"cannot read the counters {path}: {reason}") from error
    header: dict[str, Any] = {}
    rows: list[CounterRow] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _record(line, f"{path}, line {number}")
        kind = _kind(record)
        if kind is None and not rows and not header:
            header = record
        elif kind is None:
            raise CountersError(f"{path}, line {number}: {_missing(record)}")
        else:
            rows.append(_row(kind, record, len(rows) + 1, f"{path}, line {number}"))
    if not rows:
        raise CountersError(f"{path} holds no counter row; a row is a JSON object a line")
    return CounterTable(header=header, rows=tuple(rows))


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise CountersError(
            f"{where}: not a line of JSON ({error.msg}, column {error.colno})"
        ) from error
    if not isinstance(record, dict):
        raise CountersError(f"{where}: a row must be a JSON object, not {line.strip()[:40]!r}")
    return record


def _kind(record: dict[str, Any]) -> str | None:
    for kind, needed in _KINDS.items():
        if all(name in record for name in needed):
            return kind
    return None


def _missing(record: dict[str, Any]) -> str:
    """Which fields the nearest kind of row lacks."""
    lacks = {kind: [n for n in needed if n not in record] for kind, needed in _KINDS.items()}
    kind = min(lacks, key=lambda k: len(lacks[k]) / len(_KINDS[k]))
    return f"no counter row: {', '.join(lacks[kind])} missing (of a {kind} row)"


def _row(kind: str, record: dict[str, Any], number: int, where: str) -> CounterRow:
    row = CounterRow(kind=kind, id=record["id"] if kind == "gpu" else number, fields=record)
    if kind == "gpu" and not isinstance(record["params"], dict):
        raise CountersError(f"{where}: params must be a JSON object, not {record['params']!r}")
    for name in MEASURED[kind]:
        value = record.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CountersError(f"{where}: {name} must be a number, not {value!r}")
        if value is not None and not 0 <= value < float("inf"):
            raise CountersError(f"{where}: {name} = {value} cannot be a counter")
    return row
