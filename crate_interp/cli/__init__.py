"""The command line: crate-interp sweep | report | audit | compare | segment | atlas | graph ...

EXIT_CODES explains the exit codes.
"""

import errno
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

from crate_interp.cli.command_line import EXIT_CODES, QUIET, app, requests, spoken
from crate_interp.cli.commands import COMMANDS
from crate_interp.core import progress
from crate_interp.core.safe_text import plain

__all__ = ["COMMANDS", "EXIT_CODES", "app", "main"]

FAILED, UNEXPECTED, INTERRUPTED = 2, 3, 130  # exit codes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST = 1500  # characters of an error


def main() -> None:
    """Runs the command line. An error is one line on stderr; --debug shows the traceback."""
    quiet = os.environ.get(QUIET)
    requests.clear()
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
            words = error.args[0] if isinstance(error, KeyError) and error.args else error
            _complain(spoken(str(words)))
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
    out = requests[0].out if requests else None
    return f"what was finished is in {out}" if out and out.exists() else "nothing was finished"
