"""Every error that iosim raises on purpose, and nothing else.

    IosimError                       caught by the command line: one line, exit code 2
    ├── RequestError                 the request cannot be met (a size, a flag, a name)
    │   └── DoesNotFitError          the block does not fit the chip
    ├── ProfileError                 a chip file breaks a rule of the schema
    ├── CountersError                a counter file cannot be read or cannot be trusted
    └── MissingExtraError            an optional package is not installed

A message is one line: what was asked, what is possible, what to change.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class IosimError(Exception):
    """Base of every error raised on purpose; its text is one line for a person."""


class RequestError(IosimError):
    """The request itself cannot be met."""


class DoesNotFitError(RequestError):
    """A block needs more on-chip memory, registers or warps than the chip offers."""


class ProfileError(IosimError):
    """A chip file is wrong: names the file, the field, the value and the rule it breaks."""


class CountersError(IosimError):
    """A counter file cannot be read, or holds values that no chip can produce."""


class MissingExtraError(IosimError):
    """An optional package is needed for what was asked."""


def unknown_name(what: str, name: str, possible: Iterable[str]) -> RequestError:
    """The error for a name that is not in `possible`, with the nearest match if one is near."""
    names = sorted(possible)
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return RequestError(f"unknown {what} {name!r}{hint} (possible: {', '.join(names)})")
