"""The samples of a language model: windows of tokens, from texts or from tokens."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from crate_interp.data.named import named_dataset
from crate_interp.data.samples import Samples, check_limit, first

_KINDS = (
    "whole numbers [n, pos], a list of strings, a datasets.Dataset with a text column, "
    '"embedded:NAME" or "hf:owner/name:split"'
)


def open_text(
    data: Any, windows: Callable[[list[str]], Tensor], limit: int | None = None
) -> Samples:
    """The samples of a language model: windows of tokens, the first `limit` of them; `windows` makes them of texts.

    data: whole numbers `[n, pos]` (taken as token ids), a list of strings, a datasets.Dataset (its first text column),
    "embedded:held-out-text" or "hf:owner/name:split". A window is a sample; there are no labels. Raises ValueError for
    anything else, for no tokens, and for texts shorter than one window.
    """
    check_limit(limit)
    if isinstance(data, Tensor) or type(data).__module__ == "numpy":
        return first(_token_samples(torch.as_tensor(data)), limit)
    if isinstance(data, str):
        texts = _texts_of(named_dataset(data, _KINDS))
    elif hasattr(data, "features") and hasattr(data, "column_names"):
        texts = _texts_of(data)
    elif isinstance(data, (list, tuple)):
        texts = list(data)
    else:
        raise ValueError(f"cannot take text from {type(data).__name__}: give {_KINDS}.")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "the data is empty: there is no text in it."
            if not texts
            else "data holds more than strings."
        )
    return first(_token_samples(windows(texts)), limit)


def _token_samples(tokens: Tensor) -> Samples:
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(
            f"tokens are {tokens.dtype} of shape {list(tokens.shape)}: give whole numbers [n, pos]."
        )
    if 0 in tokens.shape:
        raise ValueError(f"the data is empty: tokens have shape {list(tokens.shape)}.")
    tokens = tokens.long()
    digest = hashlib.sha256(f"tokens {list(tokens.shape)}".encode())
    digest.update(tokens.cpu().contiguous().numpy().data)
    return Samples(
        len(tokens),
        None,
        f"tokens:sha256:{digest.hexdigest()}",
        lambda start, stop: tokens[start:stop],
    )


def _texts_of(dataset: Any) -> list[str]:
    import datasets

    features = dataset.features or {}
    columns = [
        n
        for n, f in features.items()
        if isinstance(f, datasets.Value) and f.dtype in ("string", "large_string")
    ]
    if not columns:
        raise ValueError(
            f"the dataset has no text column; its columns are {', '.join(dataset.column_names) or 'none'}."
        )
    return list(dataset[columns[0]])
