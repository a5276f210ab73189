"""The norm ladder of tied heads: how far a head has to climb in norm to look at another token."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp import measures
from crate_interp.models.layers.context import contexts
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block
from crate_interp.probes.probe import Acts, Probe, with_settings
from crate_interp.results.statistic import Statistic

_part = partial(Statistic, low=0.0, high=1.0)
_score = partial(Statistic, unit="nats of score", high=None)
_rank = partial(Statistic, unit="rank correlation", low=-1.0, high=1.0)
_STATISTICS: dict[str, Statistic] = {
    "norm": Statistic(
        "Norm of the codes", "the height of the ladder", "units of the code", 0.0, None,
        "Mean norm |u| of the code that is query and key at once.",
    ),
    "self_share": _part(
        "Attention on the token itself", "1 looks nowhere else", "share of attention",
        how="Attention of a token on itself, mean over tokens.",
    ),
    "upward_share": _part(
        "Looks that climb", "1 climbs always", "share of attention elsewhere",
        how="Of the attention on other tokens, the share on tokens whose codes are longer.",
    ),
    "rise": _score(
        "Rise of the norm", "above the distance, other tokens win", low=None,
        how="How much longer the codes are that a token looks at: (|u_j|^2 - |u_p|^2) / (2 "
        "sqrt(d_head)), per unit of attention on other tokens.",
    ),
    "distance": _score(
        "Rise that is needed", "the price of a look elsewhere", low=0.0,
        how="How far the codes are that a token looks at: |u_p - u_j|^2 / (2 sqrt(d_head)), per "
        "unit of attention on other tokens. A token scores above oneself by rise - distance.",
    ),
    "flat_share": _part(
        "Attention that a flat ladder would leave", "1 does not use the norms",
        "share of attention",
        how="Overlap of the attention with that of codes of the same directions and one norm.",
    ),
    "sinks": _rank(
        "Longer codes are looked at more", "1 if sinks stand on top of the ladder",
        how="Rank correlation of a token's norm with the attention that other tokens give it.",
    ),
    "order": _rank(
        "Norms along the text", "1 rises, -1 falls",
        how="Rank correlation of a token's norm with its position, of causal models.",
    ),
    "cls_height": _part(
        "Height of CLS on the ladder", "1 is the top", "share of tokens",
        how="Share of the other tokens whose codes are shorter than CLS's.",
    ),
    "cls_upward": _part(
        "CLS looks that climb", "1 climbs always", "share of attention elsewhere",
        how="Of CLS's attention on other tokens, the share on tokens whose codes are longer.",
    ),
}  # fmt: skip


def ladder(name: str = "ladder") -> Probe:
    """Returns a probe of the norm ladder: what a head pays for one code as query and key.

    A tied head prefers another token to the token itself only if that token's code is longer:
    `ci.measures.norm_ladder` has the formulas. Measured on attn.hook_q, so after nanochat's
    rotation and norm, which makes all norms equal. Not for plain attention, whose queries and keys
    are two codes.
    """
    return with_settings(
        _measure,
        {},
        name=name,
        heading="Norm ladder: what a look elsewhere costs a tied head",
        points=("attn.hook_q", "attn.hook_pattern"),
        statistics=_STATISTICS,
    )


def _measure(block: Block, acts: Acts) -> dict[str, Tensor]:
    cfg = block.attn.cfg
    if not cfg.tied:
        raise ValueError(
            "the norm ladder is of heads whose query and key are one code, and this model's are "
            "two: give other probes."
        )
    pattern = acts["attn.hook_pattern"].double()  # [batch, head, query, key]
    count = pattern.shape[-1]
    visible = None
    if cfg.causal:
        layer = int(block.attn.hook_q.name.split("blocks.")[1].split(".")[0])
        visible = contexts(cfg, count, None, pattern.device)[layer].mask
    codes = acts["attn.hook_q"].transpose(1, 2)
    steps = measures.norm_ladder(codes.double(), visible)
    elsewhere = steps.elsewhere
    # norms that differ by rounding have one rank
    norms = steps.norms / steps.norms.amax(dim=-1, keepdim=True).clamp(min=1e-300)
    norms = (1e6 * norms).round()
    # what each token gets from the others that see it; the last token of a text is seen by none
    itself = torch.eye(count, dtype=torch.bool, device=pattern.device)
    others = pattern.masked_fill(itself, 0).sum(dim=-2)
    seen_by = (torch.ones_like(itself) if visible is None else visible).sum(dim=0) - 1
    seen = seen_by > 0
    answer = {
        "norm": steps.norms.mean(dim=-1),
        "self_share": steps.self_share.mean(dim=-1),
        "upward_share": _share(steps.upward_share.sum(dim=-1), elsewhere.sum(dim=-1)),
        "rise": _share(steps.rise.sum(dim=-1), elsewhere.sum(dim=-1)),
        "distance": _share(steps.distance.sum(dim=-1), elsewhere.sum(dim=-1)),
        "flat_share": steps.flat_share.mean(dim=-1),
        "sinks": _rank_correlation(norms[..., seen], (others / seen_by.clamp(min=1))[..., seen]),
    }
    if cfg.causal:
        places = torch.arange(count, device=norms.device).to(norms).expand_as(norms)
        answer |= {"order": _rank_correlation(norms, places)}
    elif layer_reading.n_special(block):
        answer |= {
            "cls_height": (norms[..., 1:] < norms[..., :1]).double().mean(dim=-1),
            "cls_upward": _share(steps.upward_share[..., 0], elsewhere[..., 0]),
        }
    return {name: value.to(codes.dtype) for name, value in answer.items()}


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Returns part / whole, 0 where there is no whole: a token that looks nowhere else."""
    return torch.where(whole > 0, part / whole.where(whole > 0, 1.0), 0.0)


def _rank_correlation(
    a: Float[Tensor, "batch head pos"], b: Float[Tensor, "batch head pos"]
) -> Float[Tensor, "batch head"]:
    """Returns Spearman's correlation over tokens; 0 where all values are equal."""
    ranks = [_ranks(one) for one in (a, b)]
    a, b = (one - one.mean(dim=-1, keepdim=True) for one in ranks)
    size = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return _share((a * b).sum(dim=-1), size)


def _ranks(values: Float[Tensor, "*batch pos"]) -> Float[Tensor, "*batch pos"]:
    """Returns ranks from 0; equal values share the mean of their ranks."""
    ordered = values.contiguous().sort(dim=-1).values
    first = torch.searchsorted(ordered, values.contiguous())
    last = torch.searchsorted(ordered, values.contiguous(), right=True) - 1
    return (first + last).to(values) / 2
