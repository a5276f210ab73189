"""Representatives: how CBT contracts its tokens, and the rate that its attention descends."""

from functools import partial
from typing import Any

from torch import Tensor

from crate_interp.measures import contracted_rate, contraction_coverage, representatives_in_use
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block
from crate_interp.probes.probe import Acts, Probe
from crate_interp.results.statistic import Statistic

_RATE = "Rate of the representatives in the subspaces, of {z}, sum of heads: what CBSA is to lower."
_STATISTICS: dict[str, Statistic] = {
    "in_use": Statistic(
        "Representatives that read different tokens", "64 if no two read the same",
        "representatives", 0.0, None,
        "Effective number of representatives of a head, by the cosines of what they read; a random "
        "network's are nearly all alike.",
    ),
    "coverage": Statistic(
        "Share of tokens that representatives read", "1 if all are read alike", "share of tokens",
        0.0, 1.0,
        "Effective share of the tokens that a head's representatives read, taken together.",
    ),
    "rate_pre": Statistic(
        "Rate of representatives before attention", "lower is more compressed",
        "nats per representative", 0.0, None, _RATE.format(z="Z^l, the layer's input"),
        column="rate before",
    ),
    "rate_mid": Statistic(
        "Rate of representatives after attention", "lower is more compressed",
        "nats per representative", 0.0, None,
        _RATE.format(z="Z^{l+1/2}, after attention, with the contraction of before"),
        column="rate after",
    ),
}  # fmt: skip


def representatives(eps: float = 0.1, name: str = "representatives") -> Probe:
    """Returns a probe of CBT's contraction, which stands where CRATE has an attention pattern.

    It measures how many of the 64 representatives of each head read different tokens, which share
    of the tokens they read, and `contracted_rate` of the stream before and after attention with
    the contraction of before. As in the official code a representative is its pooled code plus
    step_rep times what it contracts. Raises ValueError for eps <= 0.
    """
    if not eps > 0:
        raise ValueError(f"eps={eps}: give a number above 0, such as 0.1.")
    return Probe(
        name=name,
        heading="Representatives: how tokens are contracted",
        points=("hook_resid_pre", "attn.hook_contract", "hook_resid_mid"),
        measure=partial(_measure, eps=eps),
        statistics=_STATISTICS,
        settings={"eps": eps},
        subspaces=True,
    )


def _measure(block: Block, acts: Acts, eps: float) -> dict[str, Tensor]:
    contract = acts["attn.hook_contract"]
    answer = {
        "in_use": representatives_in_use(contract),
        "coverage": contraction_coverage(contract),
    }
    attn: Any = block.attn
    whole = attn.reading(contract)
    for place, point in (("pre", "hook_resid_pre"), ("mid", "hook_resid_mid")):
        codes = layer_reading.stored_codes(block, acts, point)  # [batch, head, pos, d_head]
        answer[f"rate_{place}"] = contracted_rate(codes, whole, eps).sum(dim=-1)
    return answer
