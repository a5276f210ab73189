"""Attention sinks: whether a few tokens get most of the attention of all queries."""

from functools import partial

import torch
from torch import Tensor

from crate_interp.core import checks
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block
from crate_interp.probes.probe import Acts, Probe, with_settings
from crate_interp.results.statistic import Statistic

_mass = partial(Statistic, unit="share of attention", low=0.0, high=1.0)
_STATISTICS: dict[str, Statistic] = {
    "mass": _mass(
        "Attention on the strongest tokens", "near even_mass there are no sinks",
        how="Share of a head's attention, mean over queries, on the tokens that get most of it.",
    ),
    "even_mass": _mass(
        "The same for even attention", "no sinks",
        how="What as many tokens get of even attention to all keys that a query sees.",
    ),
    "first": _mass(
        "Attention on the first token", "in images CLS, in texts often a sink",
        how="Share of a head's attention, mean over queries, on the first token.",
    ),
    "same": Statistic(
        "Heads with the same strongest tokens", "1 if all heads share them", "share of tokens",
        0.0, 1.0, "Mean over pairs of heads of the share of their strongest tokens that both have.",
    ),
    "same_random": Statistic(
        "The same for random tokens", "chance", "share of tokens", 0.0, 1.0,
        "The share of its strongest tokens that a head has in common with random ones, k / N.",
    ),
}  # fmt: skip


def sinks(share: float = 0.01, name: str = "sinks") -> Probe:
    """Returns a probe of attention sinks: tokens that get much of the attention of all queries.

    With `r_j = mean_q A_qj`, what token j gets of a head, mass is the sum of the k = max(1, share
    N) largest r of N tokens (CLS included), in [0, 1]; even_mass is the same for even attention. If
    mass is far above even_mass, the head's maps are sinks: they show where attention is parked, not
    what a query looks for (Xiao et al. 2023, arXiv 2309.17453; Darcet et al. 2023, arXiv
    2309.16588). same: the share of their k tokens that two heads have in common, mean over pairs of
    heads; k / N by chance. A model of one head has none.

    Args:
        share: The share of the tokens that count as strongest, above 0 and at most 1.
        name: The name of the probe.

    Raises:
        ValueError: For another share.
    """
    return with_settings(
        _measure,
        {"share": checks.share("share", share)},
        name=name,
        heading="Sinks: do a few tokens get all the attention",
        points=("attn.hook_pattern",),
        statistics=_STATISTICS,
    )


def _measure(block: Block, acts: Acts, share: float) -> dict[str, Tensor]:
    pattern = acts["attn.hook_pattern"]  # [batch, head, query, key]
    got = pattern.double().mean(dim=2)  # what each token gets of each head, [batch, head, key]
    batch, heads, count = got.shape
    k = max(1, int(share * count + 1e-9))  # .29 of 100 tokens are 29
    top = got.topk(k, dim=-1)
    if block.attn.cfg.causal:
        seen = layer_reading.visible_keys(pattern).double()
        places = torch.arange(count, device=got.device)
        sees = (places <= places[:, None]) & (places > places[:, None] - seen[:, None])
        even = (sees / sees.sum(dim=-1, keepdim=True)).mean(dim=0).topk(k).values.sum()
    else:
        even = got.new_tensor(k / count)
    answer = {
        "mass": top.values.sum(dim=-1),
        "even_mass": even.expand(batch),
        "first": got[..., 0],
        "same_random": got.new_full((batch,), k / count),
    }
    if heads > 1:
        held = torch.zeros_like(got).scatter_(2, top.indices, 1.0)
        both = torch.einsum("bhk,bgk->b", held, held) - heads * k
        answer["same"] = both / (heads * (heads - 1) * k)
    dtype = torch.promote_types(pattern.dtype, torch.float32)
    return {name: value.to(dtype) for name, value in answer.items()}
