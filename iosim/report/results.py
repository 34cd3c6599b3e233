"""Result documents (the JSON of `analyze` and `sweep`): read and checked, and as rows of a CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from iosim.errors import RequestError
from iosim.report.tables import flat
from iosim.result import FORMAT

_RECORDS = ("problem", "tile", "compulsory", "operands")
_NOT_FLAT = frozenset({"launches", "closed_forms", "band", "tile", "operands"})


def read_document(path: Path) -> list[dict[str, Any]]:
    """The results of a document. Raises RequestError where it is none that this version reads."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(document, dict) or "format" not in document:
        raise RequestError(f"{str(path)!r} is no result of iosim: it has no format number")
    if document["format"] != FORMAT:
        raise RequestError(
            f"{str(path)!r} has format {document['format']!r}; this version reads format {FORMAT}"
        )
    results = document.get("results")
    if not isinstance(results, list) or not results:
        raise RequestError(f"{str(path)!r} holds no results; write it with iosim analyze -o")
    for number, entry in enumerate(results, 1):
        _require(entry, f"{str(path)!r}, result {number}")
    return results


def _require(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise RequestError(f"{where} is not a JSON object")
    wrong = [name for name in ("kernel", "profile") if not isinstance(entry.get(name), str)]
    wrong += [name for name in _RECORDS if not isinstance(entry.get(name), dict)]
    if entry.get("traffic") is not None and not isinstance(entry["traffic"], dict):
        wrong.append("traffic")
    if wrong:
        raise RequestError(f"{where} lacks {wrong[0]}, or it is of the wrong kind")
    numbers = [("traffic", entry["traffic"] or {})]
    numbers += [(f"operand {name}", row) for name, row in entry["operands"].items()]
    for name, record in numbers:
        if not isinstance(record, dict) or not all(_is_number(v) for v in record.values()):
            raise RequestError(f"{where}: {name} must hold numbers only")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def csv_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per result; operands and traffic as columns such as `K.dram_read_bytes`."""
    rows = []
    for entry in results:
        row = flat(entry, _NOT_FLAT)
        row["tile"] = "x".join(str(side) for side in entry["tile"].values())
        row.update(flat(entry["operands"]))
        rows.append(row)
    return rows
