"""The error of everything that can be wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A file, folder, name or config that cannot become a model; the text says what came, what was wanted, what to type."""
