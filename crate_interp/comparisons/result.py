"""Comparison."""

from crate_interp.results import Result


class Comparison(Result):
    """Paired differences of two models or results."""
