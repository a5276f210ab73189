"""The kinds of attention that an audit knows: what each writes, and what each descends.

The operators are those of the papers, on codes in float64 and without hook points.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from crate_interp.audits.objectives import Objective, RepresentativesRate, VariationalBound
from crate_interp.models.layers.attention import Attention
from crate_interp.models.layers.contraction import CBSA
from crate_interp.models.layers.token_statistics import TSSA

Codes = Float[Tensor, "batch head pos d_head"]
# what the heads write before the output map, `[batch, head, pos, d_head]`, and the objective
Made = tuple[Tensor, Objective]


def mssa(attn: Attention, codes: Codes, causal: bool) -> Made:
    """Returns MSSA's heads on codes, and R^c."""
    scores = codes @ codes.mT / codes.shape[-1] ** 0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ codes, Objective()


def tssa(attn: TSSA, codes: Codes, causal: bool) -> Made:
    """Returns TSSA's heads on codes with the layer's `temp`, and the bound at their membership."""
    squares, temp = codes.square(), attn.temp.detach().double()
    if causal:
        bias = attn.denom_bias.detach().double()[:, : codes.shape[2]]
        shares = squares / squares.cumsum(dim=-2).clamp_min(1e-12) + bias
    else:
        shares = F.normalize(codes, dim=-2).square()
    pi = (shares.sum(dim=-1) * temp).softmax(dim=1)  # [batch, head, pos]
    weighed, mass = squares * pi[..., None], pi[..., None]
    if causal:
        weighed, mass = weighed.cumsum(dim=-2), mass.cumsum(dim=-2)
    else:
        weighed, mass = weighed.sum(dim=-2, keepdim=True), mass.sum(dim=-2, keepdim=True)
    moment = weighed / (mass + 1e-8)
    return -codes * pi[..., None] / (1 + moment), VariationalBound(pi)


def cbsa(attn: CBSA, codes: Codes, causal: bool) -> Made:
    """Returns CBSA's heads on codes with a step_x of 1, and the rate of the representatives."""
    rep, scale = attn.pooled(codes.transpose(1, 2)).transpose(1, 2), codes.shape[-1] ** -0.5
    contract = (rep @ codes.mT * scale).softmax(dim=-1)
    made = RepresentativesRate(attn.reading(contract))
    rep = made.mixed(codes)
    pattern = (rep @ rep.mT * scale).softmax(dim=-1)
    return contract.mT @ (pattern @ rep), made


@dataclass(frozen=True)
class Kind:
    """What an audit knows of a kind of attention.

    name: its name. objective: what it descends, in words. no_series: why the claim about the
    Neumann form does not apply; "" if it does. heads: its operator on the codes of a layer. seen:
    makes the objective of a layer's own forward pass from the values at its hook points.
    """

    name: str
    objective: str
    no_series: str
    heads: Callable[[Any, Codes, bool], Made]
    seen: Callable[[Any, Mapping[str, Tensor]], Objective]


KINDS = {
    "mssa": Kind("MSSA", "R^c", "", mssa, lambda attn, acts: Objective()),
    "tssa": Kind(
        "TSSA",
        "the variational bound of R^c",
        "TSSA divides by one plus each moment itself, without a Neumann series",
        tssa,
        lambda attn, acts: VariationalBound(acts["attn.hook_pi"].double()),
    ),
    "cbsa": Kind(
        "CBSA",
        "the rate of the representatives",
        "",
        cbsa,
        lambda attn, acts: RepresentativesRate(attn.reading(acts["attn.hook_contract"].double())),
    ),
}


def kind_of(attn: Attention) -> Kind:
    """Returns the kind of an attention that reads one code of each token."""
    return KINDS[attn.cfg.facts["attention"]]
