"""Tables apart from what they say."""

import csv

import pytest
from rich.console import Console

from iosim.report.tables import Cell, Table, as_csv, as_markdown, cells, flat, show, split
from iosim.report.words import percent, ratio, seconds

TABLE = Table(
    title="things",
    heads=("", *(f"column {i}" for i in range(6))),
    rows=(
        (Cell("a heading", "strong"),),
        cells("first", *(f"{i},000 MB" for i in range(6))),
        cells(Cell("second", "faint"), *("–" for _ in range(6))),
    ),
    align="l" + "r" * 6,
    notes=("a note",),
)


@pytest.mark.parametrize("width", [30, 40, 80, 100])
def test_pieces_fit_the_width_and_lose_nothing(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    show(split(TABLE, width), Console(width=width))
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= width
    assert "…" not in out
    for i in range(6):
        assert f"{i},000 MB" in out


def test_a_table_that_fits_is_not_cut() -> None:
    assert split(TABLE, 100) == [TABLE]
    assert all(piece.heads[0] == "" for piece in split(TABLE, 40))


def test_markdown() -> None:
    text = as_markdown([TABLE])
    assert text.startswith("**things**\n\n|  | column 0 |")
    assert "| **a heading** |  |" in text
    assert text.endswith("a note\n")
    assert as_markdown(
        [Table(title="", heads=("a|b", ""), rows=(cells("x\ny", "z"),), align="lr")]
    ) == ("| a\\|b |  |\n| --- | ---: |\n| x y | z |\n")


def test_csv_holds_the_columns_of_all_rows() -> None:
    text = as_csv([{"a": 1, "b": "x,y"}, {"b": 'q"', "c": None}])
    assert list(csv.DictReader(text.splitlines())) == [
        {"a": "1", "b": "x,y", "c": ""},
        {"a": "", "b": 'q"', "c": ""},
    ]


def test_flat() -> None:
    record = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": [1], "g": None}
    assert flat(record) == {"a": 1, "b.c": 2, "b.d.e": 3, "g": None}


def test_words() -> None:
    ratios = ["1.00 ×", "1.65 ×", "12.3 ×", "1,234 ×"]
    assert [ratio(v, 100) for v in (100, 165, 1234, 123400)] == ratios
    assert ratio(1, 0) == "–"
    percents = ["0 %", "0.04 %", "3.1 %", "100 %", "200 %"]
    assert [percent(v) for v in (0, 0.0004, 0.031, 1, 2)] == percents
    assert [seconds(v) for v in (179e-6, 1.24e-3, 2, 5e-9)] == ["179 µs", "1.24 ms", "2 s", "5 ns"]
