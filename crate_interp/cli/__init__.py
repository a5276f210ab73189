"""The command line: crate-interp sweep | report | audit | compare | segment | atlas | verify ...

EXIT_CODES says what a code means.
"""

import os
import sys

import typer

from crate_interp import terminal
from crate_interp.cli import health, looking, measuring
from crate_interp.cli.commands import QUIET, add
from crate_interp.cli.entry import root
from crate_interp.cli.options import locks, place, places
from crate_interp.cli.wording import spoken

__all__ = ["app", "main"]

COMMANDS = (
    measuring.report, measuring.sweep, measuring.audit, measuring.compare, measuring.segment,
    measuring.atoms, measuring.atlas, measuring.ablate, measuring.merge, looking.explore,
    looking.convert, looking.verify, looking.models, health.doctor,
)  # fmt: skip
EXIT_CODES = (
    "Exit codes: 0 done; 1 verify or doctor found what fails; 2 it cannot be done as asked, and a "
    "line says why; 3 an error that nobody expected, whose traceback --debug shows; 130 "
    "interrupted."
)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback(epilog=EXIT_CODES)(root)
for command in COMMANDS:
    add(app, command)


def main() -> None:
    """Runs the command line. An error is one line on stderr; --debug shows the traceback."""
    places.clear()
    before = os.environ.get(QUIET)
    with terminal.any_terminal():
        code = terminal.code_of(_run, place, "--debug" in sys.argv, spoken)
    if before is None:
        os.environ.pop(QUIET, None)
    raise SystemExit(code)


def _run() -> None:
    with locks:
        app()
