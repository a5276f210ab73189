"""The command line: crate-interp sweep | report | audit | compare | segment | atlas | graph ..."""

from crate_interp.cli.command_line import EXIT_CODES, app, main
from crate_interp.cli.commands import COMMANDS

__all__ = ["COMMANDS", "EXIT_CODES", "app", "main"]
