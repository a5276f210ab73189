"""ablate_heads."""

from crate_interp.results import Result


class HeadAblation(Result):
    """What each head's ablation costs."""


def ablate_heads(model: object, data: object) -> object:
    """Returns what the ablation of each head costs, with intervals."""
    raise NotImplementedError
