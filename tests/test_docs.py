"""README and docs/: their commands run, their Python runs, their links lead somewhere."""

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from iosim import load_profile
from iosim.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
REPORTS = tuple(sorted((ROOT / "reports").rglob("*.md")))
BUDGET_S = 10.0  # of one command, when everything is compiled
CI_MARKER = "<!-- ci: test command -->"
MAKE = "python3 -m venv .venv && .venv/bin/pip install --quiet"
SET_UP = (
    f"{MAKE} . && .venv/bin/iosim analyze --profile tpu-v5",
    f"{MAKE} -e '.[test]' && .venv/bin/python -m pytest -q",
)
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """One fenced block: its language, the file that it is (if any), its text."""

    language: str
    file: str
    text: str


class Command(NamedTuple):
    """One command of a page, and the lines of its output that the page shows."""

    line: str
    shown: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    found = []
    for info, text in FENCE.findall(page.read_text(encoding="utf-8")):
        language, _, file = info.strip().partition(" ")
        found.append(Block(language, file, text))
    return found


def commands(block: Block) -> Iterator[Command]:
    """Lines `iosim …`; in a console block lines `$ iosim …` with what they print, but "…"."""
    if block.language != "console":
        lines = [line for line in block.text.splitlines() if line.startswith("iosim ")]
        yield from (Command(line, ()) for line in lines)
        return
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        yield Command(line, tuple(words(s) for s in shown if words(s) not in ("", "…")))


def words(line: str) -> str:
    """A line without its spacing and rules, which the width of a column decides."""
    return " ".join(line.replace("─", "").split())


def title(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def timed(line: str) -> tuple[int, float]:
    """The exit code of a command and its CPU seconds (other tests run beside it)."""
    begun = time.process_time()
    code = main(shlex.split(line)[1:])
    return code, time.process_time() - begun


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_commands_run_and_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        for command in commands(block):
            code, took = timed(command.line)
            out, err = capsys.readouterr()
            assert code == 0, f"{command.line}\n{err}"
            if took >= BUDGET_S:  # it compiled something: the budget is for what is compiled
                _, took = timed(command.line)
                capsys.readouterr()
            assert took < BUDGET_S, f"{command.line} took {took:.1f} s"
            printed = {words(line) for line in out.splitlines()}
            missing = [line for line in command.shown if line not in printed]
            assert not missing, f"{command.line} prints no line {missing[0]!r}; it prints\n{out}"


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_python_runs(page: Path) -> None:
    for number, block in enumerate(b for b in blocks(page) if b.language == "python"):
        name = f"{title(page)}, Python block {number + 1}"
        exec(compile(block.text, name, "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", [*PAGES, *REPORTS], ids=title)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [t for t in LINK.findall(text) if not re.match(r"[a-z]+:|#", t)]
    broken = [t for t in targets if not (page.parent / t.partition("#")[0]).exists()]
    assert not broken


def test_the_readme_begins_with_the_two_set_ups() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = blocks(ROOT / "README.md")[:2]
    assert (first.text.strip(), second.text.strip()) == SET_UP
    assert f"{CI_MARKER}\n```\n{SET_UP[1]}\n```\n" in text


def test_the_example_chip_loads(tmp_path: Path) -> None:
    [example] = [b for b in blocks(ROOT / "docs" / "chips.md") if b.language == "toml"]
    path = tmp_path / example.file
    path.write_text(example.text, encoding="utf-8")
    assert load_profile(str(path)).title == "My chip"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {title(page) for page in PAGES[1:]} <= linked


def test_every_field_of_a_chip_file_is_explained() -> None:
    page = (ROOT / "docs" / "chips.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`([a-z_0-9]+)`", page))
    fields = {
        key.rpartition(".")[2] for name in ("h200", "tpu-v4") for key in load_profile(name).facts
    }
    assert fields <= words
