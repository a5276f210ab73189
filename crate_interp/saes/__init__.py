"""Sparse autoencoders on hook points."""

__all__: list[str] = []
