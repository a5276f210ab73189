"""How a command reads its line: all missing options at once, and the options of every command."""

import copy
import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args

import typer
from typer.models import ArgumentInfo

QUIET = "CRATE_INTERP_QUIET"  # read by crate_interp/core/progress.py, also in worker processes

# what to type, shown if something is missing and at the end of each help text
EXAMPLES = {
    "report": "report crate-tiny-fashion --data embedded:fashion --out runs/first",
    "sweep": "sweep crate-tiny-fashion --data embedded:fashion --out runs/sweep",
    "audit": "audit crate-tiny-fashion --data embedded:fashion --limit 64 --out runs/audit",
    "compare": "compare crate-tiny-fashion crate-tiny-fashion@step-640 --data embedded:fashion "
    "--out runs/compare",
    "segment": "segment crate-tiny-cutouts --data embedded:cutouts --out runs/segment",
    "atoms": "atoms crate-tiny-fashion --data embedded:fashion --out runs/atoms",
    "atlas": "atlas crate-tiny-cutouts --data embedded:cutouts --limit 16 --out runs/atlas",
    "ablate": "ablate crate-tiny-fashion --data embedded:fashion --out runs/ablate",
    "merge": "merge runs/sweep",
    "explore": "explore crate-tiny-fashion --data embedded:fashion --out runs/explore",
    "convert": "convert crate-alpha-b16 --out models/alpha-b16",
    "verify": "verify runs/sweep",
    "models": "models --json",
    "doctor": "doctor",
}


# options of every command
_MORE: dict[str, Any] = {
    "quiet": Annotated[bool, typer.Option("--quiet", help="Show no progress.")],
    "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
}


def add(app: typer.Typer, command: Callable[..., None]) -> None:
    """Adds a function to the command line, with its example at the end of its help."""
    example = f"Such as: crate-interp {EXAMPLES[command.__name__]}"
    app.command(epilog=example)(_complete(command, example))


def _complete(command: Callable[..., None], example: str) -> Callable[..., None]:
    """Returns a command that has --quiet and --debug, and names all missing options at once.

    Typer would name one missing option after another. So required options are optional for typer,
    and the help text says which are required.
    """
    own = inspect.signature(command).parameters.values()
    needed = {item.name: _written(item) for item in own if item.default is inspect.Parameter.empty}

    @wraps(command)
    def run(**given: Any) -> None:
        missing = [words for name, words in needed.items() if given[name] is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(f"{', '.join(missing)} {verb} missing. {example}")
        for name in _MORE:  # --debug is read where an error ends the process
            if given.pop(name) and name == "quiet":
                os.environ[QUIET] = "1"
        command(**given)

    taken = [_optional(item) if item.name in needed else item for item in own]
    taken += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in _MORE.items()
    ]
    return taking(run, taken)


def taking(run: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Returns a wrapper whose signature, read by typer, has these parameters as keywords."""
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


def _optional(item: inspect.Parameter) -> inspect.Parameter:
    """Returns a parameter that is optional for typer, and whose help says that it is required."""
    kind, info = get_args(item.annotation)
    info = copy.copy(info)
    info.help = f"{info.help} [required]"
    if isinstance(info, ArgumentInfo):
        info.metavar = item.name.upper()
    check = info.callback
    if check is not None:
        info.callback = lambda value: None if value is None else check(value)
    return item.replace(annotation=Annotated[kind | None, info], default=None)
