"""Stores: activations on the disk, to write, map into memory, and measure again."""
