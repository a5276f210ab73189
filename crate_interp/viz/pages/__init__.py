"""Pages of results, each one file."""
