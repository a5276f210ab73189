"""Whether the sparse step keeps the rate R: of its code, and of the tokens decoded by D."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from crate_interp.audits.attention import Cells
from crate_interp.audits.descent import rates_of_codes
from crate_interp.audits.frames import Norm, over
from crate_interp.models.layers.sparse_steps import Lasso
from crate_interp.probes.layer_reading import FRAMES


def of_rates(
    d: Float[Tensor, "d_model d_model"],
    norm: Norm,
    y: Float[Tensor, "batch pos d_model"],
    code: Float[Tensor, "batch pos d_model"],
    eps: Sequence[float],
) -> Cells:
    """Returns the difference of R between the code and its input, and between D Z and Z.

    The frame "read" uses the LayerNorm through which the step reads; y has already passed it.
    """
    wide, after = y.double(), code.double()
    decoded = after @ d.double().T
    found = {name: _rates(z, norm, eps) for name, z in (("z", after), ("dz", decoded))}
    found["y"] = _rates(wide, None, eps)
    cells: Cells = {}
    for frame in FRAMES:
        read, kept, back = (found[name][frame] for name in ("y", "z", "dz"))
        numbers = {"rate_kept": over(kept - read, read), "decoded": over(back - kept, kept)}
        for index, value in enumerate(eps):
            key = ("layer", frame, value, "", "all")
            cells[key] = {name: number[:, index] for name, number in numbers.items()}
    return cells


def at_scale(
    lasso: Lasso,
    scales: Float[Tensor, "batch"],
    norm: Norm,
    y: Float[Tensor, "batch pos d_model"],
    eps: Sequence[float],
) -> Cells:
    """Returns the same for the code that the step makes if each sample scales D differently."""
    parts: list[Cells] = []
    for scale, one in zip(scales.tolist(), y, strict=True):
        other = replace(lasso, d=lasso.d * scale)
        code = other.run(one[None], other.lambd)
        parts.append(of_rates(other.d, norm, one[None], code, eps))
    return {
        key: {name: torch.cat([part[key][name] for part in parts]) for name in parts[0][key]}
        for key in parts[0]
    }


def _rates(
    z: Float[Tensor, "batch pos d_model"], norm: Norm | None, eps: Sequence[float]
) -> dict[str, Tensor]:
    """Returns R `[batch, eps]` in each frame; without a norm, "read" equals "stream"."""
    pos, width = z.shape[1:]
    alpha = width / (pos * torch.tensor(eps, dtype=z.dtype, device=z.device).square())
    square = z.square().sum(dim=(1, 2))
    scale = pos * width / square.where(square > 0, 1.0)
    both = torch.cat([alpha.expand(len(z), -1), alpha * scale[:, None]], dim=1)
    stream = rates_of_codes(z[:, None], both)
    found = {"stream": stream[:, : len(eps)], "unit": stream[:, len(eps) :]}
    if norm is None:
        return found | {"read": found["stream"]}
    return found | {"read": rates_of_codes(norm.applied(z)[:, None], alpha.expand(len(z), -1))}
