"""The objective: the cost of a layer's output minus what its subspaces save."""

from functools import partial

import torch
from torch import Tensor

from crate_interp.core import checks
from crate_interp.measures import l0_norm, l1_norm, rate_reduction
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe
from crate_interp.results.statistic import Statistic

_SIZES = {"count": ("|Z|_0", "the count of entries"), "l1": ("|Z|_1", "the sum of entries")}
_STATISTICS: dict[str, Statistic] = {
    f"{size}_{name}": Statistic(
        f"Objective with {words}, {frame.title}",
        "lower is better",
        "nats",
        None,
        None,
        f"lambda {symbol} + R^c - R of {frame.tokens.format(z='Z^{l+1}')}, with U of layer l; "
        "lower is better.",
    )
    for size, (symbol, words) in _SIZES.items()
    for name, frame in layer_reading.FRAMES.items()
}


def objective(
    eps: float = 0.1, lambd: float = 0.1, tokens: Tokens = "all", name: str = "objective"
) -> Probe:
    """Returns a probe of the objective that a layer should lower, for its output Z^{l+1}.

    The objective is `lambd |Z|_0 + R^c(Z | U; eps) - R(Z; eps)`, with U of the same layer. It is
    the summand of arXiv 2411.17182 eq. 11. "count" uses |Z|_0, the number of entries that are not
    zero; "l1" uses the sum of absolute values; both are sums over entries and tokens, and outweigh
    the rates in wide models. The paper does not say whether its count is a fraction.

    The rates depend on the length of Z, so there are three frames. "stream": Z as it is, which is
    what the paper measures (its App. C leaves out LayerNorm). "read": LN(Z) by the LayerNorm before
    the layer's own attention, ln1. "unit": Z scaled to |Z|_F = sqrt(pos d_model). LayerNorm leaves
    no zeros, so in every frame the sparsity is measured on Z itself, scaled to the Frobenius norm
    that Z has in the frame; the count is therefore the same in all three frames.

    eps, lambd: as in the paper, whose lambd is 0.1. tokens: "all", "patches" (without CLS) or
    positions. Layers whose queries, keys and values are different codes have no U and are left out.
    In a MAE decoder the output is not a code, because attention comes last. Raises ValueError for
    eps <= 0 or lambd < 0.
    """
    eps, lambd = checks.positive("eps", eps), checks.non_negative("lambd", lambd)
    tokens = layer_reading.check_tokens(tokens)
    return Probe(
        name=name,
        heading="The objective that a layer is meant to lower",
        points=("hook_resid_post",),
        measure=partial(_measure, eps=eps, lambd=lambd, tokens=tokens),
        statistics=_STATISTICS,
        settings={"eps": eps, "lambd": lambd, "tokens": tokens},
        subspaces=True,
    )


def _measure(
    block: Block, acts: Acts, eps: float, lambd: float, tokens: Tokens
) -> dict[str, Tensor]:
    u = layer_reading.subspaces(block)
    if u is None:
        return {}
    z = layer_reading.picked(acts["hook_resid_post"], tokens, block)
    length = torch.linalg.matrix_norm(z)  # [batch]
    length = length.masked_fill(length == 0, 1)
    count, size = l0_norm(z).sum(dim=-1), l1_norm(z).sum(dim=-1)
    answer: dict[str, Tensor] = {}
    for frame, shown in layer_reading.in_frames(block, z).items():
        saved = rate_reduction(shown, u, eps)
        stretch = torch.linalg.matrix_norm(shown) / length
        answer[f"count_{frame}"] = lambd * count - saved
        answer[f"l1_{frame}"] = lambd * stretch * size - saved
    return answer
