"""Output of the command line: text for any terminal, and one line for each error."""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

from crate_interp.core.safe_text import plain

FAILED, UNEXPECTED, INTERRUPTED = 2, 3, 130  # exit codes
_LONGEST = 1500
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_READER = (errno.EPIPE, errno.EIO)  # errors after the reader or the terminal has gone


class _Stream:
    """A text stream that raises no error after its reader has gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text."""
        return self._do(self._stream.write, text) or len(text)

    def flush(self) -> None:
        """Writes the text in the buffer."""
        self._do(self._stream.flush)

    def _do(self, act: Callable[..., Any], *values: str) -> Any:
        try:
            return act(*values)
        except OSError as error:
            # otherwise Python would try to write the buffered text once more when Python exits
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if error.errno not in _NO_READER:
                raise
            return None


@contextmanager
def any_terminal() -> Iterator[None]:
    """Lets any text be printed; escapes characters that the encoding lacks.

    A warning is printed as one line.
    """
    with (
        redirect_stdout(_open(sys.stdout)),
        redirect_stderr(_open(sys.stderr)),
        warnings.catch_warnings(),
    ):
        warnings.showwarning = lambda message, *_: complain(f"warning: {message}")
        yield


def complain(words: object) -> None:
    """Prints one line on stderr."""
    with suppress(OSError):
        sys.stderr.write(f"crate-interp: {plain(words, _LONGEST)}\n")
        sys.stderr.flush()


def code_of(
    run: Callable[[], Any], place: Callable[[], Any], debug: bool, reworded: Callable[[str], str]
) -> int:
    """Runs a command and returns its exit code; prints an error as one line on stderr.

    place: a function that returns the folder with the command's output, or None. debug: whether to
    raise errors instead of printing them. reworded: a function that rewrites an error of the
    library in terms of the command line, such as its options.
    """
    try:
        run()
        sys.stdout.flush()
        return 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        if debug:
            raise
        return _report(error, place, reworded)
    if code == INTERRUPTED:  # typer turns an interrupt into an exit
        complain(f"interrupted; {_finished(place)}")
    return code


def _finished(place: Callable[[], Any]) -> str:
    where = place()
    return "nothing was finished" if where is None else f"what was finished is in {where}"


def _report(error: BaseException, place: Callable[[], Any], reworded: Callable[[str], str]) -> int:
    """Prints an error as one line and returns its exit code."""
    if isinstance(error, OSError) and error.errno in _FULL:
        complain(f"{error}: make room, or give another folder; {_finished(place)}")
        return FAILED
    if isinstance(error, (ValueError, OSError, KeyError)):
        said = error.args[0] if isinstance(error, KeyError) and error.args else error
        complain(reworded(str(said)))
        return FAILED
    kind = type(error).__name__
    text = plain(error, _LONGEST)
    complain(f"unexpected {kind}{': ' * bool(text)}{text} (--debug shows the traceback)")
    return UNEXPECTED


def _open(stream: Any) -> Any:
    """Returns a stream that takes any text; it writes to os.devnull if the given one is closed.

    os.devnull also occupies the closed stream's descriptor, so that no file opened later gets it.
    """
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return _Stream(stream)
