"""The options shared by commands that run a model over data, and the objects made from them."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option

import crate_interp as ci
from crate_interp.cli import options
from crate_interp.cli.command_line import parameters, taking
from crate_interp.core import checks
from crate_interp.core.run_options import DEFAULTS, Run

FORMATS = ("csv", "markdown")
DTYPES = ("float32", "float64", "bfloat16", "float16")
_DATA = (
    '"embedded:fashion", "embedded:pictures", "embedded:held-out-text", "embedded:repeats", a '
    'folder, "imagefolder:DIR" or "hf:owner/name:split".'
)
# options for model, data and folder, as `parameters` takes them
MODEL: dict[str, tuple[Any, ...]] = {
    "source": (options.Source, inspect.Parameter.empty),
    "data": (Annotated[str, Option(help=_DATA)], inspect.Parameter.empty),
    "out": (options.SharedOut, inspect.Parameter.empty),
    "family": (options.Family, None), "revision": (options.Step, None),
    "config": (options.Config, None), "rename": (options.Rename, None),
    "weights": (options.Weights, None),
}  # fmt: skip
ALONE = {**MODEL, "out": (options.Out, inspect.Parameter.empty)}  # one process writes the folder
_DTYPE = (str | None, None, "float32, float64, bfloat16 or float16. Default: float32.")
_OF_A_PASS = {
    "threads": (int | None, None, "Threads of torch in each process."),
    "device": (str | None, None, "cpu, cuda or cuda:1. Default: the GPU of this rank, if any."),
    "dtype": _DTYPE,
}
# options in addition to those of `Run`
_OF_CHUNKS = {
    "address": (
        str | None, None, "Address of the Ray cluster, such as auto. Default: start one here.",
    ),
    "restart": (bool, False, "Start over; remove the earlier chunks."),
    "format": (str | None, None, "Print the main table as csv or markdown."),
}  # fmt: skip
_SAID = {
    "verbose": (bool, False, "Print what each column means, and further tables."),
    "dry_run": (bool, False, "Measure one chunk, say what the whole would take, and stop."),
}
_OF_ONE_SAMPLE = {"device": (str, "cpu", "cpu, cuda or cuda:1."), "dtype": _DTYPE}


class Unfinished(Exception):
    """Raised when there is no result yet, because other shards have work left."""


@dataclass
class Asked:
    """The parsed options of a command; run: the options of the verb."""

    run: dict[str, Any]
    out: Path
    data: Any  # a name of data, or None
    source: str = ""
    family: str | None = None
    revision: str | None = None
    config: list[str] | None = None
    rename: str | None = None
    weights: str | None = None
    device: str | None = None
    dtype: str | None = None
    format: str | None = None  # of the printed table
    verbose: bool = False  # whether to say what columns mean

    def load(self, source: str) -> Any:
        """Returns the model of this name, on the device of this process.

        If torchrun starts several processes, the first one on a machine fetches the model while the
        other processes wait.
        """
        from crate_interp.questions.node_ranks import after_rank_0, device_of_rank

        dtype: Any = None
        if self.dtype is not None:
            checks.one_of("dtype", self.dtype, DTYPES)
            import torch

            dtype = getattr(torch, self.dtype)
        source, revision = options.revised(source, self.revision)
        arguments: Any = {"family": self.family, "revision": revision, "dtype": dtype}
        arguments |= options.chosen(self.rename, self.weights) | options.fields(self.config)
        with after_rank_0(self.out):
            return ci.bridge.load(source, device=self.device or device_of_rank(), **arguments)

    @cached_property
    def model(self) -> Any:
        """Returns the model that the command names."""
        return self.load(self.source)

    def measured(self, verb: Callable[..., Any], **arguments: object) -> Any:
        """Returns the verb's result for the model and the data."""
        result = verb(self.model, self.data, out=self.out, **arguments, **self.run)
        if result is None:
            raise Unfinished
        return result

    @property
    def tables(self) -> Any:
        """The module that makes the printed tables; it imports pandas."""
        from crate_interp.cli import terminal_tables

        return terminal_tables

    def show(
        self, result: Any, write: Callable[[Any, Path], Any], table: str, more: str = ""
    ) -> None:
        """Writes the page of a result, while no other process does, and prints the result."""
        from crate_interp.questions.folder_access import alone  # imports pandas

        with alone(self.out):
            page = write(result, self.out)
        self.say(result, f"{found_of(result)}\nThe page: {page}", table, more)

    def say(self, result: Any, first: str, table: str, more: str = "") -> None:
        """Prints the finding and the place, then a table, and with --verbose what explains it.

        first: the finding and the place. With --format, only the result's main table goes to
        stdout, so that a program can read it, and `first` goes to stderr.
        """
        if self.format is not None:
            options.say(getattr(result, f"to_{self.format}")())
            sys.stderr.write(f"{first}\n")
            return
        hint = "" if self.verbose or not more else "\n--verbose says what the columns mean."
        parts = (first, f"{table}{hint}" if table else "", more.strip() if self.verbose else "")
        options.say("\n\n".join(part for part in parts if part))


def found_of(result: Any) -> str:
    """Returns a result's finding, and what its intervals do not cover."""
    return " ".join(words for words in (result.headline(), result.caution()) if words)


def on_data(
    result: str = "",
    of: type | None = Run,
    leading: Mapping[str, tuple[Any, ...]] = MODEL,
    **texts: str,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that gives a command its options, as an `Asked` in its first parameter.

    result: the name of a result class in `ci`; a folder that holds anything else is refused before
    work starts. of: the options of the verb, Run or Pass, or None for one sample. leading: the
    options for model, data and folder. texts: the help of the command's own options. --threads is
    applied before the command begins, because torch reads it when it is imported.
    """
    of_verb = {} if of is None else _options_of(of)
    shared = {**of_verb, **(_OF_ONE_SAMPLE if of is None else _OF_A_PASS)}
    shared |= {**(_OF_CHUNKS if of is Run else {}), **({} if of is None else _SAID)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        items = list(inspect.signature(command).parameters.values())[1:]
        own = {item.name: (item.annotation, item.default) for item in items}
        own |= {name: (*own[name], text) for name, text in texts.items()}

        @wraps(command)
        def asking(**given: Any) -> None:
            values = {name: given.pop(name) for name in (*leading, *shared)}
            if values.get("format") is not None:
                checks.one_of("format", values["format"], FORMATS)
            options.take_threads(values.pop("threads", None))
            address, dry = values.pop("address", None), values.pop("dry_run", False)
            run = {name: values.pop(name) for name in of_verb}
            if address is not None:
                if run["engine"] != "ray":
                    raise ValueError(f"--address {address} works with --engine ray only.")
                os.environ["RAY_ADDRESS"] = address
            if of is Run:
                run["resume"] = not values.pop("restart")
            asked = Asked(run, **values)
            if dry:
                _dry_run(command, asked, given)
                return
            if result:
                getattr(ci, result).check_folder(asked.out)
            with suppress(Unfinished):
                command(asked, **given)

        return taking(asking, parameters({**leading, **own, **shared}))

    return decorate


def _options_of(of: type) -> dict[str, tuple[Any, ...]]:
    """Returns the options of Run or Pass; --quiet and --restart stand for two of them."""
    found = {}
    for name, hint in get_type_hints(of, include_extras=True).items():
        if name not in ("out", "progress", "resume"):
            kind, text, *typed = get_args(hint)
            found[name] = (typed[0] if typed else kind, getattr(DEFAULTS, name), text)
    return found


def _dry_run(command: Callable[..., None], asked: Asked, own: dict[str, Any]) -> None:
    """Runs a command until it has measured one chunk; nothing is written into its folder."""
    from crate_interp.questions.forecast import dry_run  # imports torch

    with TemporaryDirectory() as scratch, dry_run():
        command(replace(asked, out=Path(scratch) / "out"), **own)
