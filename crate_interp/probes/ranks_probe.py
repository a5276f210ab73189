"""Effective numbers of directions in tokens, codes, attention and weights, without thresholds."""

from functools import partial

from torch import Tensor

from crate_interp.measures import effective_rank, stable_rank
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe
from crate_interp.results.statistic import Statistic

_GAUSS = "a Gaussian m x n matrix has about m n / (sqrt m + sqrt n)^2"
_rank = partial(Statistic, unit="directions", low=0.0, high=None)
_STATISTICS: dict[str, Statistic] = {
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
    stable rank (`ci.measures.stable_rank`) on an attention pattern or a weight. Compare with the
    level of a random network: measure an untrained twin. tokens: the tokens of stream and code,
    "all", "patches" (without CLS) or positions.

    Z^L is measured too, as layer n_layers. A MAE decoder has no `code`, because its layers have no
    sparse step; a layer that lacks a weight lacks the rank of that weight. This is not a default
    probe, because a singular value decomposition costs as much as a layer.
    """
    tokens = layer_reading.check_tokens(tokens)
    return Probe(
        name=name,
        heading="Ranks: how many directions there are",
        points=("hook_resid_pre", "attn.hook_pattern"),
        optional=("mlp.hook_post",),
        measure=partial(_measure, tokens=tokens),
        statistics=_STATISTICS,
        final=partial(_final, tokens=tokens),
        weights=_of_weights,
        settings={"tokens": tokens},
        final_block=True,
        subspaces=True,
    )


def _measure(block: Block, acts: Acts, tokens: Tokens) -> dict[str, Tensor]:
    answer = _final(acts["hook_resid_pre"], block, tokens)
    if "mlp.hook_post" in acts:
        answer["code"] = effective_rank(layer_reading.picked(acts["mlp.hook_post"], tokens, block))
    return answer | {"pattern": stable_rank(acts["attn.hook_pattern"])}


def _final(z: Tensor, block: Block, tokens: Tokens) -> dict[str, Tensor]:
    return {"stream": effective_rank(layer_reading.picked(z, tokens, block))}


def _of_weights(block: Block) -> dict[str, Tensor]:
    mlp = getattr(block, "mlp", None)
    d = layer_reading.dictionary(block)
    found = {
    "stable_u": layer_reading.subspaces(block),
    "stable_out": getattr(block.attn, "W_O", None),
    "stable_in_mlp": getattr(mlp, "W_in", None) if d is None else d,
    "stable_out_mlp": getattr(mlp, "W_out", None),
    }  # fmt: skip
    return {name: stable_rank(w.detach()) for name, w in found.items() if w is not None}
