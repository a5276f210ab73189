"""Texts in and out of language models: tokens, padding, windows, generation."""
