"""Alignment: whether the subspaces and the dictionary are what the theory assumes, and where the tokens lie."""

from typing import Any

from torch import Tensor

from crate_interp.measures import (
    completeness_defect,
    dictionary_defect,
    head_overlap,
    orthonormality_defect,
)
from crate_interp.measures.subspaces import energy_of_codes
from crate_interp.probes.probe import Acts, Probe
from crate_interp.probes.shared import mid_codes

_STATISTICS = {
    "orthonormality": ("", 0.0, None, "|U_k^T U_k - I| / sqrt(p): 0 where a head's basis is orthonormal, as the theory assumes."),
    "completeness": ("", 0.0, None, "|sum U_k U_k^T - I| / sqrt(d): 0 where the heads together cover the space evenly."),
    "head_overlap": ("", 0.0, 1.0, "Mean squared cosine between a head's subspace and the others': p/d is chance, 0 is disjoint."),
    "dictionary_defect": ("", 0.0, None, "|D^T D - c I| / sqrt(d): 0 where the dictionary is a scaled orthonormal one."),
    "energy_head": ("share of energy", 0.0, 1.0, "Share of a token of Z^{l+1/2} in the head's subspace, mean over tokens; chance is p/d."),
}  # fmt: skip


def alignment() -> Probe:
    """Defects and overlap of the weights (once per layer), and the energy of Z^{l+1/2} in each head's span."""
    return Probe(
        name="alignment", points=("hook_resid_mid",), measure=_measure, statistics=_STATISTICS, weights=_of_weights
    )


def _measure(block: Any, acts: Acts) -> dict[str, Tensor]:
    return {"energy_head": energy_of_codes(mid_codes(block, acts), acts["hook_resid_mid"]).mean(dim=-2)}


def _of_weights(block: Any) -> dict[str, Tensor]:
    u = block.attn.U
    answer = {
        "orthonormality": orthonormality_defect(u),
        "completeness": completeness_defect(u),
        "dictionary_defect": dictionary_defect(block.mlp.D),
    }
    return answer | ({"head_overlap": head_overlap(u)} if len(u) > 1 else {})
