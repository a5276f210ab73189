"""The command line in this process, which saves the seconds that a new one takes to start.

What needs a new process starts it here, too.
"""

import contextlib
import io
import subprocess
import sys
from unittest.mock import patch

from crate_interp.cli import main


def run(*args) -> subprocess.CompletedProcess:
    """Runs `crate-interp ARGS` in this process; returns its exit code and what it printed."""
    argv, code = ["crate-interp", *map(str, args)], 0
    out, err = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def process(*args) -> subprocess.CompletedProcess:
    """Runs `python -m crate_interp ARGS` in a process of its own, as a user does."""
    command = [sys.executable, "-m", "crate_interp", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


def python(code: str) -> subprocess.CompletedProcess:
    """Runs lines of Python in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def one_line(match, done):
    """Asserts that the command ended with 2 and one line on stderr that holds `match`."""
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert errors[0].startswith("crate-interp: ") and match in errors[0], done.stderr


def fails(match, *args):
    """Runs the command in this process and asserts that it fails with one line."""
    one_line(match, run(*args))
