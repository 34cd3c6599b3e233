"""Chip files: every packaged one loads, and every damaged one is refused in one clear line."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import iosim
from iosim.chip import KINDS, Chip
from iosim.errors import ProfileError, RequestError
from iosim.profile_schema import read_chip
from iosim.profiles import alias_table, load_profile, parse_profile, profile_names, read_profile

PACKAGED = Path(iosim.__file__).parent / "hardware_profiles"
NAMES = (
    "a100-40gb",
    "a100-80gb",
    "h100-pcie",
    "h100-sxm",
    "h200",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
)
TEXTS = {name: (PACKAGED / f"{name}.toml").read_text(encoding="utf-8") for name in NAMES}
TABLES = {name: tomllib.loads(text) for name, text in TEXTS.items()}


def refusal(text: str) -> str:
    """The message with which the file `x.toml` holding `text` is refused: always one line."""
    with pytest.raises(ProfileError) as caught:
        parse_profile(text, "x.toml")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith("x.toml: ")
    return message


def fact_paths(table: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the numbers of a parsed file stand."""
    items = table.items() if isinstance(table, dict) else enumerate(table)  # type: ignore[arg-type]
    for key, value in items:
        if isinstance(value, dict) and "value" in value:
            yield (*path, key)
        elif isinstance(value, dict | list):
            yield from fact_paths(value, (*path, key))


# the packaged files


def test_names() -> None:
    assert profile_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_loads_and_every_number_has_an_origin(name: str) -> None:
    chip = load_profile(name)
    assert chip.name == name
    facts = {".".join(map(str, path)) for path in fact_paths(TABLES[name])}
    assert chip.facts.keys() == facts
    for where, fact in chip.facts.items():
        assert fact.kind in KINDS, where
        assert fact.source.strip(), where
        assert all(source.strip() for _, source in fact.other), where


@pytest.mark.parametrize("name", NAMES)
def test_every_number_that_is_set_is_a_fact(name: str) -> None:
    chip = load_profile(name)
    records = {"cores": chip.cores} | {f"levels.{k}": v for k, v in chip.levels.items()}
    records |= {"limits": chip.limits} if chip.limits else {"grid": chip.grid}  # type: ignore[dict-item]
    for where, record in records.items():
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if not isinstance(value, str) and value != field.default:
                assert chip.facts[f"{where}.{field.name}"].value == value


@pytest.mark.parametrize("name", NAMES)
def test_sources_can_be_found_by_a_stranger(name: str) -> None:
    assert "/work" not in TEXTS[name]
    assert "chips.md" not in TEXTS[name]


@pytest.mark.parametrize(
    ("alias", "name"), [("a100", "a100-80gb"), ("h100", "h100-sxm"), ("tpu-v5", "tpu-v5p")]
)
def test_aliases(alias: str, name: str) -> None:
    assert load_profile(alias) is load_profile(name)


def test_these_are_all_aliases() -> None:
    aliases = alias_table(load_profile(name) for name in NAMES)
    assert sorted(aliases) == ["a100", "h100", "tpu-v5", "v4", "v5e", "v5p", "v6e"]


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"unknown profile 'h20'; did you mean 'h200'\?"):
        load_profile("h20")


def with_aliases(name: str, *aliases: str) -> Chip:
    return dataclasses.replace(load_profile("h200"), name=name, aliases=aliases)


@pytest.mark.parametrize(
    ("chips", "message"),
    [
        ([with_aliases("a", "z"), with_aliases("b", "z")], "b.toml: aliases = 'z': .* of a$"),
        (
            [with_aliases("a", "b"), with_aliases("b")],
            "a.toml: aliases = 'b': .* name of a profile",
        ),
    ],
)
def test_an_alias_means_one_chip(chips: list[Chip], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        alias_table(chips)


# a user's own file


def test_a_users_file_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXTS["h200"].replace('name = "h200"', 'name = "mine"'), encoding="utf-8")
    assert load_profile(str(path)).name == "mine"
    path.write_text(TEXTS["tpu-v5e"], encoding="utf-8")
    assert load_profile(str(path)).name == "tpu-v5e"  # read anew, not from memory


def test_a_user_may_reuse_the_names_of_packaged_chips(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXTS["a100-80gb"], encoding="utf-8")
    assert load_profile(str(path)).aliases == ("a100",)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'name = "\xe9"')
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    for path, reason in [
        (tmp_path / "none.toml", "No such file or directory"),
        (folder, "Is a directory"),
        (latin, "it is not UTF-8 text"),
        (Path("a\0b.toml"), "embedded null"),
    ]:
        with pytest.raises(ProfileError) as caught:
            read_profile(path)
        assert str(caught.value).startswith(f"cannot read the profile {path}: ")
        assert reason in str(caught.value)


# damaged files

NOT_A_CHIP = {
    "": "schema is missing: must be 1",
    "schema = 1": "machine is missing: must be one of gpu, tpu",
    "schema = 2": "schema = 2: must be 1",
    "schema = true": "schema = True: must be 1",
    'schema = "1"': "schema = '1': must be 1",
    "schema = ": "not valid TOML",
    "schema = 1\nschema = 1": "not valid TOML",
    f"schema = 1{'0' * 5000}": "not valid TOML",
    f"schema = {'[' * 5000}": "not valid TOML",
    f"schema = 0x1{'0' * 5000}": "schema = a number too long to print: must be 1",
    'schema = 1\nmachine = "GPU"': "machine = 'GPU': must be one of gpu, tpu",
    'schema = 1\nmachine = "gpus"': "machine = 'gpus': must be one of gpu, tpu; did you mean 'gpu'",
    'schema = 1\nmachine = ["gpu"]': "machine = ['gpu']: must be one of gpu, tpu",
    'schema = 1\nmachine = "gpu"\n"core\\ns" = 1': "core s = 1: unknown section of a gpu",
    'schema = 1\nmachine = "gpu"\nname = "x"': "title is missing: must be text",
    'schema = 1\nmachine = "gpu"\nname = 1': "name = 1: must be text",
    'schema = 1\nmachine = "gpu"\nname = " "': "name = ' ': must not be empty",
}


@pytest.mark.parametrize("text", NOT_A_CHIP)
def test_not_a_chip(text: str) -> None:
    assert NOT_A_CHIP[text] in refusal(text)


@pytest.mark.parametrize(
    "section", ["cores", "limits", "rates", "peaks", "levels", "levels.l2", "levels.hbm"]
)
def test_missing_section(section: str) -> None:
    table = copy.deepcopy(TABLES["h200"])
    *path, last = section.split(".")
    del (table[path[0]] if path else table)[last]
    with pytest.raises(ProfileError) as caught:
        read_chip(table, "x.toml")
    assert str(caught.value).startswith(f"x.toml: {section.split('.')[0]} ")
    assert last in str(caught.value)


OPTIONAL = ("per_device", "resident_speed_spread", "core_speed_spread", "jitter_cycles")
REQUIRED = [
    (name, f"{section}.{key}")
    for name, section in [("h200", "cores"), ("h200", "limits"), ("tpu-v4", "grid")]
    for key in TABLES[name][section]
    if key not in OPTIONAL
]


@pytest.mark.parametrize(("name", "field"), REQUIRED)
def test_missing_field(name: str, field: str) -> None:
    table = copy.deepcopy(TABLES[name])
    section, key = field.split(".")
    del table[section][key]
    with pytest.raises(ProfileError, match=rf"x\.toml: {field} is missing: must be "):
        read_chip(table, "x.toml")


COUNT = TEXTS["h200"][TEXTS["h200"].index("count = ") :].split("\n", 1)[0]

BAD_COUNT = [
    ("132", ["cores.count = 132", "must be { value = …"]),
    ('"132"', ["cores.count = '132'", "must be { value = …"]),
    ('{ kind = "assumed", source = "x" }', ["cores.count is missing", "must be a number"]),
    ('{ value = 132, source = "x" }', ["cores.count.kind is missing", "must be one of published"]),
    ('{ value = 132, kind = "assumed" }', ["cores.count.source is missing", "comes from"]),
    ('{ value = 132, kind = "assumed", source = " " }', ["cores.count.source = ' '", "comes from"]),
    ('{ value = 132, kind = "assumed", source = 7 }', ["cores.count.source = 7", "must be text"]),
    ('{ value = 132, kind = 7, source = "x" }', ["cores.count.kind = 7", "must be one of"]),
    (
        '{ value = 132, kind = "Published", source = "x" }',
        ["cores.count.kind = 'Published'", "published, measured, assumed", "mean 'published'"],
    ),
    (
        '{ value = 132, kind = "mesured", source = "x" }',
        ["cores.count.kind = 'mesured'", "must be one of", "did you mean 'measured'"],
    ),
    (
        '{ value = 132, kind = "assumed", sorce = "x" }',
        ["cores.count.sorce = 'x'", "unknown key", "source = "],
    ),
    (
        '{ value = 132, kind = "assumed", source = "x", other = "131" }',
        ["cores.count.other = '131'", "must be a list of { value = …, source = … }"],
    ),
    (
        '{ value = 132, kind = "assumed", source = "x", other = [131] }',
        ["cores.count.other.0 = 131", "must be a list of { value = …, source = … }"],
    ),
    (
        '{ value = 132, kind = "assumed", source = "x", other = [{ value = 0, source = "y" }] }',
        ["cores.count.other.0 = 0", "must be positive"],
    ),
    (
        '{ value = 132, kind = "assumed", source = "x", other = [{ value = 1, source = "" }] }',
        ["cores.count.other.0.source = ''", "comes from"],
    ),
] + [
    (f'{{ value = {value}, kind = "assumed", source = "x" }}', ["cores.count = ", *words])
    for value, words in [
        ("-132", ["-132", "must be positive"]),
        ("0", ["0", "must be positive"]),
        ("-0.0", ["-0.0", "must be positive"]),
        ("nan", ["nan", "must be positive and finite"]),
        ("inf", ["inf", "must be positive and finite"]),
        ("-inf", ["-inf", "must be positive and finite"]),
        ("1e400", ["inf", "must be positive and finite"]),
        (f"1{'0' * 400}", ["1000", "must be positive and finite"]),
        (f"0x1{'0' * 5000}", ["too long to print", "must be positive and finite"]),
        ("132.5", ["132.5", "must be a whole number"]),
        ("true", ["True", "must be a number"]),
        ('"132"', ["'132'", "must be a number, without quotes"]),
        ("[132]", ["[132]", "must be a number"]),
        ("2024-01-01", ["2024", "must be a number"]),
    ]
]


@pytest.mark.parametrize(("count", "words"), BAD_COUNT)
def test_bad_number(count: str, words: list[str]) -> None:
    message = refusal(TEXTS["h200"].replace(COUNT, f"count = {count}"))
    for word in words:
        assert word in message


# a section as something else: path in the table, what stands there, words of the message
BAD_SHAPE: list[tuple[str, Any, list[str]]] = [
    ("cores", [], ["cores = []", "must be a table, [cores]"]),
    ("cores", [TABLES["h200"]["cores"]], ["cores = [{", "…", "must be a table, [cores]"]),
    ("limits", "x", ["limits = 'x'", "must be a table, [limits]"]),
    ("levels", [], ["levels = []", "must be a table, [levels]"]),
    ("levels.l2", 7, ["levels.l2 = 7", "must be a table, [levels.l2]"]),
    ("rates", {}, ["rates = {}", "must be a list of tables, [[rates]]"]),
    ("rates", [], ["rates = []", "must be a list of tables, [[rates]]"]),
    ("rates", [7], ["rates.0 = 7", "must be a table"]),
    ("peaks", "x", ["peaks = 'x'", "must be a list of tables, [[peaks]]"]),
    ("levels", {}, ["levels = ()", "a gpu needs the levels shared, l1, l2, hbm"]),
    ("rates", TABLES["h200"]["rates"][:1] * 2, ["('matrix', 'wgmma', 'fp16', 64)", "twice"]),
    ("rates", TABLES["h200"]["rates"][:-1], ["('exp', 'matrix')", "at least one must be vector"]),
    ("peaks", TABLES["h200"]["peaks"][:-1], ["dtype = 'fp32'", "a matrix rate but no peak"]),
]


@pytest.mark.parametrize(("where", "value", "words"), BAD_SHAPE)
def test_bad_shape(where: str, value: object, words: list[str]) -> None:
    table = copy.deepcopy(TABLES["h200"])
    *path, last = where.split(".")
    (table[path[0]] if path else table)[last] = value
    if value == TABLES["h200"]["rates"][:1] * 2:
        table["peaks"] = table["peaks"][:1]
    with pytest.raises(ProfileError) as caught:
        read_chip(table, "x.toml")
    for word in words:
        assert word in str(caught.value)


# any damage at all

ANY_FACT = st.sampled_from(
    [(name, path) for name, table in TABLES.items() for path in fact_paths(table)]
)
NOT_POSITIVE = (
    st.floats(max_value=0.0, allow_nan=False)
    | st.integers(max_value=0)
    | st.sampled_from([float("nan"), float("inf"), 10**400, 1 << 20_000])
)
GARBAGE = st.recursive(
    st.text() | st.booleans() | st.just(datetime.date(2024, 1, 1)) | st.just(datetime.time(1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(where=ANY_FACT, value=NOT_POSITIVE | GARBAGE, whole_fact=st.booleans())
def test_any_number_put_wrong_is_refused(
    where: tuple[str, tuple[str | int, ...]], value: object, whole_fact: bool
) -> None:
    name, path = where
    table: Any = copy.deepcopy(TABLES[name])
    holder = table
    for key in path if not whole_fact else path[:-1]:
        holder = holder[key]
    holder[path[-1] if whole_fact else "value"] = value
    with pytest.raises(ProfileError) as caught:
        read_chip(table, "x.toml")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert ".".join(map(str, path)) in message


@given(data=st.data())
def test_any_cut_text_is_a_chip_or_refused(data: st.DataObject) -> None:
    text = TEXTS[data.draw(st.sampled_from(NAMES))]
    first = data.draw(st.integers(0, len(text)))
    last = data.draw(st.integers(first, min(first + 200, len(text))))
    cut = text[:first] + data.draw(st.text(max_size=3)) + text[last:]
    with contextlib.suppress(ProfileError):
        assert parse_profile(cut, "x.toml").peaks
