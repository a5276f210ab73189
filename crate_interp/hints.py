"""What to type instead: the nearest names to one that is not known."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A sentence with up to three names near to `name`, or `otherwise` where none is near."""
    near = difflib.get_close_matches(name, known, n=3)
    return f"Did you mean {', '.join(near)}?" if near else otherwise
