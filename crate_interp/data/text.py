"""The samples of a language model: windows of tokens, from texts or from tokens."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from crate_interp.core import checks
from crate_interp.data.samples import Samples, first
from crate_interp.data.sources import forms, source_of
from crate_interp.data.streams import is_stream
from crate_interp.data.tables import Table, checked, texts_of


def open_text(
    data: str | Sequence[str] | Tensor | np.ndarray | Table | Samples,
    windows: Callable[[Iterable[str]], Tensor],
    limit: int | None = None,
) -> Samples:
    """Returns windows of tokens, each a sample, the first `limit` of them. There are no labels.

    data: whole numbers `[n, pos]` (taken as token ids), a list of strings, a datasets.Dataset
    (its first text column), "embedded:held-out-text" or "hf:owner/name:split". Samples are
    returned as they came. `windows` makes token ids `[n, pos]` of texts.

    Raises ValueError for anything else, for no tokens, and for texts shorter than one window.
    """
    checks.limit(limit)
    kinds = (
        "whole numbers [n, pos], a list of strings, a datasets.Dataset with a text column, "
        f"{forms(text=True)}"
    )
    if isinstance(data, Samples):
        return first(data, limit)
    if isinstance(data, (Tensor, np.ndarray)):
        return first(_token_samples(torch.as_tensor(data)), limit)
    if isinstance(data, str):
        source, where = source_of(data, kinds, text=True)
        assert source.table is not None
        texts = texts_of(source.table(where))
    elif is_stream(data):
        raise ValueError(
            "the dataset is a stream, of which windows are made as it goes: give it to ci.sweep or "
            "ci.atoms, or a map-style datasets.Dataset here."
        )
    elif isinstance(data, Table):
        texts = texts_of(data)
    elif isinstance(data, (list, tuple)):
        texts = data
        for _ in checked(texts):  # all of them, before work starts
            pass
    else:
        raise ValueError(f"cannot take text from {type(data).__name__}: give {kinds}.")
    if not len(texts):
        raise ValueError("the data is empty: there is no text in it.")
    return first(_token_samples(windows(checked(texts))), limit)


def _token_samples(tokens: Tensor) -> Samples:
    odd = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if tokens.ndim != 2 or odd:
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
