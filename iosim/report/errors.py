"""The tables of `validate`: errors by family and field, and why rows have no prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from iosim.report.tables import Cell, Table, cells
from iosim.report.words import percent

if TYPE_CHECKING:
    from iosim.validation.compare import Comparison, FamilyError

DEFINITION = (
    "error: distance to the range of the repeats, else to the measured value; over that value, "
    "for bytes over 1 MiB at least"
)
_GOOD, _BAD = 0.02, 0.10


def error_table(errors: Iterable[FamilyError]) -> Table:
    """One row per family and field."""
    rows, last = [], None
    for error in errors:
        family = error.family if error.family != last else ""
        last = error.family
        shares = (_toned(share) for share in (error.mean, error.p95, error.worst))
        rows.append(
            cells(
                family,
                error.field,
                f"{error.rows:,}",
                *shares,
                str(error.worst_id) if error.worst else "",
            )
        )
    return Table(
        title="",
        heads=("family", "field", "rows", "mean", "95th", "worst", "worst row"),
        rows=tuple(rows),
        align="llrrrrl",
        notes=(DEFINITION,),
    )


def _toned(share: float) -> Cell:
    return Cell(percent(share), "good" if share <= _GOOD else "bad" if share > _BAD else "plain")


def skipped_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Rows without a prediction, by reason; None where there is none."""
    reasons = Counter((c.row.family, c.skipped) for c in comparisons if c.skipped is not None)
    if not reasons:
        return None
    families: dict[str, list[str]] = {}
    totals: Counter[str] = Counter()
    for (family, reason), rows in reasons.items():
        families.setdefault(str(reason), []).append(family)
        totals[str(reason)] += rows
    rows_of = tuple(
        cells(f"{count:,}", reason, ", ".join(families[reason]))
        for reason, count in totals.most_common()
    )
    return Table(
        title="rows without a prediction",
        heads=("rows", "why", "families"),
        rows=rows_of,
        align="rll",
        wraps=(1, 2),
    )
