"""Makes the command line from the table of commands, and puts errors in terms of its options."""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand

import crate_interp as ci
from crate_interp.cli import request as options
from crate_interp.cli.commands import COMMANDS, Command
from crate_interp.cli.request import CHUNKED, GROUPS, Request, of_annotations, say, typed
from crate_interp.core import folders, run_options
from crate_interp.core.safe_text import plain

FAILED, UNEXPECTED, INTERRUPTED = 2, 3, 130  # exit codes
QUIET = "CRATE_INTERP_QUIET"  # read by crate_interp/core/run_options.py, also in worker processes
EXIT_CODES = (
    "Exit codes: 0 done; 2 the command cannot do what was asked, and an error line says why; 3 an "
    "unexpected error (--debug shows its traceback); 130 interrupted."
)
_LONGEST = 1500  # characters of an error
requests: list[Request] = []  # the last one of this process
_OURS = ("progress", "resume")  # --quiet and --restart stand for them
_FIRST = ("source", "data", "out")  # in the help of a command
_SHARED = of_annotations(Request)


def command_function(name: str, command: Command) -> Callable[..., None]:
    """Returns a function with the signature that typer reads, which runs a command."""
    own = of_annotations(command.call)
    verb = options.of_function(command.verb) if command.verb else {}
    verb = {item: verb[item] for item in verb if item not in (*command.without, *_OURS)}
    chunked = "chunk_size" in verb
    every = (*command.fields, *CHUNKED * chunked, *options.SESSION)
    shared = {item: _SHARED[item] for item in every}
    alone = "data" in shared and not chunked  # one process writes the folder

    def run(**values: Any) -> None:
        missing = [typed(item) for item in command.required if values[item] is None]
        if missing:
            raise ValueError(f"missing: {', '.join(missing)}. {example(name)}")
        if values["quiet"] and not values.get("dry_run"):
            os.environ[QUIET] = "1"
        arguments = {item: values.pop(item) for item in own}
        if values.get("out") is None:
            model = Path(str(values.get("source") or arguments.get("a"))).name
            values["out"] = Path("runs", f"{name}-{re.sub('[^A-Za-z0-9@._-]+', '-', model)}")
        given = {item: value for item in verb if (value := values.pop(item)) is not None}
        request = Request(given | {"resume": not values["restart"]} if chunked else given, **values)
        requests[:] = [request]
        if request.dry_run:
            from crate_interp.questions.asking import dry_run

            with TemporaryDirectory() as scratch, dry_run():
                request.options["progress"] = not request.quiet
                command.call(replace(request, out=Path(scratch, "out")), **arguments)
            return
        with folders.locked(request.out) if alone else nullcontext():
            command.call(request, **arguments)

    first = {item: shared.pop(item) for item in _FIRST if item in shared}
    items = options.parameters({**first, **own, **verb, **shared}, command.required)
    run.__name__, run.__doc__ = name, command.call.__doc__
    vars(run)["__signature__"] = inspect.Signature(items)
    run.__annotations__ = {item.name: item.annotation for item in items}
    return run


class GroupedHelp(TyperCommand):
    """A command whose help has a section for each of GROUPS, after its own options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the sections of the help."""
        sections: dict[str, list[Any]] = {title: [] for title in ("Arguments", "Options", *GROUPS)}
        for item in self.get_params(ctx):
            title = "Arguments" if item.param_type_name == "argument" else "Options"
            title = next((group for group, names in GROUPS.items() if item.name in names), title)
            sections[title] += filter(None, [item.get_help_record(ctx)])
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def example(name: str) -> str:
    """Returns a command line that can be typed as it is."""
    command = COMMANDS[name]
    out = f" --out runs/{name}" if "out" in command.fields else ""
    return f"Example: crate-interp {name} {command.example}{out}"


def _show_version(flag: bool | None) -> None:
    if flag:
        say(f"crate-interp {ci.__version__}")
        raise typer.Exit


def root(
    debug: Annotated[bool, Option("--debug", help=_SHARED["debug"].text)] = False,
    version: Annotated[
        bool | None,
        Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    """Load a CRATE, measure what each layer does, read the report."""


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.callback(epilog=EXIT_CODES)(root)
_functions = {name: command_function(name, command) for name, command in COMMANDS.items()}
for name, function in _functions.items():
    app.command(cls=GroupedHelp, epilog=example(name))(function)

# parameters of Python that an error may name, such as limit=0, and that are options
_NAMES = {item for each in _functions.values() for item in each.__annotations__}
_NAMES -= {*options.POSITIONAL, "config", "head", "json"}
_ARGUMENT = re.compile(rf"(?<![\w.(])({'|'.join(sorted(_NAMES))})=(True\b)?")
_LOAD = re.compile(r"ci\.load\(\.\.\., ((?:[^()]|\([^()]*\))*)\)")
_FIELD = re.compile(r"(\w+)=((?:\([^()]*\)|'[^']*'|[^,\s])+)")
_WORDS = {
    "ci.list_models()": "`crate-interp models`",
    "load the model with labels=[...], ": 'give --config \'labels=["...", "..."]\', ',
    "Load it with the mean and std of its training, ": (
        'Give --config "mean=[...]" and --config "std=[...]" of its training, '
    ),
}


def spoken(text: str) -> str:
    """Returns an error message with command-line options in place of Python's arguments.

    ci.load(..., n_heads=6) becomes --config n_heads=6, limit=0 becomes --limit 0.
    """

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("'")
        if name in options.LOADING:
            return f"--{name} {match[2] if name == 'rename' else value}"
        if value.startswith("("):  # a pair, which a shell reads
            return f"--config '{name}=[{value[1:-1]}]'"
        return f"--config {name}={value}"

    text = _LOAD.sub(lambda match: " ".join(map(option, _FIELD.finditer(match[1]))), text)
    for python, words in _WORDS.items():
        text = text.replace(python, words)
    return _ARGUMENT.sub(lambda at: typed(at[1]) + " " * (at[2] is None), text)


def main() -> None:
    """Runs the command line. An error is one line on stderr; --debug shows the traceback."""
    quiet = os.environ.get(QUIET)
    requests.clear()
    run_options.say_as[:] = [spoken]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may lack letters of a label
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _complain(f"warning: {message}")
        code = _run()
    run_options.say_as.clear()
    if quiet is None:
        os.environ.pop(QUIET, None)
    raise SystemExit(code)


def _run() -> int:
    """Runs a command and returns its exit code; prints an error as one line on stderr."""
    try:
        app()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, (ValueError, OSError, KeyError)):
            words = error.args[0] if isinstance(error, KeyError) and error.args else error
            _complain(spoken(str(words)))
            return FAILED
        text = ": ".join(part for part in (type(error).__name__, plain(error, _LONGEST)) if part)
        _complain(f"unexpected {text} (--debug shows the traceback)")
        return UNEXPECTED
    if code == INTERRUPTED:  # typer turns an interrupt into an exit
        out = requests[0].out if requests else None
        there = f"what was finished is in {out}" if out and out.exists() else "nothing was finished"
        there += ", and the same command continues" * bool(out and (out / "chunks").exists())
        _complain(f"interrupted; {there}")
    return code


def _complain(words: Any) -> None:
    with suppress(OSError):
        sys.stderr.write(f"crate-interp: {plain(words, _LONGEST)}\n")
        sys.stderr.flush()
