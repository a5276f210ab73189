"""The options of commands that measure in chunks: in several processes, and resumed."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from crate_interp.cli.command_line import taking
from crate_interp.cli.options import Dtype, Limit, Threads, load, say, take_threads
from crate_interp.core import checks

R = TypeVar("R")
T = TypeVar("T")

# Options of the commands that measure in chunks: name -> (annotation, default).
CHUNKED: dict[str, tuple[Any, Any]] = {
    "limit": (Limit, None),
    "batch_size": (
        Annotated[int | None, typer.Option(help="Samples that run at once. Default: 32.")], None
    ),
    "chunk_size": (
        Annotated[int, typer.Option(help="Samples that are measured, and kept, in one piece.")], 256
    ),
    "shard": (
        Annotated[
            str | None,
            typer.Option(
                help="i/n, i from 0: measure every n-th chunk. torchrun needs no --shard."
            ),
        ],
        None,
    ),
    "engine": (Annotated[str, typer.Option(help="local, or ray for a Ray cluster.")], "local"),
    "address": (
        Annotated[
            str | None,
            typer.Option(help="Of the Ray cluster, such as auto. Default: one on this machine."),
        ],
        None,
    ),
    "restart": (
        Annotated[bool, typer.Option("--restart", help="Start over; chunks that are there go.")],
        False,
    ),
    "workers": (
        Annotated[int, typer.Option(help="Processes that decode pictures. 0: none beside this.")], 0
    ),
    "skip_bad": (
        Annotated[
            bool, typer.Option("--skip-bad", help="List and leave out what cannot be decoded.")
        ],
        False,
    ),
    "threads": (Threads, None),
    "device": (
        Annotated[
            str | None,
            typer.Option(help="cpu, cuda or cuda:1. Default: the GPU of this rank, if any."),
        ],
        None,
    ),
    "dtype": (Dtype, None),
    "format": (
        Annotated[
            str | None, typer.Option(help="csv, markdown or latex: print the main table as such.")
        ],
        None,
    ),
}  # fmt: skip


def in_chunks(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that has the options of `CHUNKED` too, and gets them as its `run`.

    --threads counts before the command begins, because torch reads it when it is imported.
    """
    own = [item for item in inspect.signature(command).parameters.values() if item.name != "run"]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kind)
        for name, (kind, value) in CHUNKED.items()
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in CHUNKED}
        if options["format"] is not None:
            checks.one_of("format", options["format"], ("csv", "markdown", "latex"))
        take_threads(options.pop("threads"))
        _address(options.pop("address"), options["engine"])
        command(**given, run=options)

    return taking(run, [*own, *more])


def _address(address: str | None, engine: str) -> None:
    if address is None:
        return
    if engine != "ray":
        raise ValueError(f"--address {address}: that is for --engine ray.")
    os.environ["RAY_ADDRESS"] = address


def measuring(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the options of `CHUNKED` say to `ci.sweep` and the like."""
    own = ("restart", "device", "dtype", "format")
    given = {name: value for name, value in run.items() if name not in own}
    if given["batch_size"] is None:
        del given["batch_size"]
    return given | {"resume": not run["restart"]}


def loaded(
    source: str,
    family: str | None,
    revision: str | None,
    config: list[str] | None,
    run: Mapping[str, Any],
    out: Path,
) -> Any:
    """Returns the model that a command names, on the device of this process.

    Of several that torchrun starts, the first of a machine fetches it, and the others wait.
    """
    from crate_interp.sweeps.engines.node_ranks import after_rank_0, device_of_rank

    with after_rank_0(out):
        device = run["device"] or device_of_rank()
        return load(source, family, revision, config, device, run["dtype"])


def say_table(result: Any, run: Mapping[str, Any], text: str = "") -> None:
    """Prints the main table of a result in the format that --format names, or else a text."""
    name = run["format"]
    if name is not None:
        text = getattr(result, f"to_{name}")()
    if text:
        say(text)


def conclude(run: Mapping[str, Any], text: str) -> None:
    """Prints the last words; on stderr where the output is a table that a program may read."""
    if run["format"] is None:
        say(text)
    else:
        sys.stderr.write(f"{text}\n")


def page_of(result: R, out: Path, write: Callable[[R, Path], T]) -> T:
    """Returns what `write` makes of a result; of several processes one writes at a time."""
    from crate_interp.sweeps.ledgers.ledger import alone  # brings pandas

    with alone(out):
        return write(result, out)
