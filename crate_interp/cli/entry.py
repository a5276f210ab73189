"""The options before a command."""

from typing import Annotated

import typer

import crate_interp as ci
from crate_interp.cli.options import say


def _show_version(wanted: bool | None) -> None:
    if wanted:
        say(f"crate-interp {ci.__version__}")
        raise typer.Exit


def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    """Load a CRATE, measure what each layer does, read the report."""
