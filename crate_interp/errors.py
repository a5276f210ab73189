"""The error of everything that can be wrong with a checkpoint."""

_LONGEST = 1500


class CheckpointError(ValueError):
    """A file, folder, name or config that cannot become a model.

    The text says what came, what was wanted and what to type instead. It is one line of at most
    1,500 characters, however long the names in a file are.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ...")
