"""Adds commands to the command line, and puts error messages in terms of options."""

import copy
import inspect
import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer import Option
from typer.models import ArgumentInfo

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
    "merge": "merge runs/sweep",
    "explore": "explore crate-tiny-fashion --data embedded:fashion --without --out runs/explore",
    "graph": "graph crate-tiny-fashion --data embedded:fashion --out runs/graph",
    "convert": "convert crate-alpha-b16 --out models/alpha-b16",
    "inspect": "inspect crate-tiny-fashion",
    "models": "models --json",
    "doctor": "doctor",
}


# options of every command
_MORE: dict[str, Any] = {
    "quiet": Annotated[bool, Option("--quiet", help="Show no progress.")],
    "debug": Annotated[bool, Option("--debug", help="Show the traceback of an error.")],
}
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


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Adds a function to the command line, with its example at the end of its help."""
    example = f"Example: crate-interp {EXAMPLES[command.__name__]}"
    app.command(epilog=example)(_complete(command, example))


def _complete(command: Callable[..., None], example: str) -> Callable[..., None]:
    """Returns a command that has --quiet and --debug, and names all missing options at once.

    Typer would name one missing option after another. So required options are optional for typer,
    and the help text says which are required. Without --out, a command writes into
    runs/COMMAND-MODEL, except `convert`.
    """
    own = inspect.signature(command).parameters.values()
    needed = {item.name: _written(item) for item in own if item.default is inspect.Parameter.empty}
    folder = None if command.__name__ == "convert" else needed.pop("out", None)

    @wraps(command)
    def run(**given: Any) -> None:
        missing = [words for name, words in needed.items() if given[name] is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(f"{', '.join(missing)} {verb} missing. {example}")
        for name in _MORE:  # --debug is not used here: main() reads it
            if given.pop(name) and name == "quiet":
                os.environ[QUIET] = "1"
        if folder and given["out"] is None:
            given["out"] = _folder(command, given)
        command(**given)

    taken = [
        _optional(item, "[required]" if item.name in needed else "Default: runs/COMMAND-MODEL.")
        if item.name in needed or (folder and item.name == "out")
        else item
        for item in own
    ]
    taken += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in _MORE.items()
    ]
    return taking(run, taken)


def taking(run: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Gives a function the signature that typer reads: these parameters, as keywords."""
    taken = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in parameters]
    vars(run).pop("__wrapped__")
    vars(run)["__signature__"] = inspect.Signature(taken)
    run.__annotations__ = {item.name: item.annotation for item in taken}
    return run


def _written(item: inspect.Parameter) -> str:
    """Returns a parameter as written on the command line: --data, or SOURCE."""
    info = get_args(item.annotation)[1]
    argument = isinstance(info, ArgumentInfo)
    return item.name.upper() if argument else f"--{item.name.replace('_', '-')}"


def _folder(command: Callable[..., None], given: dict[str, Any]) -> Path:
    """Returns the folder of a command that was given none, checked as a given one is."""
    model = Path(str(given.get("source") or given.get("a"))).name
    out = Path("runs") / f"{command.__name__}-{re.sub('[^A-Za-z0-9@._-]+', '-', model)}"
    check = get_args(inspect.signature(command).parameters["out"].annotation)[1].callback
    return out if check is None else check(out)


def _optional(item: inspect.Parameter, words: str) -> inspect.Parameter:
    """Returns a required parameter in a form that is optional for typer.

    words: what its help says about that.
    """
    kind, info = get_args(item.annotation)
    info = copy.copy(info)
    info.help = f"{info.help} {words}"
    if isinstance(info, ArgumentInfo):
        info.metavar = item.name.upper()
    check = info.callback
    if check is not None:
        info.callback = lambda value: None if value is None else check(value)
    return item.replace(annotation=Annotated[kind | None, info], default=None)


def spoken(text: str) -> str:
    """Returns an error message with command-line options in place of Python's arguments.

    ci.load(..., n_heads=6) becomes --config n_heads=6, limit=0 becomes --limit 0.
    """
    text = _LOAD.sub(lambda found: " ".join(map(_config, _FIELD.finditer(found[1]))), text)
    for python, said in _WORDS.items():
        text = text.replace(python, said)
    return _ARGUMENT.sub(lambda found: f"--{found[1].replace('_', '-')} ", text)


def _config(found: re.Match[str]) -> str:
    name, value = found[1], found[2].strip("'")
    if name in ("family", "file", "revision", "weights"):
        return f"--{name} {value}"
    if name == "rename":
        return f"--rename {found[2]}"
    if value.startswith("("):  # a pair, which --config takes as JSON
        return f"--config '{name}=[{value[1:-1]}]'"
    return f"--config {name}={value}"
