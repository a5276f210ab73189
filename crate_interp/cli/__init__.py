"""The command line: crate-interp sweep | report | audit | compare | segment | atlas | inspect ...

EXIT_CODES explains the exit codes.
"""

import os
import sys
from typing import Annotated

import typer
from typer import Option

import crate_interp as ci
from crate_interp.cli import doctor_command, inspect_commands, measure_commands
from crate_interp.cli.command_line import QUIET, add, spoken
from crate_interp.cli.options import locks, place, places, say
from crate_interp.core import progress, terminal

__all__ = ["app", "main"]


def _show_version(wanted: bool | None) -> None:
    if wanted:
        say(f"crate-interp {ci.__version__}")
        raise typer.Exit


def root(
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool | None,
        Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    """Load a CRATE, measure what each layer does, read the report."""


COMMANDS = (
    *(measure_commands.report, measure_commands.sweep, measure_commands.audit),
    *(measure_commands.compare, measure_commands.segment, measure_commands.atoms),
    *(measure_commands.atlas, measure_commands.ablate, measure_commands.concentration),
    measure_commands.merge,
    *(inspect_commands.explore, inspect_commands.graph, inspect_commands.convert),
    *(inspect_commands.inspect, inspect_commands.models, doctor_command.doctor),
)
EXIT_CODES = (
    "Exit codes: 0 done; 1 doctor found a failure; 2 the command cannot do what was "
    "asked, and an error line says why; 3 an unexpected error (--debug shows its traceback); 130 "
    "interrupted."
)
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.callback(epilog=EXIT_CODES)(root)
for command in COMMANDS:
    add(app, command)


def main() -> None:
    """Runs the command line. An error is one line on stderr; --debug shows the traceback."""
    places.clear()
    before = os.environ.get(QUIET)
    progress.say_as[:] = [spoken]
    with terminal.any_terminal():
        code = terminal.code_of(_run, place, "--debug" in sys.argv, spoken)
    progress.say_as.clear()
    if before is None:
        os.environ.pop(QUIET, None)
    raise SystemExit(code)


def _run() -> None:
    with locks:
        app()
