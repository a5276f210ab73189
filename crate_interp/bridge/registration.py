"""register."""


def register() -> None:
    """Registers config and model classes with transformers."""
    raise NotImplementedError
