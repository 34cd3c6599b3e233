"""Predicted beside measured, row by row, and the errors by family and level."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from iosim.chip import Chip
from iosim.counters.table import CounterRow, read_table
from iosim.errors import IosimError
from iosim.result import FORMAT, Result
from iosim.simulation import simulate
from iosim.traffic import FIELDS
from iosim.validation.requests import chip_of, request_of

_LEAST_BYTES = 1 << 20  # errors of smaller counters are taken over this


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row: what was measured, what is predicted, or why there is no prediction."""

    row: CounterRow
    predicted: dict[str, Any] | None
    skipped: str | None

    def error(self, field: str) -> float | None:
        """Error of one field as a share; 1 without a prediction, None where it was not measured.

        Distance to the range of the repeats if there is one, else to the value; over the value,
        for bytes over 1 MiB at least.
        """
        measured = self.row.measured.get(field)
        if measured is None:
            return None
        value = (self.predicted or {}).get(field)
        if value is None:
            return 1.0
        if isinstance(measured, bool):
            return float(value is not measured)
        low, high = self.row.range_of(field) or (measured, measured)
        distance = float(max(low - value, value - high, 0))
        if field.endswith("_bytes"):
            return distance / max(float(measured), _LEAST_BYTES)
        return distance / float(measured)

    def as_json(self) -> dict[str, Any]:
        """The row of the JSON document."""
        return {
            "id": self.row.id,
            "family": self.row.family,
            "kernel": str(self.row.fields.get("kernel", "")),
            "measured": self.row.measured,
            "predicted": self.predicted,
            "skipped": self.skipped,
        }


@dataclass(frozen=True, kw_only=True)
class FamilyError:
    """Errors of one field over the predicted rows of a family, as shares."""

    family: str
    field: str
    rows: int
    mean: float
    p95: float
    worst: float
    worst_id: str | int


def validate(
    path: Path,
    chip: Chip | None = None,
    *,
    families: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    progress: Callable[[int, int], None] | None = None,
) -> list[Comparison]:
    """Predicts every row of a counter file; `chip` is the one of rows that do not name theirs.

    `families` restricts the work: other rows are skipped. `progress` is told (done, of how many).
    Raises CountersError for a file that cannot be read.
    """
    rows = read_table(path).rows
    done = 0

    def one(row: CounterRow) -> Comparison:
        if families and row.family not in families:
            return Comparison(row=row, predicted=None, skipped="not asked for")
        return _compare(row, chip, seeds)

    results = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for comparison in pool.map(one, rows):
            results.append(comparison)
            done += 1
            if progress:
                progress(done, len(rows))
    return results


def family_errors(comparisons: Iterable[Comparison]) -> list[FamilyError]:
    """Mean, 95th percentile and worst error by family and field, over rows with a prediction."""
    groups: dict[tuple[str, str], list[tuple[float, str | int]]] = {}
    for comparison in comparisons:
        for field in comparison.predicted or {}:
            error = comparison.error(field)
            if error is not None:
                key = (comparison.row.family, field)
                groups.setdefault(key, []).append((error, comparison.row.id))
    return [
        FamilyError(
            family=family,
            field=field,
            rows=len(errors),
            mean=float(np.mean([e for e, _ in errors])),
            p95=float(np.percentile([e for e, _ in errors], 95)),
            worst=max(errors, key=lambda pair: pair[0])[0],
            worst_id=max(errors, key=lambda pair: pair[0])[1],
        )
        for (family, field), errors in groups.items()
    ]


def document(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The JSON document of a validation: one entry per row, in order."""
    return {"format": FORMAT, "rows": [comparison.as_json() for comparison in comparisons]}


def _compare(row: CounterRow, chip: Chip | None, seeds: Sequence[int]) -> Comparison:
    request = request_of(row, chip)
    if isinstance(request, str):
        return Comparison(row=row, predicted=None, skipped=request)
    try:
        target = chip_of(row, chip)
        assert target is not None
        result = simulate(
            request.kernel,
            request.problem,
            target,
            request.schedule,
            seeds=seeds,
            only=request.launch,
        )
    except IosimError as error:
        return Comparison(row=row, predicted=None, skipped=str(error))
    if row.kind == "gpu" and not result.fits:
        return Comparison(row=row, predicted=None, skipped=result.why_not)
    return Comparison(row=row, predicted=_predicted(row, result), skipped=None)


def _predicted(row: CounterRow, result: Result) -> dict[str, Any]:
    """The predicted fields of a row, by the names of its kind."""
    if row.kind == "tpu-flash":
        fits = {"fits": result.fits, "vmem_bytes": result.footprint_bytes}
        if not result.fits:
            return fits
        traffic = result.traffic
        return {
            "read_bytes": traffic.dram_read_bytes,
            "write_bytes": traffic.dram_write_bytes,
            **fits,
        }
    names = [name for name in FIELDS["gpu"] if name != "dirty_left_bytes"]
    values: dict[str, Any] = {name: getattr(result.traffic, name) for name in names}
    return {**values, "band": {name: list(span) for name, span in result.band.items()}}
