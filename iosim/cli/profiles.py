"""`iosim profiles`: the chips, and every number of one with its source."""

from __future__ import annotations

import click

from iosim.cli import output
from iosim.cli.flags import Command, Flag, One, Values, word

ABOUT = """The chips; with NAME every number of one, its unit, its source, and what others say.

NAME is a profile, another name of one, or FILE.toml. published: its maker or a paper says so;
measured: read from the chip or its compiler; assumed: nobody published it."""
FORMAT = 1


def run(values: Values) -> None:
    """The command."""
    from iosim.profiles import load_profile, profile_names
    from iosim.report.chips import chip_json, chip_table, fact_tables

    name = values.one("name")
    chips = [load_profile(n) for n in ((name,) if name else profile_names())]
    if values.one("json"):
        output.print_json({"format": FORMAT, "profiles": [chip_json(chip) for chip in chips]})
        return
    if name is None:
        output.print_tables([chip_table(chips)])
        output.print_lines(["iosim profiles NAME shows where each number of a chip comes from."])
        return
    chip = chips[0]
    alias = f"{name} = {chip.name}: " if name in chip.aliases else ""
    kinds = [fact.kind for fact in chip.facts.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    output.print_lines([f"{alias}{chip.title}, a {chip.machine.upper()}; numbers: {counts}", ""])
    output.print_tables(fact_tables(chip))


COMMAND = Command(
    "profiles",
    run,
    ABOUT,
    [
        click.Argument(["name"], required=False, type=One(word, "NAME"), metavar="[NAME]"),
        Flag(["--json"], "Output", "JSON on stdout, and nothing else there.", is_flag=True),
    ],
)
