"""Options of commands, made from the signatures of the functions that commands call.

A public function's signature is read from the text of its file, because importing the function
takes seconds, and --help and a misspelt option are answered at once.
"""

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from typer import Argument, Option

import crate_interp as ci
from crate_interp.core.run_options import Pass, Run, RunOptions

POSITIONAL = ("source", "a", "b")


class Field(NamedTuple):
    """What an option takes: a type, or a function that reads a text."""

    kind: Any
    default: Any
    text: str  # of --help


def names(text: str) -> list[str]:
    """Returns the parts of a text with commas."""
    return [word.strip() for word in text.split(",") if word.strip() or "," not in text]


def answers(text: str) -> Any:
    """Returns an answer, or a pair of answers, that a text gives by number or name."""
    words = names(text) if text.count(",") == 1 else [text]
    found = [int(word) if word.isascii() and word.isdigit() else word for word in words]
    return found[0] if len(found) == 1 else tuple(found)


# annotation -> what its option takes; a parameter with another annotation has no option
KINDS: dict[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "Sequence[int]": list[int],
    "Sequence[str]": names, "Probes": names, "Target": answers, "Twins": int,
    "int | Sequence[int]": int,
}  # fmt: skip


def of_function(name: str) -> dict[str, Field]:
    """Returns the options of a public function such as "circuits.concentration"."""
    room, _, verb = name.rpartition(".")
    module = ci._MODULE_OF[room or verb].replace(".", "/")
    place = Path(ci.__file__).parents[1] / module
    paths = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    parts = (path.read_text(encoding="utf-8").partition(f"\ndef {verb}(") for path in paths)
    text = next(text.partition("\n\n\n")[0] for _, found, text in parts if found)
    function: Any = ast.parse(f"def {verb}({text}").body[0]
    lines = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", ast.get_docstring(function) or "", re.M)
    helps = {name: " ".join(words.split()) for name, words in lines}
    options = {}
    for item, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        kind = KINDS.get(ast.unparse(item.annotation).removesuffix(" | None"))
        if kind is not None:
            options[item.arg] = Field(kind, ast.literal_eval(default), helps.get(item.arg, ""))
    if function.args.kwarg is not None:
        run = Run if ast.unparse(function.args.kwarg.annotation) == "Unpack[Run]" else Pass
        options |= of_annotations(run, RunOptions)
    return options


def of_annotations(
    thing: Callable[..., Any], call: Callable[..., Any] | None = None
) -> dict[str, Field]:
    """Returns the options that a class or function names by Annotated[type, help].

    call: what has the defaults, if `thing` has none.
    """
    options, items = {}, signature(call or thing).parameters
    for name, hint in get_type_hints(thing, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            kind, text, *typed = get_args(hint)
            options[name] = Field(typed[0] if typed else kind, items[name].default, text)
    return options


def typed(name: str) -> str:
    """Returns a parameter as it is typed: --data, or SOURCE."""
    return name.upper() if name in POSITIONAL else f"--{name.replace('_', '-')}"


def parameters(options: Mapping[str, Field], required: Iterable[str]) -> list[Parameter]:
    """Returns what typer reads of options.

    A required option is optional for typer, which would name one missing option after another. A
    bool that is off by default has no --no-NAME.
    """
    items = []
    for name, (kind, default, text) in options.items():
        if isinstance(default, tuple) and default:  # left to the function that has it
            text += f" Default: {', '.join(map(str, default))}."
        how: dict[str, Any] = {"help": text + " [required]" * (name in required)}
        if kind in (names, answers):
            how = {"parser": kind, "help": f"{how['help']} Separate several with commas."}
            kind = str
        if default is None or name in required or isinstance(default, tuple):
            kind, default = kind | None, None
        flags = [typed(name)] if default is not True else []
        positional = name in POSITIONAL
        info = Argument(metavar=typed(name), **how) if positional else Option(*flags, **how)
        kind = Annotated[kind, info]
        items.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return items
