"""Our own readers of weight files: they return tensors, and execute nothing in a file."""
