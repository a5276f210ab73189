"""The options shared by commands that run a model over data, and the objects made from them."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option

import crate_interp as ci
from crate_interp.cli import options
from crate_interp.cli.command_line import taking
from crate_interp.core import checks
from crate_interp.core.run_options import DEFAULTS, Run

FORMATS = ("csv", "markdown", "latex")
# name of an option for model, data or folder -> (annotation, default)
MODEL: dict[str, tuple[Any, Any]] = {
    "source": (options.Source, inspect.Parameter.empty),
    "data": (options.Data, inspect.Parameter.empty),
    "out": (options.SharedOut, inspect.Parameter.empty),
    "family": (options.Family, None),
    "revision": (options.Step, None),
    "config": (options.Config, None),
    "rename": (options.Rename, None),
    "weights": (options.Weights, None),
}
_DEVICE = Annotated[
    str | None, Option(help="cpu, cuda or cuda:1. Default: the GPU of this rank, if any.")
]
_MACHINE = {"threads": (options.Threads, None), "device": (_DEVICE, None)}
_MACHINE |= {"dtype": (options.Dtype, None)}
_VERBOSE = Annotated[
    bool, Option("--verbose", help="Print what each column means, and further tables.")
]
_DRY = Annotated[
    bool, Option("--dry-run", help="Say what it takes from its start to its end, and stop.")
]
_ADDRESS = Annotated[
    str | None, Option(help="Address of the Ray cluster, such as auto. Default: start one here.")
]
_RESTART = Annotated[bool, Option("--restart", help="Start over; remove the earlier chunks.")]
_FORMAT = Annotated[str | None, Option(help="Print the main table as csv, markdown or latex.")]
# options in addition to those of `Run`
_OF_CHUNKS = {"address": (_ADDRESS, None), "restart": (_RESTART, False), "format": (_FORMAT, None)}


@dataclass
class Asked:
    """The parsed options of a command.

    run: the options of the verb. format: the format of the printed table. verbose: whether to say
    what its columns mean.
    """

    run: dict[str, Any]
    out: Path
    data: str | None
    source: str = ""
    family: str | None = None
    revision: str | None = None
    config: list[str] | None = None
    rename: str | None = None
    weights: str | None = None
    device: str | None = None
    dtype: str | None = None
    format: str | None = None
    verbose: bool = False

    def load(self, source: str) -> Any:
        """Returns the model of this name, on the device of this process.

        If torchrun starts several processes, the first one on a machine fetches the model while the
        other processes wait.
        """
        from crate_interp.sweeps.engines.node_ranks import after_rank_0, device_of_rank

        with after_rank_0(self.out):
            device = self.device or device_of_rank()
            return options.load(
                source, self.family, self.revision, self.config, device, self.dtype,
                self.rename, self.weights,
            )  # fmt: skip

    @cached_property
    def model(self) -> Any:
        """Returns the model that the command names."""
        return self.load(self.source)

    def measured(self, verb: Callable[..., Any], **arguments: object) -> Any:
        """Returns the verb's result for the model and the data."""
        return verb(self.model, self.data, out=self.out, **arguments, **self.run)

    def page_of(self, result: object, write: Callable[[Any, Path], Any]) -> Any:
        """Returns the page that `write` makes of a result; only one process writes at a time."""
        from crate_interp.sweeps.ledgers.folder_access import alone  # imports pandas

        with alone(self.out):
            return write(result, self.out)

    @property
    def tables(self) -> Any:
        """The module that makes the printed tables; it imports pandas."""
        from crate_interp.cli import terminal_tables

        return terminal_tables

    def say_result(self, first: str, table: str, result: object = None, more: str = "") -> None:
        """Prints the finding and the path, then a table, and with --verbose what explains it.

        first: the finding and the path. With --format, only the result's main table goes to stdout,
        so that a program can read it, and `first` goes to stderr.
        """
        if self.format is not None:
            options.say(getattr(result, f"to_{self.format}")())
            sys.stderr.write(f"{first}\n")
            return
        hint = "" if self.verbose or not more else "\n--verbose says what the columns mean."
        parts = (first, f"{table}{hint}" if table else "", more.strip() if self.verbose else "")
        options.say("\n\n".join(part for part in parts if part))


def on_data(
    result: str = "", of: type = Run, leading: Mapping[str, tuple[Any, Any]] = MODEL
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that gives a command its options, as an `Asked` in its first parameter.

    result: the name of a result class in `ci`; a folder that holds anything else is refused before
    work starts. of: the options of the verb, Run or Pass. leading: the options for model,
    data and folder. --threads is applied before the command begins, because torch reads the number
    of threads when it is imported.
    """
    of_verb = _options_of(of)
    shared = {**of_verb, **_MACHINE, **(_OF_CHUNKS if of is Run else {})}
    shared |= {"verbose": (_VERBOSE, False), "dry_run": (_DRY, False)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        @wraps(command)
        def asking(**given: Any) -> None:
            taken = {name: given.pop(name) for name in (*leading, *shared)}
            if taken.get("format") is not None:
                checks.one_of("format", taken["format"], FORMATS)
            options.take_threads(taken.pop("threads"))
            _address(taken.pop("address", None), taken.get("engine"))
            run = {name: taken.pop(name) for name in of_verb}
            if of is Run:
                run["resume"] = not taken.pop("restart")
            if taken.pop("dry_run"):
                _forecast(command, Asked(run, **taken), given)
                return
            if result:
                getattr(ci, result).check_folder(taken["out"])
            command(Asked(run, **taken), **given)

        return taking(asking, [*_parameters(leading), *own, *_parameters(shared)])

    return decorate


def _forecast(command: Callable[..., None], asked: Asked, given: dict[str, Any]) -> None:
    """Runs a command until it has said what it takes; nothing is written into its folder."""
    from crate_interp.sweeps.runs.forecast import dry_run  # imports torch

    with TemporaryDirectory() as scratch, dry_run():
        command(replace(asked, out=Path(scratch) / "out"), **given)


def _options_of(of: type) -> dict[str, tuple[Any, Any]]:
    """Returns the options of Run or Pass for typer; --quiet and --restart are added elsewhere."""
    hints = get_type_hints(of, include_extras=True)
    kinds = {name: get_args(hint) for name, hint in hints.items()}
    found = {}
    for name in (name for name in kinds if name not in ("out", "progress", "resume")):
        kind, text, *typed = kinds[name]
        kind = typed[0] if typed else kind
        default = getattr(DEFAULTS, name)
        flag = [f"--{name.replace('_', '-')}"] if kind is bool else []
        found[name] = (Annotated[kind, Option(*flag, help=text)], default)
    return found


def _parameters(shown: Mapping[str, tuple[Any, Any]]) -> list[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, default=value, annotation=kind)
        for name, (kind, value) in shown.items()
    ]


def _address(address: str | None, engine: str | None) -> None:
    if address is None:
        return
    if engine != "ray":
        raise ValueError(f"--address {address} works with --engine ray only. Add --engine ray.")
    os.environ["RAY_ADDRESS"] = address
