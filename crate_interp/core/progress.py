"""Progress bars: widgets in a notebook that has ipywidgets, lines of text elsewhere.

Jupyter shows text on stderr in a red box. So in a notebook a bar of text goes to stdout, and tqdm's
warning that ipywidgets is missing is turned off.
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="IProgress not found")
    from tqdm.auto import tqdm as _tqdm  # type: ignore


def stream() -> Any:
    """Returns the stream for bars and notes on progress: stdout in a notebook, else stderr."""
    ipython: Any = sys.modules.get("IPython")  # a notebook has already imported IPython
    shell = ipython.get_ipython() if ipython else None
    return sys.stdout if "IPKernelApp" in getattr(shell, "config", ()) else sys.stderr


def quiet() -> bool:
    """Tells whether bars and notes are hidden by --quiet on the command line."""
    return bool(os.environ.get("CRATE_INTERP_QUIET"))


# how notes name arguments: the command line puts its own options in place of Python's
say_as: list[Callable[[str], str]] = []


def note(text: str) -> None:
    """Writes a line about the progress of long work, above any bar."""
    if not quiet():
        for spoken in say_as:
            text = spoken(text)
        tqdm.write(text, file=stream())


class tqdm(_tqdm):
    """A progress bar with the arguments of tqdm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("file") is None:
            kwargs["file"] = stream()
        if quiet():
            kwargs["disable"] = True
        super().__init__(*args, **kwargs)
