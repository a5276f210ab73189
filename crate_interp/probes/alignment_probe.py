"""Alignment: whether subspaces and dictionary match the theory, and where tokens lie."""

from functools import partial

from torch import Tensor

from crate_interp import measures
from crate_interp.measures.subspaces import energy_of_codes
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe
from crate_interp.results.statistic import Statistic

_defect = partial(Statistic, unit="", low=0.0, high=None)
_STATISTICS: dict[str, Statistic] = {
    "orthonormality": _defect(
        "How far U is from orthonormal", "0 is what the theory assumes",
        how="|U_k^T U_k - I| / sqrt(p): 0 if a head's basis is orthonormal, as the theory "
        "assumes. Scale counts: at the start of training U_k^T U_k is about I/3, which alone "
        "gives 0.67.",
        column="U defect",
    ),
    "completeness": _defect(
        "How far the subspaces are from covering the space", "0 is what the theory assumes",
        how="|sum U_k U_k^T - I| / sqrt(d): 0 if the heads together cover the space evenly at "
        "scale one. Even cover at the scale of the start of training, I/3, gives 0.67.",
    ),
    "head_overlap": Statistic(
        "Overlap of the heads' subspaces", "lower is more incoherent", "", 0.0, 1.0,
        "Mean squared cosine between a head's subspace and those of the other heads: p/d is "
        "chance, 0 is disjoint.",
    ),
    "dictionary_defect": _defect(
        "How far D is from orthonormal", "0 is what the theory assumes",
        how="|G - c I| / sqrt(n), where G is the smaller of D^T D and D D^T, n its width, and "
        "c = tr(G) / n: 0 if D is a scaled orthonormal dictionary or, if it is wide, a scaled "
        "tight frame. Scale counts; dictionary_shape divides it out.",
    ),
    "dictionary_shape": _defect(
        "How far D is from orthonormal, whatever its scale", "0 is what the theory assumes",
        how="dictionary_defect divided by c, so that scale does not count: 0 if D is a scaled "
        "orthonormal dictionary, or a scaled tight frame. A random D has about "
        "sqrt(short side / long side): 1 if it is square.",
    ),
    "energy_head": Statistic(
        "Share of a token in each head's subspace", "p/d is chance", "share of energy", 0.0, 1.0,
        "Share of a token of Z^{l+1/2} in the head's subspace, mean over tokens; chance is p/d.",
    ),
}  # fmt: skip


def alignment(tokens: Tokens = "all", name: str = "alignment") -> Probe:
    """Returns a probe of defects and overlaps of weights, and of the energy in each subspace.

    The weights are measured once per layer; the energy is measured on Z^{l+1/2}. tokens: "all",
    "patches" (without CLS) or positions. The probe needs layers whose queries, keys and values are
    the same code.
    """
    tokens = layer_reading.check_tokens(tokens)
    return Probe(
        name=name,
        heading="Geometry: are the weights what the theory assumes",
        # the value at attn.hook_u is not used; naming this point leaves out layers without U,
        # which lack the point
        points=("hook_resid_mid", "attn.hook_u"),
        measure=partial(_measure, tokens=tokens),
        statistics=_STATISTICS,
        weights=_of_weights,
        settings={"tokens": tokens},
        subspaces=True,
    )


def _measure(block: Block, acts: Acts, tokens: Tokens) -> dict[str, Tensor]:
    codes = layer_reading.picked(
        layer_reading.orthonormal_codes(block, acts, "hook_resid_mid"), tokens, block, axis=2
    )
    z = layer_reading.picked(acts["hook_resid_mid"], tokens, block)
    return {"energy_head": energy_of_codes(codes, z).mean(dim=-2)}


def _of_weights(block: Block) -> dict[str, Tensor]:
    u, d = layer_reading.subspaces(block), layer_reading.dictionary(block)
    answer: dict[str, Tensor] = {}
    if d is not None:
        answer |= {"dictionary_defect": measures.dictionary_defect(d)}
        answer |= {"dictionary_shape": measures.scale_free_defect(d)}
    if u is None:
        return answer
    answer |= {
        "orthonormality": measures.orthonormality_defect(u),
        "completeness": measures.completeness_defect(u),
    }
    return answer | ({"head_overlap": measures.head_overlap(u)} if len(u) > 1 else {})
