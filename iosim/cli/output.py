"""stdout and stderr of a command: tables, JSON, files, progress, and a Ctrl-C that works."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from iosim.report.tables import Table, show, split

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
PIPED_WIDTH = 100
WORTH_A_BAR = 5  # runs
_ENGINES = {"gpu": ("interleave",), "tpu": ("grid",)}  # modules that compile for long
_ENGINE_SECONDS = {"interleave": 25, "grid": 5}
_KERNEL_SECONDS = 3
_WORTH_A_LINE_SECONDS = 5


def console(stderr: bool = False) -> Console:
    """A terminal of its own width, or 100 columns and no colour where nobody sees them."""
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = PIPED_WIDTH
    return out


def say(line: str) -> None:
    """One line on stderr: what is going on, never a result."""
    click.echo(line, err=True)


def print_lines(lines: Iterable[str]) -> None:
    """Plain lines on stdout, continued with an indent where they are too long."""
    for line in lines:
        inside = " " * (len(line) - len(line.lstrip()) + 2)
        for part in textwrap.wrap(line, console().width, subsequent_indent=inside) or [""]:
            click.echo(part)


def print_whole(lines: Iterable[str]) -> None:
    """Lines whose columns mean something, as they are."""
    for line in lines:
        click.echo(line)


def print_tables(tables: Iterable[Table], whole: bool = False) -> None:
    """Tables on stdout. One too wide is continued below, unless its cells may wrap.

    `whole`: a long list that somebody will cut, sort or page is never continued where it is piped.
    """
    out = console()
    for table in tables:
        if whole and not out.is_terminal:
            out.width = max(out.width, sum(table.widths) + 4 * len(table.heads))
        show([table] if table.wraps else split(table, out.width), out)


def as_json(document: Mapping[str, Any]) -> str:
    """A document as it stands in files and on stdout."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_json(document: Mapping[str, Any]) -> None:
    """A document on stdout, in UTF-8 whatever the terminal speaks."""
    click.echo(as_json(document).encode("utf-8"), nl=False)


def warn_if_cold(machines: Iterable[str], kernels: Iterable[str]) -> None:
    """Says why a run takes long that compiles what was never compiled on this machine."""
    from iosim.jit import is_cold

    engines = [name for m in machines for name in _ENGINES[m] if is_cold(name)]
    missing = [name for name in kernels if is_cold(name.replace("-", "_"))]
    seconds = sum(_ENGINE_SECONDS[name] for name in engines) + _KERNEL_SECONDS * len(missing)
    if seconds >= _WORTH_A_LINE_SECONDS:
        what = "the simulator" if engines else ", ".join(missing)
        say(f"iosim: compiling {what} for the first time on this machine (about {seconds} s, once)")


def interruptibly(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread so that Ctrl-C need not wait for compiled code."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 handed to the thread that waits
            failure.append(error)

    thread = threading.Thread(target=target, name="iosim-worker", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failure:
        raise failure[0]
    return outcome[0]


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for a long list of runs, if somebody looks; gives what to call when done."""
    if total <= WORTH_A_BAR or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """A sign of life on stderr while one long run goes on, if somebody looks."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    with console(stderr=True).status(what):
        yield
