"""How sharply each head attends."""

import math
from functools import partial

import torch
from torch import Tensor

from crate_interp.measures import attention_entropy, effective_support, top_mass
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe
from crate_interp.results.statistic import Statistic

_entropy = partial(Statistic, unit="nats", low=0.0, high=None)
_mass = partial(Statistic, unit="share of attention", low=0.0, high=1.0)
_STATISTICS: dict[str, Statistic] = {
    "entropy": _entropy(
        "Entropy of attention", "lower singles out fewer tokens",
        how="Entropy of attention, mean over queries: 0 for attention to one token, and at most "
        "entropy_uniform, for even attention.",
    ),
    "entropy_uniform": _entropy(
        "Entropy of even attention", "the most that entropy can be",
        how="Entropy of uniform attention over the keys that a query sees: ln N, or less in a "
        "causal model.",
    ),
    "entropy_cls": _entropy(
        "Entropy of the CLS token's attention", "lower singles out fewer tokens",
        how="Entropy of the CLS token's attention over all tokens, CLS included: at most "
        "entropy_uniform, and low if the head singles out a few tokens.",
    ),
    "top1_cls": _mass(
        "CLS attention on the token it attends to most", "higher singles out one token",
        how="Mass on the token that the CLS token attends to most, which can be CLS itself.",
    ),
    "top5_cls": _mass(
        "CLS attention on the five tokens it attends to most", "higher singles out few tokens",
        how="Mass on the five tokens that the CLS token attends to most.",
    ),
    "support_cls": Statistic(
        "Tokens that the CLS token attends to", "lower singles out fewer tokens", "tokens", 1.0,
        None, "How many tokens the CLS token attends to, 1 / sum p^2.", column="CLS support",
    ),
    "entropy_patches": _entropy(
        "Entropy of CLS attention over patches alone", "lower singles out fewer tokens",
        how="Entropy of the CLS token's attention to patches, scaled to sum to 1: 0 for one patch, "
        "ln of their number if even. It tells whether a head is sharp on the picture.",
    ),
    "self_cls": _mass(
        "CLS attention on CLS itself", "the rest goes to patches",
        how="Mass that the CLS token gives to itself; this alone can make a head look sharp.",
    ),
}  # fmt: skip


def attention(tokens: Tokens = "all", name: str = "attention") -> Probe:
    """Returns a probe of how sharply each head attends.

    It measures the entropy, averaged over the queries in `tokens`, and the entropy that uniform
    attention would have. For the CLS query it also measures the entropy over all keys and over the
    patches alone, the mass on the most attended token and on the top five, the effective support,
    and the mass on CLS itself. tokens: the queries, "all", "patches" (without CLS) or positions;
    the keys are all tokens. Models of text have no CLS statistics.
    """
    tokens = layer_reading.check_tokens(tokens)
    return Probe(
        name=name,
        heading="Attention: how many tokens a head looks at",
        points=("attn.hook_pattern",),
        measure=partial(_measure, tokens=tokens),
        statistics=_STATISTICS,
        settings={"tokens": tokens},
    )


def _measure(block: Block, acts: Acts, tokens: Tokens) -> dict[str, Tensor]:
    pattern = acts["attn.hook_pattern"]  # [batch, head, query, key]
    queries = layer_reading.picked(pattern, tokens, block, axis=2)
    entropy = attention_entropy(queries)  # [batch, head, query]
    even = math.log(queries.shape[-1])  # mean over queries of ln(keys that a query sees)
    if block.attn.cfg.causal:
        even = float(torch.log(layer_reading.visible_keys(queries).double()).mean())
    uniform = pattern.new_full((len(pattern),), even)
    answer = {"entropy": entropy.mean(dim=-1), "entropy_uniform": uniform}
    if not layer_reading.has_cls(block):
        return answer
    cls = pattern[:, :, :1]
    return answer | {
        "entropy_cls": (entropy if tokens == "all" else attention_entropy(cls))[..., 0],
        "top1_cls": top_mass(cls, 1)[..., 0],
        "top5_cls": top_mass(cls, min(5, cls.shape[-1]))[..., 0],
        "support_cls": effective_support(cls)[..., 0],
        "self_cls": cls[..., 0, 0],
        "entropy_patches": _among(cls[..., 0, layer_reading.n_special(block) :]),
    }


def _among(shares: Tensor) -> Tensor:
    """Returns the entropy of shares `[..., patch]`, scaled to sum to 1; 0 if all shares are 0.

    It is computed in float64, because CLS may leave only a millionth to the patches.
    """
    shares = shares.double()
    whole = shares.sum(dim=-1, keepdim=True)
    shares = shares / whole.clamp_min(torch.finfo(whole.dtype).tiny)
    return torch.special.entr(shares).sum(dim=-1)
