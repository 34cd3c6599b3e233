"""The house rules, read off the source tree: arrows, names, sizes, and what a start imports."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A group may import, at module level, its own modules and those of the groups named beside it.
GROUPS = {
    "words": {"errors", "units"},
    "chip": {"chip"},
    "profiles": {"profile_rules", "profile_schema", "profiles"},
    "ground": {"cost", "emit", "jit", "launch", "ops", "problem", "problem_variants", "traffic"},
    "kernels": {"kernels"},
    "memory": {"memory"},
    "engine": {"engine"},
}
BELOW = {
    "words": (),
    "chip": ("words",),
    "profiles": ("words", "chip"),
    "ground": ("words", "chip"),
    "kernels": ("words", "chip", "ground"),
    "memory": ("words", "chip", "ground"),
    "engine": ("words", "chip", "ground", "memory"),
}
LAYOUT = "iosim.memory.layout"  # a kernel says how its tensors lie in memory
LIGHT = ("counters", "report")  # they also run on a host that has nothing but NumPy
COMPILED = {"emit", "engine", "jit", "kernels", "memory"}
SLOW_TO_IMPORT = {"matplotlib", "numba", "simpy"}

MODULE_LINES = 400
FUNCTION_LINES = 40
COMPILED_FUNCTION_LINES = 80
COMPILERS = {"block_program", "inline", "jit"}

CHIP_WORDS = (
    r"(?:G[BH]|[ABHV])\d00",
    r"L40S?",
    r"MI\d{3}X?",
    r"TPU[-_ ]?v\d\w?",
    r"v[4-9][ep]",
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/\w")
REGISTRY_HOST = re.compile(r"\b(?:pypi|pythonhosted|npmjs|conda|anaconda)\.(?:org|com)\b")


class Source(NamedTuple):
    """One Python file: where it is, what it is called as a module, its text and its tree."""

    path: str
    module: str
    text: str
    tree: ast.Module


class Arrow(NamedTuple):
    """One import at module level between two top-level modules of iosim, and where it stands."""

    start: str
    end: str
    name: str
    where: str


def files_under(*folders: str) -> Iterator[Path]:
    """Every real file below `folders` once, in order: links to folders are not followed."""
    for folder in folders:
        for where, names, files in os.walk(ROOT / folder):
            names[:] = sorted(set(names) - {"__pycache__"})
            yield from (Path(where) / name for name in sorted(files))


def module_name(path: Path) -> str:
    """The name under which iosim imports the file; kernels/ is iosim.kernels."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] != "kernels" else ("iosim", *parts))


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    found = []
    for path in files_under(*folders):
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(ROOT).as_posix()
            found.append(Source(name, module_name(path), text, ast.parse(text, name)))
    return tuple(found)


def accuse(faults: Iterable[str]) -> None:
    """Fails with one line per fault."""
    lines = list(faults)
    if lines:
        pytest.fail("\n".join(lines), pytrace=False)


def imported(node: ast.AST) -> list[str]:
    """The full names that an import statement may load; empty for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported by a program (not by a type checker)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield from at_module_level(child)


def top_name(module: str) -> str:
    """The top-level module that `module` belongs to: `memory` for `iosim.memory.l2`."""
    return module.split(".")[1] if module.startswith("iosim.") else ""


@cache
def arrows() -> tuple[Arrow, ...]:
    every = sources("iosim", "kernels")
    tops = {top_name(source.module) for source in every} - {""}
    return tuple(
        Arrow(top_name(source.module), top_name(name), name, f"{source.path}:{node.lineno}")
        for source in every
        for node in at_module_level(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported(node)
        if top_name(name) in tops and top_name(name) != top_name(source.module)
    )


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`script` in a fresh interpreter, which imports the checkout."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_arrows_run_one_way() -> None:
    group_of = {module: group for group, modules in GROUPS.items() for module in modules}
    accuse(
        f"{arrow.where}: {arrow.start} must not import {arrow.end} at module level"
        for arrow in arrows()
        if (group := group_of.get(arrow.start)) is not None
        and group_of.get(arrow.end) not in (group, *BELOW[group])
        and not (group == "kernels" and arrow.name.startswith(LAYOUT))
    )


def test_no_cycle_between_modules() -> None:
    graph: dict[str, set[str]] = {}
    for arrow in arrows():
        graph.setdefault(arrow.start, set()).add(arrow.end)
    steps: set[tuple[str, str]] = set()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        steps.update(pairwise(error.args[1]))  # each is imported by the next
    accuse(
        f"{arrow.where}: {arrow.start} imports {arrow.end}, part of a cycle"
        for arrow in arrows()
        if (arrow.end, arrow.start) in steps
    )


def test_light_modules_name_no_compiled_one() -> None:
    accuse(
        f"{arrow.where}: {arrow.start} must not import {arrow.end} at module level"
        for arrow in arrows()
        if arrow.start in LIGHT and arrow.end in COMPILED
    )


@pytest.mark.parametrize("package", LIGHT)
def test_light_modules_load_no_numba(package: str) -> None:
    modules = [s.module for s in sources("iosim") if top_name(s.module) == package]
    assert modules, f"iosim/{package} holds no module"
    script = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    run = run_python(script, *modules)
    assert run.returncode == 0, run.stderr
    loaded = set(json.loads(run.stdout))
    assert not loaded & {"numba", *(f"iosim.{name}" for name in COMPILED)}


@pytest.mark.parametrize("argument", ["--help", "profiles"])
def test_a_start_loads_nothing_slow(argument: str) -> None:
    script = (
        "import json, sys\n"
        "from iosim.cli import main\n"
        "sys.argv[0] = 'iosim'\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    run = run_python(script, argument)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert not set(json.loads(run.stderr.splitlines()[-1])) & SLOW_TO_IMPORT


def test_one_door_to_numba() -> None:
    accuse(
        f"{source.path}:{node.lineno}: only iosim/jit.py imports Numba; use iosim.jit"
        for source in sources("iosim", "kernels")
        if source.path != "iosim/jit.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        if any(name.split(".")[0] in ("llvmlite", "numba") for name in imported(node))
    )


def test_imports_are_absolute() -> None:
    accuse(
        f"{source.path}:{node.lineno}: a relative import"
        for source in sources("iosim", "kernels", "tests")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    )


def chip_pattern() -> re.Pattern[str]:
    """Matches the name of a chip: those of the profiles, their aliases, and the usual ones."""
    profiles = [p for p in files_under("hardware_profiles") if p.suffix == ".toml"]
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in profiles]
    names = {name for table in tables for name in (table["name"], *table.get("aliases", ()))}
    known = [re.escape(name).replace(r"\-", "[-_ ]?") for name in sorted(names)]
    return re.compile(rf"(?<![^\W_])(?:{'|'.join((*known, *CHIP_WORDS))})(?![^\W_])", re.IGNORECASE)


def test_no_chip_is_named_in_code() -> None:
    pattern = chip_pattern()
    accuse(
        f"{source.path}:{number}: names the chip {match[0]!r}; a chip is a file of data"
        for source in sources("iosim", "kernels")
        if "kernels/device/" not in source.path
        for number, line in enumerate(source.text.splitlines(), 1)
        for match in pattern.finditer(line)
    )


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, text: list[str]) -> int:
    """Lines from `def` to the end without docstring, blank lines and comments."""
    first = function.body[0]
    is_docstring = ast.get_docstring(function) is not None
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if is_docstring else ()
    span = range(function.lineno, (function.end_lineno or 0) + 1)
    lines = (text[number - 1].strip() for number in span if number not in docstring)
    return sum(1 for line in lines if line and not line.startswith("#"))


def decorators(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The last names of the decorators: `jit` for `@jit`, `@iosim.jit.jit` and `@jit(…)`."""
    plain = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in plain}


def test_modules_are_short() -> None:
    accuse(
        f"{source.path}:{lines}: a module of {lines} lines (at most {MODULE_LINES})"
        for source in sources("iosim", "kernels", "tests")
        if (lines := len(source.text.splitlines())) > MODULE_LINES
    )


def test_functions_are_short() -> None:
    faults = []
    for source in sources("iosim", "kernels", "tests"):
        text = source.text.splitlines()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                compiled = bool(decorators(node) & COMPILERS)
                most = COMPILED_FUNCTION_LINES if compiled else FUNCTION_LINES
                if (lines := code_lines(node, text)) > most:
                    where = f"{source.path}:{node.lineno}"
                    faults.append(f"{where}: {node.name} has {lines} lines (at most {most})")
    accuse(faults)


def test_only_the_command_line_prints() -> None:
    accuse(
        f"{source.path}:{node.lineno}: print() outside the command line"
        for source in sources("iosim", "kernels")
        if top_name(source.module) != "cli"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "print"
    )


def test_no_keyword_corridors() -> None:
    accuse(
        f"{source.path}:{node.kwarg.lineno}: **{node.kwarg.arg} takes any keyword"
        for source in sources("iosim", "kernels")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.arguments) and node.kwarg is not None
    )


def published_files() -> Iterator[Path]:
    yield from (path for path in sorted(ROOT.iterdir()) if path.suffix in (".md", ".toml"))
    yield from files_under(
        ".ci", ".github", "docs", "hardware_profiles", "iosim", "kernels", "reports", "tests"
    )


def test_text_speaks_of_the_project_alone() -> None:
    faults = []
    for path in published_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(lines, 1):
            for pattern, what in ((MACHINE_PATH, "a machine's path"), (REGISTRY_HOST, "a host")):
                if match := pattern.search(line):
                    where = f"{path.relative_to(ROOT).as_posix()}:{number}"
                    faults.append(f"{where}: {what}, {match[0]!r}")
    accuse(faults)
