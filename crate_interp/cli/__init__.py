"""The command line: crate-interp sweep | report | audit | compare | segment | atlas | graph ...

EXIT_CODES explains the exit codes.
"""

import errno
import os
import sys
import warnings
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer import Option

import crate_interp as ci
from crate_interp.cli import inspect_commands, measure_commands
from crate_interp.cli.command_line import QUIET, add, spoken
from crate_interp.cli.options import locks, place, places, say
from crate_interp.core import progress
from crate_interp.core.safe_text import plain

__all__ = ["app", "main"]

FAILED, UNEXPECTED, INTERRUPTED = 2, 3, 130  # exit codes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 1500  # characters of an error


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
    *(inspect_commands.explore, inspect_commands.graph, inspect_commands.convert),
    *(inspect_commands.inspect, inspect_commands.models),
)
EXIT_CODES = (
    "Exit codes: 0 done; 2 the command cannot do what was asked, and an error line says why; 3 an "
    "unexpected error (--debug shows its traceback); 130 interrupted."
)
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.callback(epilog=EXIT_CODES)(root)
for command in COMMANDS:
    add(app, command)


def main() -> None:
    """Runs the command line. An error is one line on stderr; --debug shows the traceback."""
    places.clear()
    quiet = os.environ.get(QUIET)
    progress.say_as[:] = [spoken]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may lack letters of a label
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _complain(f"warning: {message}")
        code = _run()
    progress.say_as.clear()
    if quiet is None:
        os.environ.pop(QUIET, None)
    raise SystemExit(code)


def _run() -> int:
    """Runs a command and returns its exit code; prints an error as one line on stderr."""
    try:
        with locks:
            app()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, OSError) and error.errno in _FULL:
            _complain(f"{error}: make room, or give another folder; {_finished()}")
            return FAILED
        if isinstance(error, (ValueError, OSError, KeyError)):
            said = error.args[0] if isinstance(error, KeyError) and error.args else error
            _complain(spoken(str(said)))
            return FAILED
        text = ": ".join(part for part in (type(error).__name__, plain(error, _LONGEST)) if part)
        _complain(f"unexpected {text} (--debug shows the traceback)")
        return UNEXPECTED
    if code == INTERRUPTED:  # typer turns an interrupt into an exit
        _complain(f"interrupted; {_finished()}")
    return code


def _complain(words: Any) -> None:
    with suppress(OSError):
        sys.stderr.write(f"crate-interp: {plain(words, _LONGEST)}\n")
        sys.stderr.flush()


def _finished() -> str:
    where = place()
    return "nothing was finished" if where is None else f"what was finished is in {where}"
