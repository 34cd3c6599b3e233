"""The command line: `main` turns arguments into output, and every failure into one line.

commands   the table of commands, each loaded when it is asked for
flags      what may be written on the command line, and what it means
requests   flags -> kernels, problems, schedules, chips
output     stdout and stderr: tables, JSON, files, progress, Ctrl-C
analyze sweep diff validate profiles kernels    one command each
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Sequence

import click

from iosim.cli.commands import GROUP
from iosim.errors import IosimError

DONE, CANNOT, INTERRUPTED = 0, 2, 130
WORKER = "iosim-worker"  # how threads are called that may outlive an interrupted command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 2 the request cannot be met."""
    if "_IOSIM_COMPLETE" in os.environ:  # a shell asks what may follow
        GROUP.main(prog_name="iosim")
    _survive_any_character()
    code, message = _run(list(sys.argv[1:] if arguments is None else arguments))
    if message:
        click.echo(f"iosim: {' '.join(message.split())}", err=True)
    if code == INTERRUPTED and any(t.name.startswith(WORKER) for t in threading.enumerate()):
        os._exit(code)  # a simulation in compiled code cannot be told to stop
    return code


def _run(arguments: list[str]) -> tuple[int, str]:
    """The exit code and what to say on stderr."""
    try:
        line = shlex.join(["iosim", *arguments])
        with GROUP.make_context("iosim", arguments, obj=line) as context:
            GROUP.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code, ""
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        said = error.format_message().rstrip(".")
        return CANNOT, f"{said[:1].lower()}{said[1:]}{where}"
    except IosimError as error:
        return CANNOT, str(error)
    except BrokenPipeError:
        _forget_stdout()
    except OSError as error:
        _forget_stdout()
        name = f" {error.filename}" if error.filename else ""
        return CANNOT, f"cannot read or write{name}: {error.strerror or error}"
    except (MemoryError, OverflowError) as error:
        return CANNOT, f"too large to simulate ({error or 'out of memory'}); ask for less"
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED, "interrupted"
    return DONE, ""


def _survive_any_character() -> None:
    """A terminal without Unicode shows `?` instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _forget_stdout() -> None:
    """Nobody reads stdout any more: what is still buffered must not fail at exit."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        return
