"""The options of every verb that streams data, and the progress bar and notes that they show.

Bars are widgets in a notebook that has ipywidgets, and lines of text elsewhere. Jupyter shows text
on stderr in a red box: in a notebook a bar of text goes to stdout, and tqdm's warning that
ipywidgets is missing is turned off.
"""

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

from crate_interp.core import checks

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


class Pass(TypedDict, total=False):
    """Options of a pass over data: which samples the model sees, and how they are read.

    batch_size: 32 unless the verb has another default. limit: the first n samples; from a folder,
    they come from all its classes. workers: how many processes decode samples ahead. skip_bad:
    leave out samples that cannot be decoded and list them in meta["skipped"], instead of raising.
    groups: which samples belong together, such as the pictures of a patient: a list with a group
    for each sample, or the name of a column of the data. Intervals, tests and splits then treat
    groups as independent, not samples. By default the windows of a text are a group.
    """

    batch_size: Annotated[int, "Samples that run at once."]
    limit: Annotated[int | None, "Use only the first samples; of a folder, from all its classes."]
    workers: Annotated[int, "Processes that decode pictures. 0: only the main process."]
    skip_bad: Annotated[bool, "Leave out samples that cannot be decoded, and list them."]
    groups: Annotated[
        Sequence[int | str] | str | None,
        "The column that says which samples belong together, such as patient.",
        str | None,  # what the command takes
    ]
    progress: Annotated[bool, "Show progress."]


class Run(Pass, total=False):
    """Options of a measurement in chunks: a Pass, and where and how to measure chunks.

    The results of the chunks merge in a fixed order, so the final result is the same to the bit,
    whichever process measures a chunk. out: a folder that keeps each chunk as soon as it is
    measured, and the final result; calling again continues where an earlier call stopped. resume:
    False starts over. shard: "i/n", i from 0: this process measures every n-th chunk (None: RANK
    and WORLD_SIZE, which torchrun sets, or all chunks), and the verb returns None while chunks of
    other processes are missing. engine: "local", or "ray" for the actors of a Ray cluster.

    A folder keeps digests of the functions of probes and hooks and of all that they read, and
    refuses to continue with other functions. tag: a text that stands for something whose content
    cannot be compared, such as an open file; give another text when the content changes.
    """

    out: str | Path | None
    chunk_size: Annotated[int, "Samples that are measured and kept in one piece."]
    resume: Annotated[bool, "Continue where an earlier call stopped."]
    shard: Annotated[str | None, "i/n, i from 0: measure every n-th chunk; not with torchrun."]
    engine: Annotated[str, "local, or ray for a Ray cluster."]
    tag: Annotated[str | None, "A name for what the run reads but cannot compare, as an open file."]


@dataclass(frozen=True)
class RunOptions:
    """The options of one call, checked."""

    batch_size: int = 32
    limit: int | None = None
    workers: int = 0
    skip_bad: bool = False
    groups: object = None
    progress: bool = True
    out: Path | None = None
    chunk_size: int = 256
    resume: bool = True
    shard: str | None = None
    engine: str = "local"
    tag: str | None = None

    def of_a_pass(self) -> Pass:
        """Returns the options for a pass over samples to which the limit was already applied."""
        given: Any = {name: getattr(self, name) for name in Pass.__annotations__}
        return given | {"limit": None, "groups": None}


DEFAULTS = RunOptions()


def run_options(
    verb: Callable[..., Any], values: Run | Pass, accepted: type = Run, **defaults: object
) -> RunOptions:
    """Returns the checked options of a call of a verb.

    accepted: Run, or Pass if the verb does not measure in chunks. defaults: the defaults of the
    verb that differ from DEFAULTS.

    Raises TypeError for an unknown name, with the closest name that the verb has; ValueError for a
    value that an option cannot have, and for a shard without a folder.
    """
    known = list(accepted.__annotations__)
    for name in values:
        if name not in known:
            own = [item for item in inspect.signature(verb).parameters if item != "run"]
            hint = checks.did_you_mean(name, [*own, *known], f"It takes {', '.join(own + known)}.")
            words = f"got an unexpected keyword argument {name!r}. {hint}"
            raise TypeError(f"{verb.__name__}() {words}")
    settings: dict[str, Any] = {**defaults, **values}
    if settings.get("out") is not None:
        settings["out"] = Path(settings["out"])
    options = RunOptions(**settings)
    if options.out is None and options.shard is not None:
        raise ValueError("shard= needs a folder that all shards share: give out=DIR.")
    checks.limit(options.limit)
    if options.tag is not None and not (isinstance(options.tag, str) and options.tag):
        raise ValueError(f"tag={options.tag!r}: give a text, such as 'weights of 3 May'.")
    checked: dict[str, Any] = {}
    for name, least in (("batch_size", 1), ("workers", 0), ("chunk_size", 1)):
        checked[name] = checks.count(name, getattr(options, name), least)
    for name in ("skip_bad", "resume"):
        checked[name] = checks.flag(name, getattr(options, name))
    return replace(options, **checked)
