"""The table of commands; a command's module is imported when the command is asked for."""

from __future__ import annotations

from importlib import import_module

import click

from iosim.errors import unknown_name

#: what `iosim --help` says of each; the module of the same name holds COMMAND
COMMANDS = {
    "analyze": "Bytes per level and operand, work and bounds of kernels on a chip.",
    "sweep": "The same over lists of tiles, lengths, chips: a table or a plot.",
    "diff": "Two results side by side, by level and operand.",
    "validate": "Predicted beside measured counters, and the errors.",
    "profiles": "The chips, and where each of their numbers comes from.",
    "kernels": "The kernels: loops, parameters, closed forms.",
}
EXAMPLES = """\
\b
  iosim profiles
  iosim analyze --profile NAME
  iosim analyze --profile NAME --kernel flash2 --seqlen 8k --causal --tile 128x64
  iosim sweep --profile NAME --tile 64x64,128x64,128x128 --plot tiles.png
"""


class Commands(click.Group):
    """A group whose commands are modules, named here and loaded later."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command called `cmd_name`. Raises RequestError with the nearest match."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:
                return None
            raise unknown_name("command", cmd_name, COMMANDS)
        command: click.Command = import_module(f"iosim.cli.{cmd_name}").COMMAND
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without importing what stands in it."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without a word there is help, and nothing has failed."""
        return super().parse_args(ctx, args or ["--help"])


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from iosim import __version__

        click.echo(f"iosim {__version__}")
        ctx.exit()


GROUP = Commands(
    name="iosim",
    help=(
        "How many bytes an attention kernel moves between the memories of a GPU or TPU, "
        "and what that costs."
    ),
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version,
            help="Show the version and exit.",
        )
    ],
)  # fmt: skip
