"""Comparison of two models, or of two results."""
