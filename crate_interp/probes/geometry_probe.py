"""Geometry: whether weights match the theory, where tokens lie, and effective ranks."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_interp import measures
from crate_interp.measures import effective_rank, stable_rank
from crate_interp.measures.subspaces import energy_of_codes
from crate_interp.models.hooked import HookedModel, check_hooked
from crate_interp.models.weights import model_digest
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe, with_settings
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
        "Mean squared cosine between a head's subspace and the other heads' subspaces: p/d is "
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
    return with_settings(
        _measure,
        {"tokens": tokens},
        name=name,
        heading="Geometry: are the weights what the theory assumes",
        # the value at attn.hook_u is not used; naming this point leaves out layers without U,
        # which lack the point
        points=("hook_resid_mid", "attn.hook_u"),
        statistics=_STATISTICS,
        weights=_of_weights,
        subspaces=True,
    )


def _measure(block: Block, acts: Acts, tokens: Tokens) -> dict[str, Tensor]:
    codes = layer_reading.orthonormal_codes(block, acts, "hook_resid_mid")
    codes = layer_reading.picked(codes, tokens, block, axis=2)
    z = layer_reading.picked(acts["hook_resid_mid"], tokens, block)
    return {"energy_head": energy_of_codes(codes, z).mean(dim=-2)}


def _of_weights(block: Block) -> dict[str, Tensor]:
    u, d = layer_reading.subspaces(block), layer_reading.dictionary(block)
    answer: dict[str, Tensor] = {}
    if d is not None:
        answer["dictionary_defect"] = measures.dictionary_defect(d)
        answer["dictionary_shape"] = measures.scale_free_defect(d)
    if u is not None:
        answer["orthonormality"] = measures.orthonormality_defect(u)
        answer["completeness"] = measures.completeness_defect(u)
    if u is not None and len(u) > 1:
        answer["head_overlap"] = measures.head_overlap(u)
    return answer


_angle = partial(Statistic, unit="degrees", low=0.0, high=180.0)
_DRIFT: dict[str, Statistic] = {
    "subspace": _angle(
        "How far each subspace has turned", "0 is where it began",
        how="Mean principal angle between a head's U_k and the same U_k before.",
    ),
    "atoms": _angle(
        "How far the dictionary's atoms have turned", "0 is where they began",
        how="Mean angle between an atom of D and the same atom before.",
    ),
}  # fmt: skip


def drift(before: HookedModel, name: str = "drift") -> Probe:
    """Returns a probe of how far weights have turned: subspaces U_k and atoms of the dictionary D.

    subspace `[head]`: the mean of the p principal angles between the spans of U_k and of the U_k of
    the same layer and head before; scale and basis do not count. atoms: the mean over atoms of the
    angle between d_i and d_i before. Both in degrees, 0 to 90 and 0 to 180; a right angle for a
    random direction in a wide space. Chance is the same probe with before= a model of random
    weights, `ci.HookedCrate(model.cfg)`. Our own.

    Args:
        before: The model that is compared with, of the same layers and widths: an earlier revision,
            or a copy.deepcopy at the start of a training, for `ci.watch`.
        name: The name of the probe.

    Raises:
        ValueError: At the first layer for a model of other layers or widths.

    Example:
        start = ci.load("crate-tiny-fashion", revision="step-0")
        ci.sweep(model, data, probes=[ci.probes.drift(start)])
    """
    check_hooked(before)
    weights = {}
    for each in before.blocks:
        block: Any = each
        parts = layer_reading.subspaces(block), layer_reading.dictionary(block)
        place = block.hook_resid_mid.name
        weights[place] = [None if part is None else part.detach().clone() for part in parts]
    return Probe(
        name,
        (),
        partial(_turned, before=weights),
        _DRIFT,
        settings={"before": model_digest(before)},
        heading="Drift: how far have the weights turned",
        subspaces=True,
    )


def _turned(block: Block, acts: Acts, before: dict[str, list[Tensor | None]]) -> dict[str, Tensor]:
    now = layer_reading.subspaces(block), layer_reading.dictionary(block)
    answer = {}
    for key, part, old in zip(
        _DRIFT, now, before.get(block.hook_resid_mid.name, [None, None]), strict=True
    ):
        if part is None and old is None:
            continue
        if part is None or old is None or part.shape != old.shape:
            raise ValueError("drift: before= has other layers or widths: give an earlier self.")
        if key == "subspace":
            answer[key] = measures.principal_angles(part, old.to(part)).mean(dim=-1).rad2deg()
        else:
            cosines = torch.cosine_similarity(part.double(), old.to(part).double(), dim=0)
            answer[key] = cosines.clamp(-1, 1).acos().mean().rad2deg()
    if not answer:
        raise ValueError("drift: the layers have neither subspaces U nor a dictionary D.")
    return answer


_GAUSS = "a Gaussian m x n matrix has about m n / (sqrt m + sqrt n)^2"
_rank = partial(Statistic, unit="directions", low=0.0, high=None)
_RANKS: dict[str, Statistic] = {
    "stream": _rank(
        "Directions that the tokens fill", "higher is more spread out",
        how="Effective rank of Z^l: exp of the entropy of its singular values. At most min(N, d); "
        "1 if all tokens lie along one line.",
    ),
    "code": _rank(
        "Directions that the codes fill", "higher is more spread out",
        how="Effective rank of the codes of an image's or text's tokens (mlp.hook_post); at most "
        "min(N, d_mlp).",
    ),
    "pattern": _rank(
        "Stable rank of a head's attention", "1 if all queries attend alike",
        how="Stable rank |A|_F^2 / |A|_2^2 of a head's attention: 1 if all queries attend alike, N "
        "if each token attends only to itself.",
    ),
    "stable_u": _rank(
        "Stable rank of each head's subspace map", "higher is more even",
        how=f"Stable rank of each U_k: at most d_head, if all directions count alike; {_GAUSS}.",
    ),
    "stable_out": _rank(
        "Stable rank of each head's output map", "higher is more even",
        how=f"Stable rank of each head's output map W_O: at most d_head; {_GAUSS}.",
    ),
    "stable_in_mlp": _rank(
        "Stable rank of the dictionary, or of W_in", "higher is more even",
        how=f"Stable rank of the dictionary D, or of W_in in an MLP; {_GAUSS}.",
    ),
    "stable_out_mlp": _rank(
        "Stable rank of the decoder, W_out", "higher is more even",
        how=f"Stable rank of the decoder W_out, if there is one; {_GAUSS}.",
    ),
}  # fmt: skip


def ranks(tokens: Tokens = "all", name: str = "ranks") -> Probe:
    """Returns a probe of effective and stable ranks of the stream, codes, attention and weights.

    Ranks do not depend on scale, so a CRATE and a black box can be compared. The effective rank
    (`ci.measures.effective_rank`) is measured on the tokens of one sample, without centring; the
    stable rank (`ci.measures.stable_rank`) on an attention pattern or a weight. For comparison
    measure an untrained copy, which shows the level of a random network. tokens: the tokens of
    stream and code, "all", "patches" (without CLS) or positions.

    Z^L is measured too, as layer n_layers. A MAE decoder has no `code`, because its layers have no
    sparse step; a layer that lacks a weight lacks the rank of that weight. This is not a default
    probe, because a singular value decomposition costs as much as a layer.
    """
    return with_settings(
        _measure_ranks,
        {"tokens": tokens},
        name=name,
        heading="Ranks: how many directions there are",
        points=("hook_resid_pre", "attn.hook_pattern"),
        optional=("mlp.hook_post",),
        statistics=_RANKS,
        final=partial(_final, tokens=tokens),
        weights=_ranks_of_weights,
        final_block=True,
        subspaces=True,
    )


def _measure_ranks(block: Block, acts: Acts, tokens: Tokens) -> dict[str, Tensor]:
    answer = _final(acts["hook_resid_pre"], block, tokens)
    if "mlp.hook_post" in acts:
        answer["code"] = effective_rank(layer_reading.picked(acts["mlp.hook_post"], tokens, block))
    return answer | {"pattern": stable_rank(acts["attn.hook_pattern"])}


def _final(z: Tensor, block: Block, tokens: Tokens) -> dict[str, Tensor]:
    return {"stream": effective_rank(layer_reading.picked(z, tokens, block))}


def _ranks_of_weights(block: Block) -> dict[str, Tensor]:
    mlp = getattr(block, "mlp", None)
    d = layer_reading.dictionary(block)
    found = {
    "stable_u": layer_reading.subspaces(block),
    "stable_out": getattr(block.attn, "W_O", None),
    "stable_in_mlp": getattr(mlp, "W_in", None) if d is None else d,
    "stable_out_mlp": getattr(mlp, "W_out", None),
    }  # fmt: skip
    return {name: stable_rank(w.detach()) for name, w in found.items() if w is not None}
