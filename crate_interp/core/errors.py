"""Errors about checkpoints, and about text that a model cannot take."""

from crate_interp.core.safe_text import plain

_LONGEST = 1500


class CheckpointError(ValueError):
    """A file, folder, name or config that cannot become a model.

    The text says what came, what was wanted and what to type instead. It is one line of at most
    1,500 characters without control characters, whatever the names in a file are.
    """

    def __init__(self, message: str) -> None:
        super().__init__(plain(message, _LONGEST))


class MissingSettingError(CheckpointError):
    """A setting that a checkpoint does not tell: its name, what to type for it, and why."""

    def __init__(self, name: str, example: str, why: str = "") -> None:
        super().__init__(f"{name} cannot be inferred: {why}. Give ci.load(..., {example}).")
        self.name, self.example, self.why = name, example, why


class NoTokenizerError(CheckpointError):
    """The tokenizer that belongs beside a model's weights is missing."""


class TextError(ValueError, AssertionError):
    """Text that a model cannot take, or a token that its vocabulary lacks.

    It is an AssertionError too, since TransformerLens raises one in these places.
    """


class ShortTextError(TextError):
    """Texts that do not fill one window of tokens when they are joined."""
