"""Activations on the disk: written, mapped into memory, and measured again."""
