"""The explorer: a page of one sample, on which you point at patches or tokens."""
