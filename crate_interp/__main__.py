"""Runs the command crate-interp as python -m crate_interp."""

from crate_interp.cli import main

main()
