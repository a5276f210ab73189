"""Membership: to which subspaces tokens belong in ToST, and what its attention descends."""

from functools import partial

from torch import Tensor

from crate_interp.measures import (
    assignment_entropy,
    membership_balance,
    membership_share,
    subspaces_per_token,
    variational_rate,
)
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe
from crate_interp.results.statistic import Statistic

_BOUND = (
    "Upper bound of R^c at the layer's memberships, of {z}, sum of heads: what ToST's attention is "
    "to lower."
)
_STATISTICS: dict[str, Statistic] = {
    "token_entropy": Statistic(
        "Entropy of a token's membership", "lower belongs to fewer subspaces", "nats", 0.0, None,
        "Entropy of membership over subspaces, mean over tokens: 0 in one subspace, ln K evenly in "
        "all.",
    ),
    "subspaces": Statistic(
        "Subspaces a token belongs to", "lower belongs to fewer subspaces", "subspaces", 1.0, None,
        "How many subspaces a token effectively belongs to, 1 / sum pi^2, mean over tokens.",
    ),
    "share_head": Statistic(
        "Share of tokens a subspace holds", "1 / K if all hold as many", "share of tokens", 0.0,
        1.0, "Mean membership of the tokens in each subspace.",
    ),
    "balance": Statistic(
        "Balance of the subspaces", "1 if all hold as many tokens", "", 0.0, 1.0,
        "Entropy of the subspaces' shares of the tokens, divided by ln K.",
    ),
    "bound_pre": Statistic(
        "Bound of R^c before attention", "lower is more compressed", "nats per token", 0.0, None,
        _BOUND.format(z="Z^l, the layer's input"), column="bound before",
    ),
    "bound_mid": Statistic(
        "Bound of R^c after attention", "lower is more compressed", "nats per token", 0.0, None,
        _BOUND.format(z="Z^{l+1/2}, after attention, with the memberships of before"),
        column="bound after",
    ),
}  # fmt: skip


def membership(eps: float = 0.1, tokens: Tokens = "all", name: str = "membership") -> Probe:
    """Returns a probe of ToST's memberships, which stand where CRATE has an attention pattern.

    It measures their entropy, how many subspaces a token belongs to, how many tokens each subspace
    holds and how evenly, and `variational_rate` of the stream before and after attention with the
    same memberships. tokens: "all", "patches" or positions. A layer with one head has no balance;
    in a causal model each token has moments of its own, so that there is no one bound. Raises
    ValueError for eps <= 0.
    """
    if not eps > 0:
        raise ValueError(f"eps={eps}: give a number above 0, such as 0.1.")
    tokens = layer_reading.check_tokens(tokens)
    return Probe(
        name=name,
        heading="Membership: which subspaces a token belongs to",
        points=("hook_resid_pre", "attn.hook_pi", "hook_resid_mid"),
        measure=partial(_measure, eps=eps, tokens=tokens),
        statistics=_STATISTICS,
        settings={"eps": eps, "tokens": tokens},
        subspaces=True,
    )


def _measure(block: Block, acts: Acts, eps: float, tokens: Tokens) -> dict[str, Tensor]:
    pi = layer_reading.picked(acts["attn.hook_pi"], tokens, block, axis=2)
    answer = {
        "token_entropy": assignment_entropy(pi).mean(dim=-1),
        "subspaces": subspaces_per_token(pi).mean(dim=-1),
        "share_head": membership_share(pi),
    }
    if pi.shape[1] > 1:
        answer["balance"] = membership_balance(pi)
    if block.attn.cfg.causal:
        return answer
    for place, point in (("pre", "hook_resid_pre"), ("mid", "hook_resid_mid")):
        codes = layer_reading.stored_codes(block, acts, point)  # [batch, head, pos, d_head]
        codes = layer_reading.picked(codes, tokens, block, axis=2)
        answer[f"bound_{place}"] = variational_rate(codes, pi, eps).sum(dim=-1)
    return answer
