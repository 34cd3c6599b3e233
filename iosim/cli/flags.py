"""What may be written on the command line: flags in groups, and the values that they mean.

Every value of a run is read as a tuple: one long for `analyze`, a comma list for `sweep`, so that
both ask for the same thing, a product of lists. A flag that was not given is not there at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from iosim.errors import RequestError
from iosim.units import DTYPE_BYTES, SCALED_DTYPES, parse_size, parse_tile

LARGEST = 1 << 26  # rows, keys, heads: more than that no line-by-line run finishes
LARGEST_BYTES = 1 << 40
Parse = Callable[[str, str], Any]


if TYPE_CHECKING:
    Text = click.ParamType[tuple[Any, ...]]
else:
    Text = click.ParamType  # generic for type checkers alone


class One(Text):
    """One value, as a tuple of one."""

    def __init__(self, parse: Parse, name: str) -> None:
        self.parse, self.name = parse, name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Raises RequestError for a text that means nothing here."""
        if isinstance(value, tuple):
            return value
        return (self.parse(str(value).strip(), param.opts[0] if param else self.name),)


class Many(One):
    """A comma list, as a tuple without repetitions."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Raises RequestError for a text that means nothing here, or an empty place in the list."""
        if isinstance(value, tuple):
            return value
        flag = param.opts[0] if param else self.name
        parts = [part.strip() for part in str(value).split(",")]
        if not all(parts):
            raise RequestError(f"{flag} {value!r} has an empty place in its list")
        return tuple(dict.fromkeys(self.parse(part, flag) for part in parts))


class Flag(click.Option):
    """An option that stands under a heading of the help."""

    def __init__(
        self,
        names: Sequence[str],
        heading: str,
        help: str,  # noqa: A002 the name that click gives it
        type: One | None = None,  # noqa: A002
        is_flag: bool | None = None,
    ) -> None:
        self.heading = heading
        metavar = type.name if type else None
        super().__init__(list(names), help=help, type=type, is_flag=is_flag, metavar=metavar)


class Values:
    """What was given, by the name of the flag with underscores; `command` is the whole line."""

    def __init__(self, context: click.Context) -> None:
        line = click.core.ParameterSource.COMMANDLINE
        self.command = str(context.obj or "iosim")
        self.given = {
            name: value
            for name, value in context.params.items()
            if value is not None and context.get_parameter_source(name) is line
        }

    def one(self, name: str, default: Any = None) -> Any:
        """The one value of a flag."""
        value = self.given.get(name, (default,))
        return value[0] if isinstance(value, tuple) else value

    def many(self, name: str) -> tuple[Any, ...]:
        """All values of a flag; none where it was not given."""
        value = self.given.get(name, ())
        return value if isinstance(value, tuple) else (value,)


class Command(click.Command):
    """A command whose work is done by one function of the values that were given."""

    def __init__(
        self, name: str, run: Callable[[Values], None], about: str, params: list[click.Parameter]
    ) -> None:
        self.run = run
        super().__init__(name, help=about, params=params)

    def invoke(self, ctx: click.Context) -> None:
        """Runs it."""
        self.run(Values(ctx))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The flags under their headings."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                headings.setdefault(getattr(param, "heading", "Other"), []).append(record)
        for heading, records in headings.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def between(least: int, most: int) -> Parse:
    """A whole number from `least` to `most`: `4096`, `4k`, `64MiB`."""

    def parse(text: str, flag: str) -> int:
        value = parse_size(text, flag) if not text.startswith("-") else least - 1
        if not least <= value <= most:
            raise RequestError(f"{flag} must be from {least} to {most:,}, not {text[:30]}")
        return value

    return parse


count = between(1, LARGEST)
size = between(1, LARGEST_BYTES)
whole = between(0, LARGEST)


def tile(text: str, flag: str) -> tuple[int, ...]:
    """`MxN` or `MxNxK`. Raises RequestError."""
    sides = parse_tile(text, flag)
    if not all(1 <= side <= LARGEST for side in sides):
        raise RequestError(f"{flag} must have sizes from 1 to {LARGEST:,}, not {text[:30]!r}")
    return sides


def clock(text: str, flag: str) -> float:
    """GHz as Hz. Raises RequestError."""
    try:
        value = float(text)
    except ValueError as error:
        raise RequestError(f"{flag} {text!r} is not a number of GHz, such as 1.755") from error
    if not (math.isfinite(value) and 0.01 <= value <= 100):
        raise RequestError(f"{flag} must be from 0.01 to 100 GHz, not {text}")
    return value * 1e9


def share(text: str, flag: str) -> float:
    """A number from 0 to 1. Raises RequestError."""
    try:
        value = float(text)
    except ValueError as error:
        raise RequestError(f"{flag} {text[:30]!r} is not a number from 0 to 1") from error
    if not 0 <= value <= 1:
        raise RequestError(f"{flag} must be from 0 to 1, not {text[:30]}")
    return value


def word(text: str, flag: str) -> str:
    """Any text but the empty one. Raises RequestError."""
    if not text:
        raise RequestError(f"{flag} is empty")
    return text


def path(text: str, flag: str) -> Path:
    """A path. Raises RequestError for the empty text."""
    return Path(word(text, flag))


def choice(*possible: str) -> Parse:
    """One of `possible`."""

    def parse(text: str, flag: str) -> str:
        if text not in possible:
            raise RequestError(f"{flag} must be one of {', '.join(possible)}, not {text!r}")
        return text

    return parse


def fidelity(text: str, flag: str) -> str:
    """Only `line` so far. Raises RequestError."""
    if text != "line":
        raise RequestError(f"{flag} {text!r} is not there yet (possible: line, every cache line)")
    return text


#: flag, how its text is read, what it is called in the help, its heading, what the help says
RUN_FLAGS: tuple[tuple[str, Parse, str, str, str], ...] = (
    ("--batch", count, "N", "Attention", "Batch size (1)."),
    ("--heads", count, "N", "Attention", "Query heads (16)."),
    ("--kv-heads", count, "N", "Attention", "KV heads (as many as heads)."),
    ("--seqlen", count, "N", "Attention", "Query rows (4096)."),
    ("--seqlen-k", count, "N", "Attention", "Key rows (as many as query rows)."),
    ("--head-dim", count, "N", "Attention", "Elements of a row of Q, K, V (128)."),
    ("--align", choice("bottom-right", "top-left"), "CORNER", "Attention",
     "Where a causal diagonal ends: bottom-right, top-left."),
    ("--window", whole, "W", "Attention", "Keys that a row sees, up to the diagonal (all)."),
    ("--kv-dtype", choice(*SCALED_DTYPES), "TYPE", "Attention",
     f"K and V stored with scales: {', '.join(SCALED_DTYPES)} (as --dtype, without)."),
    ("--splits", count, "N", "Decoding", "Parts of a head's keys (the kernel's own)."),
    ("--page-size", count, "N", "Decoding", "paged-decode: keys of a page (16)."),
    ("--latent-dim", count, "N", "Decoding", "mla-decode: elements of a value (512)."),
    ("--mask-block", count, "N", "Block-sparse", "Rows and keys of a block of the mask (128)."),
    ("--density", share, "SHARE", "Block-sparse", "Share of the blocks that are seen (0.25)."),
    ("--pattern-seed", whole, "N", "Block-sparse",
     "Seed of the mask or of the order of pages (1); 0: pages in order."),
    ("--rows", count, "N", "Rows", "softmax, layernorm: rows (16384)."),
    ("--cols", count, "N", "Rows", "softmax, layernorm: elements of a row (4096)."),
    ("--m", count, "N", "Matrix product", "Rows of A and C (4096)."),
    ("--n", count, "N", "Matrix product", "Columns of B and C (4096)."),
    ("--k", count, "N", "Matrix product", "Columns of A, rows of B (4096)."),
    ("--bytes", size, "SIZE", "Streams", "Bytes of the buffer (64MiB)."),
    ("--elements", size, "N", "Streams", "Elements of the buffer, instead of bytes."),
    ("--mode", choice("private", "shared"), "MODE", "Streams",
     "reread: private (own part again and again) or shared (all of it)."),
    ("--reps", count, "N", "Streams", "reread: how often (8)."),
    ("--stride", count, "N", "Streams", "strided: elements from one to the next (1)."),
    ("--dtype", choice(*DTYPE_BYTES), "TYPE", "Schedule",
     f"{', '.join(DTYPE_BYTES)} (the chip's first 16-bit type)."),
    ("--tile", tile, "MxN[xK]", "Schedule", "Query × key rows; m × n × k (the kernel's own)."),
    ("--order", choice("query", "head"), "ORDER", "Schedule",
     "Blocks of one head first (query), or one of every head (head)."),
    ("--group", count, "N", "Schedule", "gemm: tile rows launched together (8)."),
    ("--stages", count, "N", "Schedule", "Steps of the software pipeline (the kernel's own)."),
    ("--warps", count, "N", "Schedule", "Warps of a block (the kernel's own; GPU)."),
    ("--registers", count, "N", "Schedule", "Registers that a thread has (an estimate; GPU)."),
    ("--spills", whole, "N", "Schedule", "Registers of a thread that spill (an estimate; GPU)."),
    ("--cluster", count, "N", "Schedule", "Blocks that share their loads (the kernel's own; GPU)."),
    ("--variant", word, "NAME", "Schedule", "A variant of `iosim kernels NAME` (the first)."),
)  # fmt: skip


def run_flags(kind: type[One]) -> list[click.Parameter]:
    """The flags that say what is run: each one value (One) or a list (Many)."""
    flags: list[click.Parameter] = [
        Flag([name], heading, text, type=kind(parse, metavar))
        for name, parse, metavar, heading, text in RUN_FLAGS
    ]
    causal = Flag(["--causal"], "Attention", "Rows see keys up to the diagonal.", is_flag=True)
    flags.insert(6, causal)
    return flags


def chip_flags(kind: type[One]) -> list[click.Parameter]:
    """--profile, --kernel, and how it is run."""
    what, how = "What", "How it is run"
    cache = choice("cold", "warm")
    return [
        Flag(["--profile"], what, "A chip of `iosim profiles`, or FILE.toml.",
             type=kind(word, "NAME")),
        Flag(["--kernel"], what, "Kernels of `iosim kernels` (the attention forwards).",
             type=Many(word, "NAME,…")),
        Flag(["--cache"], how, "Caches at the start: cold or warm (cold).",
             type=One(cache, "STATE")),
        Flag(["--clock"], how, "Core clock (the chip's, under load).", type=One(clock, "GHZ")),
        Flag(["--fidelity"], how, "line: every cache line.", type=One(fidelity, "LEVEL")),
        Flag(["--seed"], how, "Seed of how blocks drift apart (0).", type=One(whole, "N")),
        Flag(["--seeds"], how, "Seeds from --seed on; several give a band.",
             type=One(between(1, 1000), "K")),
    ]  # fmt: skip


def output_flags(suffixes: str) -> list[click.Parameter]:
    """-o and --json."""
    return [
        Flag(["-o", "--output"], "Output", f"Also to a file, by suffix: {suffixes}.",
             type=One(path, "FILE")),
        Flag(["--json"], "Output", "JSON on stdout, and nothing else there.", is_flag=True),
    ]  # fmt: skip
