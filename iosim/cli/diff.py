"""`iosim diff A.json B.json`: two results by level and operand."""

from __future__ import annotations

import click

from iosim.cli.flags import Command, One, Values, output_flags, path

ABOUT = """Two results side by side, by level and operand.

A and B are documents that analyze or sweep wrote with -o FILE.json. They are paired by kernel, and
where a kernel stands several times, by everything that was asked for."""
SUFFIXES = (".json", ".md")


def run(values: Values) -> None:
    """The command."""
    from iosim.cli import output
    from iosim.report.difference import difference_table, differences
    from iosim.report.files import require_suffix, require_writable, write_whole
    from iosim.report.results import read_document
    from iosim.report.tables import as_markdown
    from iosim.result import FORMAT

    target = values.one("output")
    if target is not None:
        require_suffix(target, SUFFIXES)
        require_writable(target)
    names = (values.one("first"), values.one("second"))
    diff = differences(*(read_document(name) for name in names))
    document = {"format": FORMAT, "first": str(names[0]), "second": str(names[1]), "diff": diff}
    tables = [difference_table(record) for record in diff]
    if target is not None:
        as_text = target.suffix.lower() == ".md"
        write_whole(target, as_markdown(tables) if as_text else output.as_json(document))
        output.say(f"iosim: wrote {target}")
    if values.one("json"):
        output.print_json(document)
        return
    output.print_lines([f"A {names[0]}", f"B {names[1]}", ""])
    output.print_tables(tables)


COMMAND = Command(
    "diff",
    run,
    ABOUT,
    [
        click.Argument(["first"], type=One(path, "A.json"), metavar="A.json"),
        click.Argument(["second"], type=One(path, "B.json"), metavar="B.json"),
        *output_flags(", ".join(SUFFIXES)),
    ],
)
