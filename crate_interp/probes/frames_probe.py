"""Frames: the change of R^c by attention, in the three frames of the audit."""

from functools import partial

from torch import Tensor

from crate_interp.core import checks
from crate_interp.measures import subspace_coding_rate
from crate_interp.probes import layer_reading
from crate_interp.probes.layer_reading import Block, Tokens
from crate_interp.probes.probe import Acts, Probe
from crate_interp.results.statistic import Statistic

_STATISTICS: dict[str, Statistic] = {
    f"change_{name}": Statistic(
        f"What attention adds to R^c, {frame.title}",
        "below 0 by the theory",
        "nats per token",
        None,
        None,
        "R^c after attention minus R^c before it, for "
        f"{frame.tokens.format(z='Z')}; below 0 by the theory.",
    )
    for name, frame in layer_reading.FRAMES.items()
}


def frames(eps: float = 0.1, tokens: Tokens = "all", name: str = "frames") -> Probe:
    """Returns a probe of attention's change of R^c, R^c(Z^{l+1/2}) - R^c(Z^l), in three frames.

    Both rates use the stored U of layer l. A rate depends on the length of Z, so a layer may lower
    it in one frame and raise it in another. "stream": Z as it is. "read": LN(Z) by the norm before
    the layer's own attention. "unit": Z scaled to |Z|_F = sqrt(pos d_model). `ci.audit` uses the
    same frames and also compares with nulls; this probe measures only the change.

    eps: as in the paper. tokens: "all", "patches" (without CLS) or positions. Layers whose queries,
    keys and values are different codes have no U and are left out. Raises ValueError for eps <= 0.
    """
    eps, tokens = checks.positive("eps", eps), layer_reading.check_tokens(tokens)
    return Probe(
        name=name,
        points=("hook_resid_pre", "hook_resid_mid"),
        measure=partial(_measure, eps=eps, tokens=tokens),
        statistics=_STATISTICS,
        settings={"eps": eps, "tokens": tokens},
        subspaces=True,
    )


def _measure(block: Block, acts: Acts, eps: float, tokens: Tokens) -> dict[str, Tensor]:
    u = layer_reading.subspaces(block)
    if u is None:
        return {}
    before, after = (
        {
            frame: subspace_coding_rate(z, u, eps).sum(dim=-1)
            for frame, z in layer_reading.in_frames(
                block, layer_reading.picked(acts[point], tokens, block)
            ).items()
        }
        for point in ("hook_resid_pre", "hook_resid_mid")
    )
    return {f"change_{frame}": after[frame] - before[frame] for frame in layer_reading.FRAMES}
