"""compare."""


def compare(a: object, b: object) -> object:
    """Returns the paired differences of two results or two models."""
    raise NotImplementedError
