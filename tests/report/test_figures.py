"""The figure of a sweep: what is drawn, not how it looks."""

import re

import pytest

from iosim.kernels import load_kernel
from iosim.profiles import load_profile
from iosim.report.figures import ordered_tiles, series_of, traffic_by_tile
from iosim.result import Result
from iosim.study.sweep import How, points, run

TILES = ((256, 256), (128, 128), (4096, 4096), (512, 512))


@pytest.fixture(scope="module")
def results() -> list[Result]:
    axes = {"heads": (2,), "seqlen": (1024, 2048), "tile": TILES}
    return run(points([load_kernel("flash2")], [load_profile("tpu-v5e")], axes), How())


def drawn(results: list[Result], suffix: str) -> bytes:
    return traffic_by_tile(
        results, ("seqlen",), "cold", title="Title\nmore", footer="by whom " * 60, suffix=suffix
    )


def test_tiles_stand_by_what_they_need(results: list[Result]) -> None:
    assert ordered_tiles(results) == sorted(TILES)


def test_one_line_per_problem(results: list[Result]) -> None:
    series = series_of(results, ("seqlen",))
    assert [line.label for line in series] == ["seqlen 1,024", "seqlen 2,048"]
    assert all(len(line.results) == 4 for line in series)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_equal_figures_are_equal_files(suffix: str, results: list[Result]) -> None:
    first = drawn(results, suffix)
    assert first == drawn(results, suffix)
    assert first.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_what_is_written_into_it(results: list[Result]) -> None:
    text = drawn(results, ".svg").decode()
    said = " ".join(re.findall(r"<!-- (.*?) -->", text))
    for words in ("Title", "compulsory", "does not fit", "limit 16 MiB", "128x128", "by whom"):
        assert words in said


def test_one_tile_alone(results: list[Result]) -> None:
    assert drawn([r for r in results if r.schedule.tile == (256, 256)], ".png")


def test_nothing_that_fits(results: list[Result]) -> None:
    assert drawn([r for r in results if not r.fits], ".png")
