"""Sparsity of codes: exact zeros, and activity at any scale without exact zeros."""

from functools import partial

from torch import Tensor

from crate_interp.measures import effective_support, gini, support_for_energy, zero_fraction
from crate_interp.measures.sparsity import l1_and_hoyer
from crate_interp.probes.layer_reading import Block, Tokens, picked, visible_keys
from crate_interp.probes.probe import Acts, Probe, with_settings
from crate_interp.results.statistic import Statistic

_STATISTICS: dict[str, Statistic] = {
    "zero_fraction": Statistic(
        "Zeros in the code", "higher is sparser", "share of entries", 0.0, 1.0,
        "Share of exact zeros in the code, mean over tokens; after a ReLU of noise it is half.",
        column="zeros",
    ),
    "l1": Statistic(
        "Sum of the code's entries", "lower means a smaller penalty", "units of the code", 0.0,
        None,
        "Sum of a token's code entries, mean over tokens; the threshold penalises this sum.",
    ),
    "hoyer": Statistic(
        "Hoyer sparsity of the code", "higher is sparser", "", 0.0, 1.0,
        "0 for equal entries, 1 for a single nonzero entry, mean over tokens; does not "
        "depend on the scale of the code.",
    ),
}  # fmt: skip


def sparsity(tokens: Tokens = "all", name: str = "sparsity") -> Probe:
    """Returns a probe of the sparsity of `mlp.hook_post`.

    It measures the zero fraction, the l1 norm and Hoyer's sparsity, each averaged over tokens.
    A GELU has no exact zeros: `activity` measures its near zeros.
    tokens: "all", "patches" (without CLS) or positions. The authors' script counts the zeros of all
    tokens.
    """
    return with_settings(
        _measure,
        {"tokens": tokens},
        name=name,
        heading="Sparsity: how few entries of the code are on",
        points=("mlp.hook_post",),
        statistics=_STATISTICS,
    )


def _measure(block: Block, acts: Acts, tokens: Tokens) -> dict[str, Tensor]:
    code = picked(acts["mlp.hook_post"], tokens, block)
    size, sparse = l1_and_hoyer(code)
    per_token = {"zero_fraction": zero_fraction(code), "l1": size, "hoyer": sparse}
    return {name: value.mean(dim=-1) for name, value in per_token.items()}


_share = partial(Statistic, unit="share of entries", low=0.0, high=1.0)
_ACTIVITY: dict[str, Statistic] = {
    "gini": Statistic(
        "Gini index of the code", "higher is sparser", "", 0.0, 1.0,
        "Gini index of |a|, mean over tokens: 0 for equal entries, near 1 for a single nonzero "
        "entry. Gaussian noise has 0.41, its ReLU has 0.71.",
    ),
    "near_zero": _share(
        "Entries of the code near zero", "higher is sparser",
        how="Share of entries with |a| below 1 % of the token's largest, mean over tokens. "
        "Gaussian noise of a few hundred entries has about 0.03, its ReLU 0.51.",
    ),
    "energy_support": _share(
        "Entries that hold 90 % of the energy", "lower is sparser",
        how="Smallest share of entries that holds 90 % of the token's sum of squares, mean over "
        "tokens. Gaussian noise has 0.44, its ReLU half of that.",
    ),
    "attention_support": Statistic(
        "Share of the visible tokens that a head attends to", "lower singles out fewer tokens",
        "share of tokens", 0.0, 1.0,
        "Effective support 1 / sum p^2, divided by the number of tokens that a query sees, mean "
        "over queries: 1 is even attention, 1 / N a single token.",
    ),
}  # fmt: skip


def activity(tokens: Tokens = "all", name: str = "activity") -> Probe:
    """Returns a probe of sparsity that needs no exact zeros and does not depend on scale.

    For the code `mlp.hook_post` it measures the Gini index, the share of entries with |a| below 1 %
    of the token's largest, and the share of entries that hold 90 % of the token's sum of squares.
    For attention it measures the share of the visible tokens over which a head spreads. So
    networks with ReLU can be compared with networks with GELU, and codes of different widths with
    each other. tokens: "all", "patches" (without CLS) or positions; for attention, these are the
    queries. The descriptions of the code's statistics give their values for Gaussian noise; to get
    the level of the architecture, measure an untrained copy.
    """
    return with_settings(
        _measure_activity,
        {"tokens": tokens, "near": 0.01, "energy": 0.9},
        name=name,
        heading="Activity: sparsity at any scale, without exact zeros",
        points=("mlp.hook_post", "attn.hook_pattern"),
        statistics=_ACTIVITY,
    )


def _measure_activity(
    block: Block, acts: Acts, tokens: Tokens, near: float, energy: float
) -> dict[str, Tensor]:
    code = picked(acts["mlp.hook_post"], tokens, block)
    largest = code.abs().amax(dim=-1, keepdim=True)
    scaled = code / largest.masked_fill(largest == 0, 1)
    queries = picked(acts["attn.hook_pattern"], tokens, block, axis=2)
    visible = visible_keys(queries) if block.attn.cfg.causal else queries.shape[-1]
    per_token = {
        "gini": gini(code),
        "near_zero": zero_fraction(scaled, near),
        "energy_support": support_for_energy(code, energy) / code.shape[-1],
        "attention_support": effective_support(queries) / visible,
    }
    return {name: value.mean(dim=-1) for name, value in per_token.items()}
