"""Loads models: the table of public files, the published layouts, and our own format."""
