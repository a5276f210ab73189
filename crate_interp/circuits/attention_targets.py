"""How much attention heads give to targets: the previous token, a copy, the token after a copy."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from crate_interp.core import checks
from crate_interp.data.samples import group_numbers
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.cache import CrateCache
from crate_interp.models.hook_points import check_pattern
from crate_interp.questions.edited_runs import every_entry
from crate_interp.stats.contrasts import by_group
from crate_interp.stats.intervals import mean_interval

Targets = Bool[Tensor, "batch query key"]


def repeat_targets(
    tokens: Int[Tensor, "batch pos"], offsets: Sequence[int] = (0, 1)
) -> dict[str, Targets]:
    """Returns the keys that induction and related heads look at, as masks `[batch, query, key]`.

    The mask "previous" marks the token before the query. "copy" marks every earlier token that
    equals the query; duplicate-token heads look there. "copy+1" marks the token after such a copy;
    induction heads look there. offsets: which tokens near a copy to mark, each with its own mask: 0
    is the copy itself, 1 the token after it ("copy+1"), -1 the token before it ("copy-1").

    Raises ValueError if tokens is not a tensor of whole numbers `[batch, pos]`, or if an offset is
    not a whole number.
    """
    whole = isinstance(tokens, Tensor) and tokens.dtype in (torch.int32, torch.int64)
    if not whole or tokens.ndim != 2 or not all(map(checks.is_int, offsets)):
        raise ValueError(f"{checks.quote(tokens)}, {offsets=}: give whole numbers [batch, pos].")
    count = tokens.shape[1]
    query, key = torch.arange(count)[:, None], torch.arange(count)
    masks = {"previous": (key == query - 1).expand(len(tokens), -1, -1).clone()}
    copies = (tokens[:, :, None] == tokens[:, None]).cpu() & (key < query)  # [batch, query, copy]
    for offset in offsets:
        beside = torch.zeros_like(copies)
        low, high = max(0, offset), min(count, count + offset)
        if low < high:
            beside[:, :, low:high] = copies[:, :, low - offset : high - offset]
        masks[f"copy{offset:+d}" if offset else "copy"] = beside & (key <= query)
    return masks


@in_full_precision
def head_scores(
    cache: CrateCache, targets: Mapping[str, Targets], groups: Sequence[int | str] | None = None
) -> pd.DataFrame:
    """Returns how much attention each head gives to each kind of target.

    The score is the share of a query's attention that goes to its targets, in [0, 1], averaged over
    the queries that have a target, and then over samples.

    Args:
        cache: The cache of `model.run_with_cache(tokens)`, with attn.hook_pattern.
        targets: Masks `[batch, query, key]` by name, such as `repeat_targets(tokens)`, or your own.
            In language models, keys after the query do not count.
        groups: Of the samples, as in `ci.sweep`.

    Returns:
        A row per target, layer and head: target, layer, head, score, low, high, even, samples.
        low, high: the 95 % interval of the mean over samples. even: the score of even attention to
        every key that a query may see. samples: the number of samples in which some query has a
        target; other samples are left out.

    Raises:
        ValueError: For targets of another shape, for a target that no query has, for a cache of a
            language model that holds only some positions (`pos_slice`), and for ToST and CBT.
        KeyError: For a cache without patterns.
    """
    if not isinstance(cache, CrateCache) or not isinstance(targets, Mapping) or not targets:
        got = f"a {type(cache).__name__} and {checks.quote(targets)}"
        raise ValueError(f"got {got}: give the cache of a model, and targets by name.")
    model = cache.model
    cache.check_weights()
    check_pattern(model.cfg, "head_scores")
    n = len(cache.at("attn.hook_pattern", 0))
    group_of = np.arange(n) if groups is None else np.array(group_numbers(groups, n))
    tables: list[pd.DataFrame] = []
    for name, mask in targets.items():
        for layer in range(len(model.blocks)):
            pattern = cache.at("attn.hook_pattern", layer)  # [batch, head, query, key]
            shape = [pattern.shape[0], *pattern.shape[2:]]
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or [*mask.shape] != shape:
                raise ValueError(f"the targets {name!r} are not a bool tensor of shape {shape}.")
            visible = _visible_keys(cache, pattern)
            hits = mask.to(pattern.device) & visible
            has_target = hits.any(dim=-1)[:, None]  # [batch, 1, query]
            counts = has_target.any(dim=(1, 2))  # whether a sample counts, [batch]
            if not counts.any():
                raise ValueError(f"no query sees a target {name!r}: give other tokens.")
            shares = (hits.sum(dim=-1) / visible.sum(dim=-1).clamp(min=1))[:, None]
            asked = has_target.sum(dim=-1).clamp(min=1)  # queries that have a target
            scores, even = (  # [sample, head], [sample, 1]
                ((values * has_target).sum(dim=-1) / asked)[counts].double().cpu().numpy()
                for values in ((pattern * hits[:, None]).sum(dim=-1), shares)
            )
            low, high = mean_interval(by_group(scores, group_of[counts.cpu().numpy()]))
            means = [of_head.mean() for of_head in scores.T]
            table = every_entry("score", means, target=[name], layer=[layer], head=range(len(low)))
            tables.append(table.assign(low=low, high=high, even=even.mean(), samples=len(scores)))
    return pd.concat(tables, ignore_index=True)


def _visible_keys(cache: CrateCache, pattern: Tensor) -> Bool[Tensor, "*batch query key"]:
    """Returns which keys a query may see; raises ValueError if that cannot be known."""
    queries, keys = pattern.shape[-2:]
    visible = torch.ones((queries, keys), dtype=torch.bool, device=pattern.device)
    if cache.model.cfg.kind == "text":
        if queries != keys:  # the positions of the cached queries are unknown
            raise ValueError("the cache holds some queries only: run without pos_slice.")
        visible = visible.tril()
    if cache.mask is not None:  # a padding token is neither a query nor a key
        real = cache.mask.to(pattern.device)
        visible = visible & real[:, :, None] & real[:, None, :]
    return visible
