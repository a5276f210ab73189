"""How sharply each head attends, and what stands in its place in ToST and CBT."""

import math
from functools import partial

import torch
from torch import Tensor

from crate_interp import measures
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe, with_settings
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
    return with_settings(
        _measure,
        {"tokens": tokens},
        name=name,
        heading="Attention: how many tokens a head looks at",
        points=("attn.hook_pattern",),
        statistics=_STATISTICS,
    )


def _measure(block: Block, acts: Acts, tokens: Tokens) -> dict[str, Tensor]:
    pattern = acts["attn.hook_pattern"]  # [batch, head, query, key]
    queries = layer_reading.picked(pattern, tokens, block, axis=2)
    entropy = measures.attention_entropy(queries)  # [batch, head, query]
    even = math.log(queries.shape[-1])  # mean over queries of ln(keys that a query sees)
    if block.attn.cfg.causal:
        even = float(torch.log(layer_reading.visible_keys(queries).double()).mean())
    uniform = pattern.new_full((len(pattern),), even)
    answer = {"entropy": entropy.mean(dim=-1), "entropy_uniform": uniform}
    special = layer_reading.n_special(block)
    if not special:
        return answer
    cls = pattern[:, :, :1]
    # in float64, because CLS may leave only a millionth to the patches
    shares = cls[..., 0, special:].double()
    whole = shares.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return answer | {
        "entropy_cls": (entropy if tokens == "all" else measures.attention_entropy(cls))[..., 0],
        "top1_cls": measures.top_mass(cls, 1)[..., 0],
        "top5_cls": measures.top_mass(cls, min(5, cls.shape[-1]))[..., 0],
        "support_cls": measures.effective_support(cls)[..., 0],
        "self_cls": cls[..., 0, 0],
        "entropy_patches": torch.special.entr(shares / whole).sum(dim=-1),
    }


_BOUND = (
    "Upper bound of R^c at the layer's memberships, of {z}, sum of heads; ToST's attention "
    "should lower it."
)
_MEMBERSHIP: dict[str, Statistic] = {
    "token_entropy": Statistic(
        "Entropy of a token's membership", "lower belongs to fewer subspaces", "nats", 0.0, None,
        "Entropy of membership over subspaces, mean over tokens: 0 for one subspace, ln K if "
        "even over all.",
    ),
    "subspaces": Statistic(
        "Subspaces a token belongs to", "lower belongs to fewer subspaces", "subspaces", 1.0, None,
        "How many subspaces a token effectively belongs to, 1 / sum pi^2, mean over tokens.",
    ),
    "share_head": Statistic(
        "Share of tokens a subspace holds", "1 / K if all hold the same", "share of tokens", 0.0,
        1.0, "Mean membership of the tokens in each subspace.",
    ),
    "balance": Statistic(
        "Balance of the subspaces", "1 if all hold the same share", "", 0.0, 1.0,
        "Entropy of the subspaces' shares of the tokens, divided by ln K.",
    ),
    "bound_pre": Statistic(
        "Bound of R^c before attention", "lower is more compressed", "nats per token", 0.0, None,
        _BOUND.format(z="Z^l, the layer's input"), column="bound before",
    ),
    "bound_mid": Statistic(
        "Bound of R^c after attention", "lower is more compressed", "nats per token", 0.0, None,
        _BOUND.format(z="Z^{l+1/2}, after attention, with the memberships before it"),
        column="bound after",
    ),
}  # fmt: skip


def membership(eps: float = 0.1, tokens: Tokens = "all", name: str = "membership") -> Probe:
    """Returns a probe of ToST's memberships, which stand where CRATE has an attention pattern.

    It measures their entropy, how many subspaces a token belongs to, how many tokens each subspace
    holds and how evenly, and `variational_rate` of the stream before and after attention with the
    same memberships. A layer with one head has no balance. In a causal model each token has
    different moments, so there is not a single bound.

    Args:
        eps: The precision, above 0.
        tokens: "all", "patches" or positions.
        name: The name of the probe.

    Raises:
        ValueError: For eps <= 0.
    """
    return with_settings(
        _measure_membership,
        {"eps": eps, "tokens": tokens},
        name=name,
        heading="Membership: which subspaces a token belongs to",
        points=("hook_resid_pre", "attn.hook_pi", "hook_resid_mid"),
        statistics=_MEMBERSHIP,
        subspaces=True,
    )


def _measure_membership(block: Block, acts: Acts, eps: float, tokens: Tokens) -> dict[str, Tensor]:
    pi = layer_reading.picked(acts["attn.hook_pi"], tokens, block, axis=2)
    answer = {
        "token_entropy": measures.assignment_entropy(pi).mean(dim=-1),
        "subspaces": measures.subspaces_per_token(pi).mean(dim=-1),
        "share_head": measures.membership_share(pi),
    }
    if pi.shape[1] > 1:
        answer["balance"] = measures.membership_balance(pi)
    if block.attn.cfg.causal:
        return answer
    for place, point in (("pre", "hook_resid_pre"), ("mid", "hook_resid_mid")):
        codes = layer_reading.stored_codes(block, acts, point)  # [batch, head, pos, d_head]
        codes = layer_reading.picked(codes, tokens, block, axis=2)
        answer[f"bound_{place}"] = measures.variational_rate(codes, pi, eps).sum(dim=-1)
    return answer


_RATE = "Rate of the representatives in the subspaces, of {z}, sum of heads; CBSA should lower it."
_REPRESENTATIVES: dict[str, Statistic] = {
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
        _RATE.format(z="Z^{l+1/2}, after attention, with the contraction before it"),
        column="rate after",
    ),
}  # fmt: skip


def representatives(eps: float = 0.1, name: str = "representatives") -> Probe:
    """Returns a probe of CBT's contraction, which stands where CRATE has an attention pattern.

    It measures how many of each head's 64 representatives read different tokens, the share of the
    tokens that they read, and `contracted_rate` of the stream before and after attention with the
    contraction of before. As in the official code a representative is its pooled code plus step_rep
    times what it contracts. Raises ValueError for eps <= 0.
    """
    return with_settings(
        _measure_representatives,
        {"eps": eps},
        name=name,
        heading="Representatives: how tokens are contracted",
        points=("hook_resid_pre", "attn.hook_contract", "hook_resid_mid"),
        statistics=_REPRESENTATIVES,
        subspaces=True,
    )


def _measure_representatives(block: Block, acts: Acts, eps: float) -> dict[str, Tensor]:
    contract = acts["attn.hook_contract"]
    answer = {"in_use": measures.representatives_in_use(contract)}
    answer["coverage"] = measures.contraction_coverage(contract)
    whole = block.attn.reading(contract)
    for place, point in (("pre", "hook_resid_pre"), ("mid", "hook_resid_mid")):
        codes = layer_reading.stored_codes(block, acts, point)  # [batch, head, pos, d_head]
        answer[f"rate_{place}"] = measures.contracted_rate(codes, whole, eps).sum(dim=-1)
    return answer
