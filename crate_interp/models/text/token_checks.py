"""The check of token ids before a model looks them up."""

import torch
from torch import Tensor

from crate_interp.config import CrateConfig
from crate_interp.models.compat.tracing import readable


def check_tokens(tokens: Tensor, cfg: CrateConfig, count: int) -> None:
    """Checks a batch of token ids.

    Raises ValueError for another dtype or shape, if `count` exceeds n_ctx, and for ids that the
    vocabulary lacks. While a model is traced (crate_interp/models/compat/tracing.py) the ids cannot
    be read; what the lookup does with a bad one is then torch's affair.
    """
    check_ids(tokens, cfg.d_vocab, count, cfg.n_ctx)


def check_ids(tokens: Tensor, d_vocab: int, count: int, n_ctx: int | None) -> None:
    """Does what `check_tokens` does, without a config. n_ctx: None if there is no limit."""
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.ndim != 2:
        raise ValueError(
            f"tokens are {tokens.dtype} of shape {list(tokens.shape)}, the model takes whole "
            "numbers [batch, pos]."
        )
    if 0 in tokens.shape:
        raise ValueError(f"tokens have shape {list(tokens.shape)}: there is no token.")
    if n_ctx is not None and count > n_ctx:
        raise ValueError(
            f"there are {count} tokens, the model takes at most n_ctx={n_ctx}: cut them shorter."
        )
    if not readable(tokens):
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= d_vocab:
        raise ValueError(f"tokens go from {low} to {high}, the vocabulary from 0 to {d_vocab - 1}.")
