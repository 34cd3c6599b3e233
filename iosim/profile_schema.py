"""What a chip file may hold: turns its TOML table into a Chip, or refuses it in one line.

The dataclasses of `chip` are the schema: their fields are the keys, a field without a default must
be there. `_Reader` checks one value at a time; `profile_rules` what holds between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from iosim.chip import (
    KINDS,
    MACHINES,
    SCHEMA,
    Chip,
    Cores,
    Fact,
    Grid,
    Level,
    Limits,
    Peak,
    Rate,
)
from iosim.errors import ProfileError
from iosim.profile_rules import broken_rules
from iosim.units import DTYPE_BYTES

T = TypeVar("T")

_TOP = (
    "schema", "name", "title", "machine", "aliases",
    "cores", "limits", "grid", "rates", "peaks", "levels",
)  # fmt: skip
_CHOICES = {
    "managed": ("hardware", "software"),
    "scope": ("core", "partition", "chip"),
    "unit": ("matrix", "exp", "vector"),
    "dtype": ("", *DTYPE_BYTES),
}
_TEXT = {"name", "path", "counter", *_CHOICES}
_NUMBER = 'must be { value = …, kind = "…", source = "…" }'
_OTHER = "must be a list of { value = …, source = … }"
_LARGEST = 1e30  # no chip has more of anything; keeps sums and products finite


def read_chip(table: Mapping[str, Any], source: str) -> Chip:
    """The chip that a parsed file describes; `source` names it in messages.

    Raises ProfileError: file, field, value and the rule that it breaks.
    """
    reader = _Reader(source)
    chip = reader.chip(table)
    for where, value, rule in broken_rules(chip):
        raise reader.refuse(where, value, rule)
    return chip


class _Reader:
    """Reads one file; every complaint names the file, the field, the value and the rule."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.facts: dict[str, Fact] = {}

    def refuse(self, where: str, value: object, rule: str) -> ProfileError:
        """The error for a value; None, which TOML cannot say, stands for a missing one."""
        said = "is missing" if value is None else f"= {_shown(value)}"
        return ProfileError(" ".join(f"{self.source}: {where} {said}: {rule}".splitlines()))

    def chip(self, table: Mapping[str, Any]) -> Chip:
        """The chip of the whole file; the rules between its values are not checked yet."""
        schema, machine = table.get("schema"), table.get("machine")
        if type(schema) is not int or schema != SCHEMA:
            raise self.refuse("schema", schema, f"must be {SCHEMA}")
        if machine not in MACHINES:
            raise self.refuse("machine", machine, _one_of(machine, MACHINES))
        gpu = machine == "gpu"
        foreign = "grid" if gpu else "limits"
        known = tuple(key for key in _TOP if key != foreign)
        for key in table:
            if key not in known:
                raise self.refuse(
                    key, table[key], f"unknown section of a {machine}; {_known(key, known)}"
                )
        name = self.text(table.get("name"), "name")
        return Chip(
            name=name,
            title=self.text(table.get("title"), "title"),
            machine=machine,
            aliases=self.aliases(table.get("aliases", []), name),
            cores=self.record(Cores, table.get("cores"), "cores"),
            limits=self.record(Limits, table.get("limits"), "limits") if gpu else None,
            grid=None if gpu else self.record(Grid, table.get("grid"), "grid"),
            rates=self.records(Rate, table.get("rates"), "rates"),
            peaks=self.records(Peak, table.get("peaks"), "peaks"),
            levels={
                key: self.level(value, key)
                for key, value in self.section(table.get("levels"), "levels").items()
            },
            facts=self.facts,
        )

    def aliases(self, raw: object, name: str) -> tuple[str, ...]:
        """The other names of the chip."""
        if not isinstance(raw, list):
            raise self.refuse("aliases", raw, 'must be a list of text, such as ["x"]')
        for i, alias in enumerate(raw):
            self.text(alias, f"aliases.{i}")
            if alias == name or alias in raw[:i]:
                raise self.refuse("aliases", alias, "must differ from name and from each other")
        return tuple(raw)

    def section(self, table: object, where: str) -> dict[str, Any]:
        """The table called `where`."""
        if not isinstance(table, dict):
            raise self.refuse(where, table, f"must be a table, [{where}]")
        return table

    def level(self, table: object, key: str) -> Level:
        """One memory level; its name is the key that it stands under."""
        where = f"levels.{key}"
        values = self.section(table, where)
        if "name" in values:
            raise self.refuse(f"{where}.name", values["name"], "unknown key; the section names it")
        return self.record(Level, {"name": key, **values}, where)

    def records(self, kind: type[T], tables: object, where: str) -> tuple[T, ...]:
        """A list of tables, [[where]]."""
        if not isinstance(tables, list) or not tables:
            raise self.refuse(where, tables, f"must be a list of tables, [[{where}]]")
        return tuple(self.record(kind, t, f"{where}.{i}") for i, t in enumerate(tables))

    def record(self, kind: type[T], table: object, where: str) -> T:
        """One table as the dataclass `kind`."""
        values = self.section(table, where)
        fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for key, value in values.items():
            if key not in fields:
                raise self.refuse(f"{where}.{key}", value, f"unknown key; {_known(key, fields)}")
        for key, item in fields.items():
            if key not in values and item.default is dataclasses.MISSING:
                raise self.refuse(
                    f"{where}.{key}", None, "must be text" if key in _TEXT else _NUMBER
                )
        bound = {
            key: self.text(value, f"{where}.{key}")
            if key in _TEXT
            else self.number(value, f"{where}.{key}", whole=fields[key].type == "int")
            for key, value in values.items()
        }
        return kind(**bound)

    def text(self, raw: object, where: str) -> str:
        """A text, one of those possible where the key has a fixed set of them."""
        choices = _CHOICES.get(where.rsplit(".", 1)[-1])
        if not isinstance(raw, str):
            raise self.refuse(where, raw, "must be text")
        if choices and raw not in choices:
            raise self.refuse(where, raw, _one_of(raw, choices))
        if not choices and not raw.strip():
            raise self.refuse(where, raw, "must not be empty")
        return raw

    def number(self, raw: object, where: str, *, whole: bool) -> float:
        """The value of a fact, which is kept under `where`."""
        fact = self.fact(raw, where)
        if whole and fact.value != int(fact.value):
            raise self.refuse(where, fact.value, "must be a whole number")
        self.facts[where] = fact
        return int(fact.value) if whole else float(fact.value)

    def fact(self, raw: object, where: str) -> Fact:
        """A number with its origin."""
        if not isinstance(raw, dict):
            raise self.refuse(where, raw, _NUMBER)
        for key in raw:
            if key not in ("value", "kind", "source", "other"):
                raise self.refuse(f"{where}.{key}", raw[key], f"unknown key; {_NUMBER}")
        kind, other = raw.get("kind"), raw.get("other", [])
        value = self.positive(raw.get("value"), where)
        if kind not in KINDS:
            raise self.refuse(f"{where}.kind", kind, _one_of(kind, KINDS))
        source = self.origin(raw.get("source"), f"{where}.source")
        if not isinstance(other, list):
            raise self.refuse(f"{where}.other", other, _OTHER)
        others = tuple(self.other(o, f"{where}.other.{i}") for i, o in enumerate(other))
        return Fact(value=value, kind=kind, source=source, other=others)

    def other(self, raw: object, where: str) -> tuple[float, str]:
        """What a second source says."""
        if not isinstance(raw, dict) or raw.keys() != {"value", "source"}:
            raise self.refuse(where, raw, _OTHER)
        return float(self.positive(raw["value"], where)), self.origin(
            raw["source"], f"{where}.source"
        )

    def positive(self, raw: object, where: str) -> float:
        """A number above zero; NaN, infinity and true are none."""
        if isinstance(raw, bool) or not isinstance(raw, int | float):
            raise self.refuse(where, raw, "must be a number, without quotes")
        if not 0 < raw <= _LARGEST:
            raise self.refuse(where, raw, "must be positive and finite")
        return raw

    def origin(self, raw: object, where: str) -> str:
        """The source of a number."""
        if not isinstance(raw, str) or not raw.strip():
            raise self.refuse(where, raw, "must be text that says where the number comes from")
        return raw


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of more than 4300 digits
        return "a number too long to print"
    return text if len(text) <= 80 else f"{text[:77]}…"


def _one_of(value: object, possible: Iterable[str]) -> str:
    return f"must be one of {', '.join(p or repr(p) for p in possible)}{_near(value, possible)}"


def _known(key: str, known: Iterable[str]) -> str:
    return f"known are {', '.join(known)}{_near(key, known)}"


def _near(value: object, possible: Iterable[str]) -> str:
    near = get_close_matches(value, possible, n=1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""
