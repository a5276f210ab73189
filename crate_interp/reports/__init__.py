"""ci.report: a page about a model and its data."""
