"""Sparsity of the code that the sparse step outputs."""

from functools import partial

from torch import Tensor

from crate_interp.measures import zero_fraction
from crate_interp.measures.sparsity import l1_and_hoyer
from crate_interp.probes.layer_reading import Block, Tokens, check_tokens, picked
from crate_interp.probes.probe import Acts, Probe
from crate_interp.results.statistic import Statistic

_STATISTICS: dict[str, Statistic] = {
    "zero_fraction": Statistic(
        "Zeros in the code", "higher is sparser", "share of entries", 0.0, 1.0,
        "Share of exact zeros in the code, mean over tokens; a ReLU of noise leaves half.",
        column="zeros",
    ),
    "l1": Statistic(
        "Sum of the code's entries", "lower means a smaller penalty", "units of the code", 0.0,
        None,
        "Sum of a token's code entries, mean over tokens; the threshold penalises this sum.",
    ),
    "hoyer": Statistic(
        "Hoyer sparsity of the code", "higher is sparser", "", 0.0, 1.0,
        "0 for equal entries, 1 for a single one that is not 0, mean over tokens; does not "
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
    tokens = check_tokens(tokens)
    return Probe(
        name=name,
        heading="Sparsity: how few entries of the code are on",
        points=("mlp.hook_post",),
        measure=partial(_measure, tokens=tokens),
        statistics=_STATISTICS,
        settings={"tokens": tokens},
    )


def _measure(block: Block, acts: Acts, tokens: Tokens) -> dict[str, Tensor]:
    code = picked(acts["mlp.hook_post"], tokens, block)
    size, sparse = l1_and_hoyer(code)
    per_token = {"zero_fraction": zero_fraction(code), "l1": size, "hoyer": sparse}
    return {name: value.mean(dim=-1) for name, value in per_token.items()}
