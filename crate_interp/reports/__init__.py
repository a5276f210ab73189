"""ci.report: a page about a model and its data."""

from crate_interp.reports.run import report

__all__ = ["report"]
