"""Adds commands to the command line, and puts error messages in terms of options."""

import copy
import inspect
import os
import re
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer import Option
from typer.models import ArgumentInfo

from crate_interp.cli import options

QUIET = "CRATE_INTERP_QUIET"  # read by crate_interp/core/progress.py, also in worker processes

# an example of each command, shown if an option is missing and at the end of the help text
EXAMPLES = {
    "report": "report crate-tiny-fashion --data embedded:fashion --out runs/first",
    "sweep": "sweep crate-tiny-fashion --data embedded:fashion --out runs/sweep",
    "audit": "audit crate-tiny-fashion --data embedded:fashion --limit 64 --out runs/audit",
    "compare": "compare crate-tiny-fashion crate-tiny-fashion@step-640 --data embedded:fashion "
    "--out runs/compare",
    "segment": "segment crate-tiny-pictures --data embedded:pictures --out runs/segment",
    "atoms": "atoms crate-tiny-fashion --data embedded:fashion --out runs/atoms",
    "atlas": "atlas crate-tiny-pictures --data embedded:pictures --limit 16 --out runs/atlas",
    "ablate": "ablate crate-tiny-fashion --data embedded:fashion --out runs/ablate",
    "concentration": "concentration crate-tiny-fashion --data embedded:fashion --limit 64 "
    "--out runs/concentration",
    "explore": "explore crate-tiny-fashion --data embedded:fashion --without --out runs/explore",
    "graph": "graph crate-tiny-fashion --data embedded:fashion --out runs/graph",
    "convert": "convert crate-alpha-b16 --out models/alpha-b16",
    "inspect": "inspect crate-tiny-fashion",
    "models": "models --json",
}


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Adds a function to the command line, with its example at the end of its help.

    The command has --quiet and --debug too. It names all missing options at once, where typer would
    name one after another: so required options are optional for typer, and the help text says which
    are required. Without --out it writes into runs/COMMAND-MODEL, except `convert`.
    """
    name = command.__name__
    example = f"Example: crate-interp {EXAMPLES[name]}"
    items = list(inspect.signature(command).parameters.values())
    needed = {item.name: _typed(item) for item in items if item.default is inspect.Parameter.empty}
    place = next((item.annotation for item in items if item.name == "out"), None)
    if place in (options.Out, options.SharedOut):
        del needed["out"]

    @wraps(command)
    def run(quiet: bool, debug: bool, **values: Any) -> None:  # main() reads --debug
        missing = [words for name, words in needed.items() if values[name] is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(f"{', '.join(missing)} {verb} missing. {example}")
        if quiet:
            os.environ[QUIET] = "1"
        if "out" in values and "out" not in needed:
            model = Path(str(values.get("source") or values.get("a"))).name
            usual = Path("runs") / f"{name}-{re.sub('[^A-Za-z0-9@._-]+', '-', model)}"
            values["out"] = options.folder(values["out"] or usual, place is options.Out)
        command(**values)

    taken = [
        _optional(item, "[required]" if item.name in needed else "Default: runs/COMMAND-MODEL.")
        if item.default is inspect.Parameter.empty
        else item
        for item in items
    ]
    taken += parameters({
        "quiet": (bool, False, "Show no progress."),
        "debug": (bool, False, "Show the traceback of an error."),
    })  # fmt: skip
    app.command(epilog=example)(taking(run, taken))


def taking(run: Callable[..., None], items: list[inspect.Parameter]) -> Callable[..., None]:
    """Gives a function the signature that typer reads: these parameters, as keywords."""
    items = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in items]
    vars(run).pop("__wrapped__")
    vars(run)["__signature__"] = inspect.Signature(items)
    run.__annotations__ = {item.name: item.annotation for item in items}
    return run


def parameters(table: Mapping[str, tuple[Any, ...]]) -> list[inspect.Parameter]:
    """Returns what typer reads of a table: name -> (annotation, default) or (type, default, help).

    A bool that is off by default has no value and no --no-NAME.
    """
    found = []
    for name, (kind, default, *text) in table.items():
        flag = [f"--{name.replace('_', '-')}"] if default is False else []
        kind = Annotated[kind, Option(*flag, help=text[0])] if text else kind
        keyword = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(name, keyword, default=default, annotation=kind))
    return found


def _typed(item: inspect.Parameter) -> str:
    """Returns a parameter as it is typed: --data, or SOURCE."""
    argument = isinstance(get_args(item.annotation)[1], ArgumentInfo)
    return item.name.upper() if argument else f"--{item.name.replace('_', '-')}"


def _optional(item: inspect.Parameter, words: str) -> inspect.Parameter:
    """Returns a required parameter as one that is optional for typer; its help says `words`."""
    kind, info = get_args(item.annotation)
    info = copy.copy(info)
    info.help = f"{info.help} {words}"
    if isinstance(info, ArgumentInfo):
        info.metavar = item.name.upper()
    return item.replace(annotation=Annotated[kind | None, info], default=None)


# options that an error message may name as Python arguments, such as limit=0
_OPTIONS = (
    "ablate", "address", "batch_size", "chunk_size", "controls", "data", "device", "dtype",
    "engine", "eps", "family", "format", "fraction", "freeze", "how", "k", "limit", "mass",
    "metric", "most", "out", "point", "position", "precision", "probes", "rename", "revision",
    "rotations", "sample", "seed", "shard", "target", "top", "untrained", "weights", "workers",
)  # fmt: skip
_WORDS = {
    "ci.list_models()": "`crate-interp models`",
    "load the model with labels=[...], ": 'give --config \'labels=["...", "..."]\', ',
    "Load it with the mean and std of its training, ": (
        'Give --config "mean=[...]" and --config "std=[...]" of its training, '
    ),
}
_ARGUMENT = re.compile(rf"(?<![\w.(])({'|'.join(_OPTIONS)})=")
_LOAD = re.compile(r"ci\.load\(\.\.\., ((?:[^()]|\([^()]*\))*)\)")
_FIELD = re.compile(r"(\w+)=((?:\([^()]*\)|'[^']*'|[^,\s])+)")


def spoken(text: str) -> str:
    """Returns an error message with command-line options in place of Python's arguments.

    ci.load(..., n_heads=6) becomes --config n_heads=6, limit=0 becomes --limit 0.
    """

    def option(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'")
        if name in ("family", "revision", "weights", "file"):
            return f"--{name} {value}"
        if name == "rename":
            return f"--rename {found[2]}"
        if value.startswith("("):  # a pair, which --config takes as JSON
            return f"--config '{name}=[{value[1:-1]}]'"
        return f"--config {name}={value}"

    text = _LOAD.sub(lambda found: " ".join(map(option, _FIELD.finditer(found[1]))), text)
    for python, words in _WORDS.items():
        text = text.replace(python, words)
    return _ARGUMENT.sub(lambda found: f"--{found[1].replace('_', '-')} ", text)
