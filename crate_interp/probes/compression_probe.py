"""Coding rates of the stream: compression, its change under three scalings, and the objective."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from crate_interp import measures
from crate_interp.core import checks
from crate_interp.measures import rates
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe, with_settings
from crate_interp.results.statistic import Statistic

_rate = partial(Statistic, unit="nats per token", low=0.0, high=None)
_OFFICIAL: dict[str, Statistic] = {
    "official_rate": _rate(
        "R^c as the authors' script counts it", "lower is more compressed",
        how="The number that the authors' script plots as R^c: the rate of the codes LN(Z^l) U_k, "
        "with each token's code in each head scaled to length one; at most K p/2 ln(1 + 1/0.01).",
        column="official R^c",
    ),
    "official_rate_head": _rate(
        "The authors' script's rate of each head", "lower is more compressed",
        how="The part of one head in official_rate.",
    ),
    "zero_codes": Statistic(
        "Codes that are all zero", "0 is usual", "tokens x heads", 0.0, None,
        "How many codes are all zero. They add nothing here, but the authors' script returns NaN "
        "for them. The sum is in result.meta['counts'], not in a table.",
    ),
}  # fmt: skip
# place: (its hook point, its symbol, its name, its name in a title)
PLACES = {
    "pre": ("hook_resid_pre", "Z^l", "the layer's input", "before attention"),
    "mid": (
        "hook_resid_mid",
        "Z^{l+1/2}",
        "after attention (in a MAE decoder: between dictionary and attention)",
        "after attention",
    ),
    "post": ("hook_resid_post", "Z^{l+1}", "the layer's output", "after the layer"),
}
_COLUMNS = {"pre": "R^c before", "mid": "R^c after"}


def compression(
    eps: float = 0.1,
    at: Sequence[str] = ("pre", "mid"),
    norm: bool = False,
    tokens: Tokens = "all",
    basis: str = "stored",
    name: str = "compression",
) -> Probe:
    """Returns a probe of the coding rates R, R^c and R - R^c of the stream.

    It also measures the number that the authors' script plots as R^c (official_rate), which always
    uses the stored U.

    If `at` has "pre" and norm is False, rate_pre is measured on Z^L too, as layer n_layers. Layers
    whose queries, keys and values are different codes have no U, so only R is measured.
    `zero_codes` is summed into the result's meta.

    Args:
        eps: As in the paper.
        at: The places to measure, "pre" (Z^l), "mid" (Z^{l+1/2}), "post" (Z^{l+1}, against the
            subspaces of layer l).
        norm: Measure LN(Z) instead of Z. So that rates can be compared, every place then uses the
            same LayerNorm, the one before the layer's own attention (ln1; in a MAE decoder ln2).
            The model itself reads Z^{l+1/2} through ln2 and Z^{l+1} through the next layer's ln1.
            Hooks on the norm have no effect here.
        tokens: "all", "patches" (without CLS) or positions.
        basis: The basis for R^c, "stored" (U_k) or "orthonormal" (Q_k, where U_k = Q_k R_k).
        name: The name of the probe.

    Raises:
        ValueError: For eps <= 0, and for an unknown place or basis.
    """
    if isinstance(at, str) or not len(at) or set(at) - set(PLACES) or len(set(at)) < len(at):
        raise ValueError(f"at={at!r}: give some of {', '.join(PLACES)}, each once, in a tuple.")
    checks.one_of("basis", basis, ("stored", "orthonormal"))
    return with_settings(
        _measure,
        {"eps": eps, "at": list(at), "norm": norm, "tokens": tokens, "basis": basis},
        name=name,
        heading="Compression: how many nats a token costs",
        points=tuple(PLACES[place][0] for place in at),
        optional=("attn.hook_u",),
        statistics=_statistics(at, norm),
        counts=("zero_codes",),
        final=partial(_final, eps=eps, tokens=tokens) if "pre" in at and not norm else None,
        final_block=True,
        subspaces=True,
    )


def _statistics(at: Sequence[str], norm: bool) -> dict[str, Statistic]:
    found: dict[str, Statistic] = {}
    for place in at:
        _, symbol, what, where = PLACES[place]
        z = f"LN({symbol})" if norm else symbol
        what += ", normalised by the LayerNorm before attention" if norm else ""
        # `_final` measures it
        last = " Layer n_layers is the stream after the last layer." * (place == "pre" and not norm)
        found |= {
            f"rate_{place}": _rate(
                f"Coding rate R of all tokens {where}", "higher is more spread out",
                how=f"R of {z}, {what}: the cost of coding it as one Gaussian; the theory wants R "
                "high while R^c falls." + last,
            ),
            f"subspace_rate_{place}": _rate(
                f"Coding rate R^c in the subspaces {where}", "lower is more compressed",
                how=f"R^c of {z} against the layer's subspaces, sum of heads; attention should "
                "lower it.",
                column=_COLUMNS.get(place, ""),
            ),
            f"subspace_rate_{place}_head": _rate(
                f"Coding rate of each head's subspace {where}", "lower is more compressed",
                how=f"R^c of {z} against the subspace of one head.",
            ),
            f"reduction_{place}": Statistic(
                f"Rate reduction R - R^c {where}", "mostly the scale of U, if U is not orthonormal",
                "nats per token", None, None,
                f"R - R^c of {z}: the theory wants it large; at most d/2 ln K for complete "
                "orthonormal U. For other U its sign mostly reflects their scale: compare it with "
                "random subspaces of the same scale, not with 0.",
            ),
        }  # fmt: skip
    return found | _OFFICIAL


def _measure(
    block: Block, acts: Acts, eps: float, at: list[str], norm: bool, tokens: Tokens, basis: str
) -> dict[str, Tensor]:
    u = layer_reading.subspaces(block)
    used = u if u is None or basis == "stored" else layer_reading.orthonormal_basis(block, acts)[0]
    answer: dict[str, Tensor] = {}
    for place in at:
        point = PLACES[place][0]
        z = layer_reading.picked(acts[point], tokens, block)
        z = layer_reading.as_attention_reads(block, z) if norm else z
        answer[f"rate_{place}"] = rate = measures.coding_rate(z, eps)
        if used is not None:
            if norm:
                codes = rates.head_codes(z, used)
            else:
                codes = _codes(block, acts, point, basis)
                codes = layer_reading.picked(codes, tokens, block, axis=2)
            per_head = rates.rate_of_codes(codes, z, used, eps)
            answer[f"subspace_rate_{place}"] = total = per_head.sum(dim=-1)
            answer[f"subspace_rate_{place}_head"] = per_head
            answer[f"reduction_{place}"] = rate - total
    if "attn.hook_u" in acts:
        codes = layer_reading.picked(acts["attn.hook_u"], tokens, block)
        # [batch, head] each
        rate, zeros = rates.official_rate_and_zeros(codes.transpose(1, 2))
        answer["official_rate"], answer["official_rate_head"] = rate.sum(dim=-1), rate
        answer["zero_codes"] = zeros.sum(dim=-1)
    return answer


def _codes(block: Block, acts: Acts, point: str, basis: str) -> Tensor:
    """Returns the tokens in the coordinates of each subspace, `[batch, head, pos, d_head]`."""
    if basis == "orthonormal":
        return layer_reading.orthonormal_codes(block, acts, point)
    if point != "hook_resid_mid":
        return layer_reading.stored_codes(block, acts, point)
    # Z U_k = Z Q_k R_k, where Z Q_k is shared with the alignment probe
    return rates.in_other_basis(
        layer_reading.orthonormal_codes(block, acts, point),
        layer_reading.orthonormal_basis(block, acts)[1],
    )


def _final(z: Tensor, block: Block, eps: float, tokens: Tokens) -> dict[str, Tensor]:
    return {"rate_pre": measures.coding_rate(layer_reading.picked(z, tokens, block), eps)}


_FRAMES: dict[str, Statistic] = {
    f"change_{name}": Statistic(
        f"What attention adds to R^c, {frame.title}", "below 0 by the theory", "nats per token",
        None, None,
        f"R^c after attention minus R^c before it, for {frame.tokens.format(z='Z')}; below 0 by "
        "the theory.",
    )
    for name, frame in layer_reading.FRAMES.items()
}  # fmt: skip


def frames(eps: float = 0.1, tokens: Tokens = "all", name: str = "frames") -> Probe:
    """Returns a probe of how attention changes R^c, under three scalings of the tokens (frames).

    The change is R^c(Z^{l+1/2}) - R^c(Z^l), both with the stored U of layer l. A rate depends on
    the length of Z, so a layer may lower it under one scaling and raise it under another. "stream":
    Z as it is. "read": LN(Z) by the norm before the layer's own attention. "unit": Z scaled to
    |Z|_F = sqrt(pos d_model). `ci.audit` uses the same scalings and also compares with random
    baselines; this probe measures only the change.

    Layers whose queries, keys and values are different codes have no U and are left out.

    Args:
        eps: As in the paper.
        tokens: "all", "patches" (without CLS) or positions.
        name: The name of the probe.

    Raises:
        ValueError: For eps <= 0.
    """
    return with_settings(
        _measure_frames,
        {"eps": eps, "tokens": tokens},
        name=name,
        points=("hook_resid_pre", "hook_resid_mid"),
        statistics=_FRAMES,
        subspaces=True,
    )


def _measure_frames(block: Block, acts: Acts, eps: float, tokens: Tokens) -> dict[str, Tensor]:
    u = layer_reading.subspaces(block)
    if u is None:
        return {}
    before, after = (
        layer_reading.in_frames(block, layer_reading.picked(acts[point], tokens, block))
        for point in ("hook_resid_pre", "hook_resid_mid")
    )
    rate = partial(measures.subspace_coding_rate, u=u, eps=eps)
    return {
        f"change_{frame}": rate(after[frame]).sum(dim=-1) - rate(before[frame]).sum(dim=-1)
        for frame in layer_reading.FRAMES
    }


_SIZES = {"count": ("|Z|_0", "the count of entries"), "l1": ("|Z|_1", "the sum of entries")}
_OBJECTIVE: dict[str, Statistic] = {
    f"{size}_{name}": Statistic(
        f"Objective with {words}, {frame.title}", "lower is better", "nats", None, None,
        f"lambda {symbol} + R^c - R of {frame.tokens.format(z='Z^{l+1}')}, with U of layer l; "
        "lower is better.",
    )
    for size, (symbol, words) in _SIZES.items()
    for name, frame in layer_reading.FRAMES.items()
}  # fmt: skip


def objective(
    eps: float = 0.1, lambd: float = 0.1, tokens: Tokens = "all", name: str = "objective"
) -> Probe:
    """Returns a probe of the objective that a layer should lower, for its output Z^{l+1}.

    The objective is `lambd |Z|_0 + R^c(Z | U; eps) - R(Z; eps)`, with U of the same layer. It is
    the summand of arXiv 2411.17182 eq. 11. "count" uses |Z|_0, the number of entries that are not
    zero; "l1" uses the sum of absolute values; both sum over entries and tokens, and in wide models
    they outweigh the rates. The paper does not say whether its count is a fraction.

    The rates depend on the length of Z, so there are three scalings (frames). "stream": Z as it is,
    which is what the paper measures (its App. C leaves out LayerNorm). "read": LN(Z) by the
    LayerNorm before the layer's own attention, ln1. "unit": Z scaled to |Z|_F = sqrt(pos d_model).
    LayerNorm leaves no zeros, so sparsity is always measured on Z itself, scaled to the Frobenius
    norm that Z has under the scaling. The count is therefore the same under all three scalings.

    Layers whose queries, keys and values are different codes have no U and are left out. In a MAE
    decoder the output is not a code, because attention comes last.

    Args:
        eps: As in the paper.
        lambd: As in the paper, whose lambd is 0.1.
        tokens: "all", "patches" (without CLS) or positions.
        name: The name of the probe.

    Raises:
        ValueError: For eps <= 0 or lambd < 0.
    """
    return with_settings(
        _measure_objective,
        {"eps": eps, "lambd": lambd, "tokens": tokens},
        name=name,
        heading="The objective that a layer should lower",
        points=("hook_resid_post",),
        statistics=_OBJECTIVE,
        subspaces=True,
    )


def _measure_objective(
    block: Block, acts: Acts, eps: float, lambd: float, tokens: Tokens
) -> dict[str, Tensor]:
    u = layer_reading.subspaces(block)
    if u is None:
        return {}
    z = layer_reading.picked(acts["hook_resid_post"], tokens, block)
    length = torch.linalg.matrix_norm(z)  # [batch]
    length = length.masked_fill(length == 0, 1)
    count, size = measures.l0_norm(z).sum(dim=-1), measures.l1_norm(z).sum(dim=-1)
    answer: dict[str, Tensor] = {}
    for frame, shown in layer_reading.in_frames(block, z).items():
        saved = measures.rate_reduction(shown, u, eps)
        stretch = torch.linalg.matrix_norm(shown) / length
        answer[f"count_{frame}"] = lambd * count - saved
        answer[f"l1_{frame}"] = lambd * stretch * size - saved
    return answer
