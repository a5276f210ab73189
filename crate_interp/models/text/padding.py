"""Padding: which tokens of a batch are real, and their positions among the real ones."""

from typing import Literal

import torch
from torch import Tensor

from crate_interp.models.compat.torch_compile import readable
from crate_interp.models.layers.context import Padding, Past
from crate_interp.models.layers.shapes import Ids, Mask


def padding_of(
    mask: Tensor | None, batch: int, n_new: int, past: Past | None, device: torch.device
) -> Padding | None:
    """Returns the padding that an attention mask describes, or None if every token is real.

    mask: `[batch, pos]` of 0 and 1, or False and True, over the past tokens followed by the new
    tokens. Without a mask, the past keeps its own mask and the new tokens are real. Zeros may be at
    any position. Raises ValueError for a wrong shape, values other than 0 and 1, a row without any
    real token, and a mask that contradicts the mask of the past.
    """
    before, length = past.mask if past else None, past.length if past else 0
    if mask is None:
        if before is None:
            return None
        return Padding(torch.cat([before, before.new_ones(batch, n_new)], dim=1))
    if not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask is {type(mask).__name__}: give a tensor of 0 and 1.")
    mask = mask[None] if mask.ndim == 1 else mask
    if mask.shape != (batch, length + n_new):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}: give shape [{batch}, {length + n_new}], "
            f"one row per text and one number per token, first of the {length} in the past. It "
            "says which tokens are padding; the model decides which earlier tokens a token sees."
        )
    real = mask.to(device).bool()
    if readable(mask):
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError("attention_mask: give 1 for real tokens and 0 for padding.")
        if not bool(real.any(dim=1).all()):
            row = int(real.any(dim=1).logical_not().nonzero()[0])
            raise ValueError(f"attention_mask hides every token of row {row}: leave the row out.")
        known = torch.ones_like(real[:, :length]) if before is None else before
        if not torch.equal(real[:, :length], known):
            raise ValueError(
                f"attention_mask differs from the mask with which the {length} tokens of the past "
                "were read: repeat that mask for them, or give no mask."
            )
        if before is None and bool(real.all()):
            return None  # so that bits and cost are the same as without a mask
    return Padding(real)


def after_past(mask: Tensor, past: Past | None) -> Tensor:
    """Returns the attention mask of the past, followed by the mask of the new tokens."""
    if past is None or not past.length:
        return mask
    before = past.mask if past.mask is not None else mask.new_ones(len(mask), past.length)
    return torch.cat([before.to(mask), mask], dim=1)


def check_side(side: str | None) -> None:
    """Raises ValueError for anything but "left", "right" and None."""
    if side not in (None, "left", "right"):
        raise ValueError(f"padding_side={side!r}: give 'left' or 'right'.")


def padded(rows: list[list[int]], pad: int, side: Literal["left", "right"]) -> tuple[Ids, Mask]:
    """Returns rows of token ids as one padded tensor, and which tokens are real."""
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), pad, dtype=torch.long)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, ids in enumerate(rows):
        place = slice(longest - len(ids), None) if side == "left" else slice(len(ids))
        tokens[row, place], real[row, place] = torch.tensor(ids), True
    return tokens, real


def mask_from_pads(tokens: Ids, pad: int, side: str, separator: int | None) -> Ids:
    """Returns the attention mask of tokens that are already padded.

    Pad tokens at the beginning of a row (side "left") or at its end ("right") count as padding.
    separator: the id with which texts begin, or None. If the pad token is also the separator, the
    last pad token at the beginning counts as the separator, not as padding. This is the rule of
    TransformerLens' `get_attention_mask`.
    """
    other = (tokens != pad).long()
    if side == "right":
        return (other.flip(1).cumsum(dim=1).flip(1) > 0).long()
    leading = other.cumsum(dim=1) == 0
    if separator == pad:
        leading = leading & leading.roll(-1, dims=1)
        leading[:, -1] = False
    return (~leading).long()
