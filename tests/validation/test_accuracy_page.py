"""The accuracy that the README states is the one that the report's command wrote."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def reported() -> dict[tuple[str, str], list[str]]:
    """(family, field) -> rows, mean, 95th and worst, as the report has them."""
    values, family = {}, ""
    for line in (ROOT / "reports/accuracy/h200.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[1].endswith("_bytes"):
            family = cells[0] or family
            values[family, cells[1]] = cells[2:6]
    return values


def share(text: str) -> float:
    return float(text.removesuffix("%"))


def test_the_readme_states_what_the_report_holds() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    table = page.split("<!-- accuracy -->")[1].split("<!-- /accuracy -->")[0]
    values = reported()
    stated = re.findall(r"^\| `([\w-]+)`[^|]*\|(.*)\|$", table, re.MULTILINE)
    assert len(stated) == 10
    for family, rest in stated:
        rows, read, read_95th, written, worst = (cell.strip() for cell in rest.split("|"))
        found = values[family, "dram_read_bytes"]
        assert rows == found[0]
        assert abs(share(read) - share(found[1])) <= 0.5 * 10 ** -_digits(read), family
        assert abs(share(read_95th) - share(found[2])) <= 0.5 * 10 ** -_digits(read_95th), family
        mean_written = values[family, "dram_write_bytes"][1]
        assert abs(share(written) - share(mean_written)) <= 0.5 * 10 ** -_digits(written), family
        worsts = (values[family, name][3] for name in ("l1_fill_bytes", "l1_write_bytes"))
        assert abs(share(worst) - max(map(share, worsts))) <= 0.5 * 10 ** -_digits(worst), family


def test_the_mean_over_three_families_is_stated() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"`fa2`, `gemm` and `copy` together: ([\d.]+) % of HBM reads", page)
    assert stated is not None
    found = [reported()[family, "dram_read_bytes"] for family in ("fa2", "gemm", "copy")]
    total = sum(int(rows) * share(mean) for rows, mean, *_ in found)
    assert abs(total / sum(int(rows) for rows, *_ in found) - float(stated[1])) <= 0.05


def _digits(text: str) -> int:
    return len(text.removesuffix("%").strip().partition(".")[2])
