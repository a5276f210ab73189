"""Measures of the rows of an attention pattern: how sharply each query attends."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.core.device_waits import waits
from crate_interp.measures.checks import Pattern, fewest, require_entries

__all__ = [
    "attention_entropy", "causal_uniform_entropy", "effective_support", "mass_cover",
    "official_attention_entropy", "top_mass",
]  # fmt: skip

_EMPTY = "there is no attention to measure"
_PIECE = 2**17  # entries handled at a time: half a megabyte of float32
# nats; even thousands of entries below 1e-38 add at most 1e-33 to the entropy of a row
_ALMOST_NONE = 1e-24


def attention_entropy(pattern: Pattern) -> Float[Tensor, "*batch query"]:
    """Returns the entropy of each query's distribution over keys, `-sum_j p_j ln p_j`.

    pattern `[..., query, key]` -> `[..., query]` in nats, 0 (one key) to ln(number of keys)
    (uniform). It leaves out the 1e-8 that JoMA's code adds inside the logarithm: see
    `official_attention_entropy`. A row that holds NaN, Inf or a negative number gives NaN. Raises
    ValueError if there are no queries or no keys.
    """
    require_entries(pattern, "query key", _EMPTY)
    if pattern.requires_grad:
        entropy = -(pattern.masked_fill(pattern == 0, 1).log() * pattern).sum(dim=-1)
    else:  # in pieces that fit the processor's cache, since the pattern is a layer's largest tensor
        rows = pattern.reshape(-1, pattern.shape[-1])
        length = max(1, _PIECE // rows.shape[-1]) if rows.device.type == "cpu" else len(rows)
        entropy = torch.cat([_entropy_of_rows(piece) for piece in rows.split(max(1, length))])
        entropy = entropy.view(pattern.shape[:-1])
    return entropy.masked_fill(~entropy.isfinite(), torch.nan)


def top_mass(pattern: Pattern, k: int) -> Float[Tensor, "*batch query"]:
    """Returns the mass on each query's k most attended keys.

    pattern `[..., query, key]` -> `[..., query]`, k / (number of keys) (uniform) to 1. A row that
    holds NaN or Inf gives NaN. Raises ValueError if k is below 1 or above the number of keys.
    """
    require_entries(pattern, "query key", _EMPTY)
    if not 1 <= k <= pattern.shape[-1]:
        most = pattern.shape[-1]
        raise ValueError(f"k={k}: give a number from 1 to {most}, the number of keys.")
    mass = pattern.amax(dim=-1) if k == 1 else pattern.topk(k, dim=-1).values.sum(dim=-1)
    return _valid(mass, pattern)


def effective_support(pattern: Pattern) -> Float[Tensor, "*batch query"]:
    """Returns the number of keys a query effectively attends to, `1 / sum_j p_j^2`.

    pattern `[..., query, key]` -> `[..., query]` in keys, 1 (one key) to the number of keys
    (uniform). A row that holds NaN or Inf gives NaN. Raises ValueError if there are no queries or
    no keys.
    """
    require_entries(pattern, "query key", _EMPTY)
    return _valid(pattern.square().sum(dim=-1).reciprocal(), pattern)


def mass_cover(pattern: Pattern, mass: float) -> Float[Tensor, "*batch query"]:
    """Returns the smallest number of keys that together hold a share `mass` of a query's attention.

    pattern `[..., query, key]` -> `[..., query]` in keys, 1 to the number of keys. The share is of
    the row's own sum, so that a row which sums to 0.9999 can be covered too. A row that holds NaN
    or Inf gives NaN. Not differentiable. Raises ValueError if mass is outside (0, 1], or if there
    are no queries or no keys.
    """
    require_entries(pattern, "query key", _EMPTY)
    return _valid(fewest(pattern, "mass", mass)[0].to(pattern.dtype), pattern)


def official_attention_entropy(pattern: Pattern) -> Float[Tensor, "*batch query"]:
    """Returns the entropy as JoMA's code computes it, `-sum_j p_j ln(p_j + 1e-8)`.

    pattern `[..., query, key]` -> `[..., query]` in nats. It is below `attention_entropy` by at
    most 1e-8 times the number of keys: a query that attends to one key has -1e-8 instead of 0.
    Source: JoMA in facebookresearch/luckmatters. A row that holds NaN or Inf gives NaN. Raises
    ValueError if there are no queries or no keys.
    """
    require_entries(pattern, "query key", _EMPTY)
    return _valid(-(pattern * (pattern + 1e-8).log()).sum(dim=-1), pattern)


def causal_uniform_entropy(n: int) -> float:
    """Returns the mean entropy of uniform attention over each token's past, in nats.

    It is `1/n sum_{i=1..n} ln i` for n queries, because query i sees i keys. This chance level of a
    causal model is below ln n, the chance level of a model that sees all tokens. Raises ValueError
    if n is below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: give a number of tokens of at least 1.")
    return math.lgamma(n + 1) / n


def _entropy_of_rows(rows: Float[Tensor, "row key"]) -> Float[Tensor, "row"]:
    """Returns the entropy of rows; NaN for a row that holds a negative number.

    0 ln 0 counts as 0: within the logarithm, entries below the smallest float whose logarithm is
    fast are raised to this float. This matters only in rows of almost no entropy, which take a
    second pass.
    """
    least = min(torch.finfo(rows.dtype).tiny, 2**-24)
    entropy = -rows.clamp_min(least).log_().mul_(rows).sum(dim=-1)
    odd = (rows.amin(dim=-1) < 0) | (entropy.abs() < _ALMOST_NONE)
    if waits(odd):
        return torch.where(odd, _exact_entropy(rows), entropy)
    if odd.any():
        entropy[odd] = _exact_entropy(rows[odd])
    return entropy


def _exact_entropy(rows: Float[Tensor, "row key"]) -> Float[Tensor, "row"]:
    return -(rows.masked_fill(rows == 0, 1).log() * rows).sum(dim=-1)


def _valid(value: Float[Tensor, "*batch query"], pattern: Pattern) -> Tensor:
    """Sets the value of each row that holds NaN or Inf to NaN."""
    return value.masked_fill(~pattern.sum(dim=-1).isfinite(), torch.nan)
