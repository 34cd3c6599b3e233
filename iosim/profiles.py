"""Chip files: found by name, alias or path, and read; `profile_schema` says what they may hold."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from iosim.chip import Chip
from iosim.errors import ProfileError, unknown_name
from iosim.profile_schema import read_chip

_SUFFIX = ".toml"


@cache
def profile_names() -> tuple[str, ...]:
    """The names of the chips that come with the package, in order."""
    found = (p.name for p in (files("iosim") / "hardware_profiles").iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)))


def load_profile(name: str) -> Chip:
    """The chip called `name`: a profile of the package, an alias, or a path to a TOML file.

    Raises RequestError for an unknown name, ProfileError for a file that breaks a rule.
    """
    if name.endswith(_SUFFIX) or "/" in name:
        return read_profile(Path(name))
    if name in profile_names():
        return _packaged(name)
    aliases = _aliases()
    if name in aliases:
        return _packaged(aliases[name])
    raise unknown_name("profile", name, (*profile_names(), *aliases))


def read_profile(path: Path) -> Chip:
    """The chip of a user's own file. Raises ProfileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _refused(f"cannot read the profile {path}: it is not UTF-8 text") from error
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise _refused(f"cannot read the profile {path}: {reason}") from error
    return parse_profile(text, str(path))


def parse_profile(text: str, source: str) -> Chip:
    """The chip that the TOML `text` describes; `source` names it in messages.

    Raises ProfileError.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise _refused(f"{source}: not valid TOML: nested too deeply") from error
    except ValueError as error:  # a TOMLDecodeError, or a number with thousands of digits
        raise _refused(f"{source}: not valid TOML: {error}") from error
    return read_chip(table, source)


def alias_table(chips: Iterable[Chip]) -> Mapping[str, str]:
    """The chip that each alias of `chips` means.

    Raises ProfileError where an alias is the name of a chip or stands in two files.
    """
    chips = tuple(chips)
    names = {chip.name for chip in chips}
    meaning: dict[str, str] = {}
    for chip in chips:
        for alias in chip.aliases:
            if alias in names or alias in meaning:
                taken = "the name of a profile" if alias in names else f"of {meaning[alias]}"
                raise _refused(f"{chip.name}{_SUFFIX}: aliases = {alias!r}: is already {taken}")
            meaning[alias] = chip.name
    return meaning


@cache
def _packaged(name: str) -> Chip:
    file = files("iosim") / "hardware_profiles" / f"{name}{_SUFFIX}"
    chip = parse_profile(file.read_text(encoding="utf-8"), file.name)
    if chip.name != name:
        raise _refused(
            f"{file.name}: name = {chip.name!r}: must be {name!r}, as the file is called"
        )
    return chip


@cache
def _aliases() -> Mapping[str, str]:
    return alias_table(_packaged(name) for name in profile_names())


def _refused(message: str) -> ProfileError:
    return ProfileError(" ".join(message.splitlines()))
