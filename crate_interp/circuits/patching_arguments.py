"""Checks of the arguments of patching: two inputs, a metric of the logits, and heads."""

import math
from collections.abc import Callable, Sequence
from numbers import Real

import numpy as np
from jaxtyping import Float
from torch import Tensor

from crate_interp.core import checks
from crate_interp.models.hooked import HookedModel, check_hooked

Head = tuple[int, int]  # layer, number in the layer
Metric = Callable[[Tensor], Tensor | float]  # takes logits, returns one number
# takes logits, returns one number for all inputs, or a number for each input
MetricBySample = Callable[[Tensor], Tensor | float]


def check_runs(model: HookedModel, source: Tensor, base: Tensor) -> None:
    """Raises ValueError unless a hooked model with logits gets two inputs of the same shape."""
    check_hooked(model)
    if model.cfg.kind not in ("vision", "text"):
        raise ValueError(
            "patching needs a classifier of images or a language model: "
            "instead of a CLIP, give one tower, model.visual or model.text."
        )
    if not isinstance(source, Tensor) or not isinstance(base, Tensor) or source.shape != base.shape:
        got = " and ".join(_described(inputs) for inputs in (source, base))
        raise ValueError(f"source and base are {got}: give tensors of one shape, images or tokens.")


def heads_of(name: str, pairs: Sequence[Head], layers: int, heads: int) -> list[Head]:
    """Returns (layer, head) pairs of ints.

    Raises ValueError, with the argument's `name`, if there are no pairs, or if a pair is not a head
    of a model of `layers` layers with `heads` heads each.
    """
    listed = isinstance(pairs, (list, tuple)) and len(pairs) > 0
    if not listed or not all(_is_head(pair, layers, heads) for pair in pairs):
        raise ValueError(
            f"{name}={pairs!r}: give (layer, head) pairs, layers 0 to {layers - 1}, "
            f"heads 0 to {heads - 1}."
        )
    return [(int(layer), int(head)) for layer, head in pairs]


def as_number(value: Tensor | float) -> float:
    """Returns a metric's value as a float.

    Raises ValueError unless it is one finite number.
    """
    one = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
    number = float(value) if one else math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"the metric returned {returned(value)}: return one finite number, such as "
            "(logits[:, 3] - logits[:, 5]).mean()."
        )
    return number


def as_values(value: Tensor | float, samples: int) -> Float[np.ndarray, "sample"]:
    """Returns a metric's values for the inputs, or its single value for all.

    Raises ValueError unless the value is one finite number, or a finite number for each input.
    """
    if not isinstance(value, Tensor) or value.numel() == 1:
        return np.array([as_number(value)])
    if value.shape != (samples,) or not value.isfinite().all():
        raise ValueError(
            f"the metric returned {returned(value)} for {samples} inputs: return one finite number "
            f"or {samples} finite numbers, such as (logits[:, 3] - logits[:, 5])."
        )
    return value.detach().double().cpu().numpy()


def returned(value: object) -> str:
    """Returns the text that an error shows for a metric's value."""
    if not isinstance(value, Tensor):
        return checks.shown(value)
    return f"a tensor {list(value.shape)}" + ", not all finite" * (not value.isfinite().all())


def _described(inputs: object) -> str:
    return str(list(inputs.shape)) if isinstance(inputs, Tensor) else type(inputs).__name__


def _is_head(pair: object, layers: int, heads: int) -> bool:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return False
    numbers = zip(pair, (layers, heads), strict=True)
    return all(checks.is_int(number) and 0 <= number < count for number, count in numbers)
