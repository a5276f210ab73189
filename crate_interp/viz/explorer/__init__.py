"""The explorer: one sample, on which a person points at patches or tokens."""
