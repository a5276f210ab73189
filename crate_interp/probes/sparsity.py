"""Sparsity of the code the sparse step leaves."""

from torch import Tensor, nn

from crate_interp.measures import hoyer, l1_norm, zero_fraction
from crate_interp.probes.probe import Acts, Probe

_STATISTICS = {
    "zero_fraction": ("share of entries", 0.0, 1.0, "Exact zeros in the code, mean over tokens; half is what a ReLU of noise leaves."),
    "l1": ("units of the code", 0.0, None, "The sum of a token's code entries, mean over tokens: what the threshold penalises."),
    "hoyer": ("", 0.0, 1.0, "0 for equal entries, 1 for a single one, mean over tokens; blind to the scale of the code."),
}  # fmt: skip


def sparsity() -> Probe:
    """Zero fraction, l1 and Hoyer sparsity of `mlp.hook_post`, each the mean over all tokens."""
    return Probe(name="sparsity", points=("mlp.hook_post",), measure=_measure, statistics=_STATISTICS)


def _measure(block: nn.Module, acts: Acts) -> dict[str, Tensor]:
    code = acts["mlp.hook_post"]
    per_token = {"zero_fraction": zero_fraction(code), "l1": l1_norm(code), "hoyer": hoyer(code)}
    return {name: value.mean(dim=-1) for name, value in per_token.items()}
