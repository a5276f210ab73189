"""Negative controls: the same probes on the same samples, where there is nothing to find.

A control replaces activations of a layer, or its weights. Statistics that it does not change are
left out.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from crate_hooks import read
from crate_interp import checks
from crate_interp.measures.checks import qr
from crate_interp.measures.rates import head_codes
from crate_interp.models.hooked import HookedModel
from crate_interp.probes import Probe
from crate_interp.probes.probe import on_activations
from crate_interp.probes.shared import Block, LayerActs, StandIn, around_attention, subspaces
from crate_interp.sweeps.stream import Forward
from crate_interp.sweeps.tables import CONTROLS as COLUMNS
from crate_interp.sweeps.tables import merged_controls

_AT_ONCE = 8  # samples: every control has activations of its own beside the model's
_STREAM = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
Acts = dict[str, Tensor]
Control = Callable[[Any, Acts, torch.Generator], tuple[Any, Acts]]


def random_subspaces(block: Block, acts: Acts, generator: torch.Generator) -> tuple[Any, Acts]:
    """Lets heads span random subspaces with the singular values of the model's: U'_k = Q' R_k."""
    u = subspaces(block)
    if u is None:
        return block, acts
    noise = torch.randn(u.shape, generator=generator, dtype=torch.float64)
    noise = noise.to(device=u.device, dtype=u.dtype)
    random = qr(noise)[0] @ qr(u)[1]
    stand_in = StandIn(block, attn=StandIn(block.attn, U=random))
    codes = head_codes(acts[around_attention(block)[1]].to(u.dtype), random)
    return stand_in, acts | {"attn.hook_u": codes.transpose(1, 2)}


def permuted_heads(block: Block, acts: Acts, generator: torch.Generator) -> tuple[Any, Acts]:
    """Lets the next head's output map write what a head gathered."""
    attn = block.attn
    # a user's own layer may have no map for each head
    if attn.cfg.n_heads < 2 or getattr(attn, "W_O", None) is None:
        return block, acts
    gathered = acts["attn.hook_z"].to(attn.W_O.dtype)  # of lower precision under autocast
    written = torch.einsum("bnkp,kpd->bnd", gathered, attn.W_O.roll(1, dims=0)) + attn.b_O
    before, _, after = around_attention(block)
    sign = getattr(attn, "_result_contribution_scale", 1.0)
    return block, acts | {after: acts[before] + sign * written}


def tight_frame(block: Block, acts: Acts, generator: torch.Generator) -> tuple[Any, Acts]:
    """Puts a stream in place that has the energy of the model's and no direction of its own.

    R^c depends on Z Z^T alone.
    """
    pos, width = acts[_STREAM[0]].shape[1:]
    noise = torch.randn(max(pos, width), min(pos, width), generator=generator, dtype=torch.float64)
    frame = torch.linalg.qr(noise)[0]
    frame = frame if pos >= width else frame.T  # [pos, width], orthonormal along the shorter axis
    flat: Acts = {}
    for point in _STREAM:
        z = acts[point]
        energy = torch.linalg.matrix_norm(z.double(), keepdim=True)  # [batch, 1, 1]
        flat[point] = (energy * frame.to(z.device) / min(pos, width) ** 0.5).to(z.dtype)
    return block, acts | flat


CONTROLS: dict[str, Control] = {
    "random subspaces": random_subspaces,
    "permuted heads": permuted_heads,
    "tight frame": tight_frame,
}


def check_controls(controls: Any) -> int:
    """Returns the number of samples that controls see, as an int.

    Raises ValueError for anything else than a whole number, True and False among them.
    """
    if isinstance(controls, bool):
        wanted = "32 for the first 32 samples" if controls else "0 for no controls"
        raise ValueError(f"controls={controls} is no number of samples: give controls={wanted}.")
    return checks.count("controls", controls, least=0)


def controls(
    model: HookedModel,
    untrained: HookedModel,
    probes: Sequence[Probe],
    batch: Tensor,
    blocks: str,
    forward: Forward,
    extra: Acts,
) -> pd.DataFrame:
    """Returns the means over samples under each control, beside the model's on the same samples.

    There is a row for each control, statistic and layer. "random weights" is `untrained`, a twin
    with the official initialisation; the others are CONTROLS. extra: what probes read beside
    activations, for every sample of the batch.
    """
    tables = []
    for start in range(0, len(batch), _AT_ONCE):
        few = slice(start, start + _AT_ONCE)
        more = {name: value[few] for name, value in extra.items()}
        own = measured(model, probes, batch[few], blocks, forward, CONTROLS, more)
        other = measured(untrained, probes, batch[few], blocks, forward, {}, more)
        rows = _rows("random weights", other["model"], own["model"])
        for name in CONTROLS:
            rows += _rows(name, own[name], own["model"])
        tables.append(pd.DataFrame(rows, columns=COLUMNS))
    return reduce(partial(merged_controls, meta={}), tables)


def measured(
    model: HookedModel,
    probes: Sequence[Probe],
    batch: Tensor,
    blocks: str,
    forward: Forward,
    changes: dict[str, Control],
    extra: Acts,
) -> dict[str, dict[tuple[str, str, int], Tensor]]:
    """Returns what the probes measure on a batch, unchanged ("model") and under each control.

    The keys are (probe, statistic, layer).
    """
    reading = [probe for probe in probes if probe.points]
    found: dict[str, dict[tuple[str, str, int], Tensor]] = {
        name: {} for name in ("model", *changes)
    }
    if not reading:
        return found
    layers = getattr(model, blocks)
    names = set(dict(layers[0].named_modules()))
    wanted = [point for probe in reading for point in (*probe.points, *probe.optional)]
    for_changes = (*_STREAM, "attn.hook_z", around_attention(layers[0])[1]) if changes else ()
    points = [point for point in dict.fromkeys((*wanted, *for_changes)) if point in names]

    def measure(layer: int, acts: Acts) -> None:
        states = {"model": (layers[layer], acts)}
        with torch.autocast(batch.device.type, enabled=False):
            for name, change in changes.items():
                states[name] = change(layers[layer], acts, torch.Generator().manual_seed(layer))
        for name, (block, shown) in states.items():
            shared = LayerActs(shown | extra, {})
            for probe in reading:
                answer = on_activations(probe, block, shared)
                found[name] |= {
                    (probe.name, key, layer): value.double() for key, value in answer.items()
                }

    with torch.no_grad(), read(model, points, measure, blocks=blocks):
        forward(model, batch)
    return found


def _rows(control: str, values: dict, own: dict) -> list[tuple]:
    rows: list[tuple] = []
    for key, value in values.items():
        if key in own and not torch.equal(value.nan_to_num(-1), own[key].nan_to_num(-1)):
            there = ~value.isnan().reshape(len(value), -1).any(dim=1)
            rows.append(
                (control, *key, float(value.nanmean()), float(own[key].nanmean()), int(there.sum()))
            )
    order = {pair: place for place, pair in enumerate(dict.fromkeys(row[1:3] for row in rows))}
    return sorted(rows, key=lambda row: (order[row[1:3]], row[3]))
