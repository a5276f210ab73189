"""Negative controls: the same probes on the same samples, with nothing to find.

A control replaces the activations of a layer, or its weights. Statistics that a control does not
change are left out. The control with random weights sees every controlled sample. The three
controls within a layer see only an eighth of the samples: on one sample, the probes on all three
take as long as two forwards. These controls are measured sample by sample, because each sample has
its own random subspaces.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from crate_hooks import read
from crate_interp.core import checks
from crate_interp.measures.checks import qr
from crate_interp.measures.rates import head_codes
from crate_interp.models.hooked import HookedModel
from crate_interp.probes import Probe
from crate_interp.probes.layer_reading import Block, LayerActs, StandIn, around_attention, subspaces
from crate_interp.probes.probe import is_ours, on_activations
from crate_interp.questions.batches import Batch, Chunk, Forward, Reading, measuring
from crate_interp.sweeps.control_tables import an_eighth
from crate_interp.sweeps.sweep_tables import CONTROLS as COLUMNS
from crate_interp.sweeps.sweep_tables import Key

_STREAM = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
Acts = dict[str, Tensor]
Answers = dict[Key, Tensor]
Control = Callable[[Any, Acts, torch.Generator], tuple[Any, Acts]]


def random_subspaces(block: Block, acts: Acts, generator: torch.Generator) -> tuple[Any, Acts]:
    """Replaces each U_k by a random U'_k = Q' R_k with the same singular values."""
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
    """Writes each head's output with the output map of the previous head."""
    attn = block.attn
    # a user's own layer may have no output map per head
    if attn.cfg.n_heads < 2 or getattr(attn, "W_O", None) is None:
        return block, acts
    gathered = acts["attn.hook_z"].to(attn.W_O.dtype)  # its precision may be lower under autocast
    written = torch.einsum("bnkp,kpd->bnd", gathered, attn.W_O.roll(1, dims=0)) + attn.b_O
    before, _, after = around_attention(block)
    sign = getattr(attn, "_result_contribution_scale", 1.0)
    return block, acts | {after: acts[before] + sign * written}


def tight_frame(block: Block, acts: Acts, generator: torch.Generator) -> tuple[Any, Acts]:
    """Replaces the stream by a stream that has the same energy and prefers no direction.

    R^c depends on the stream Z only through Z Z^T.
    """
    pos, width = acts[_STREAM[0]].shape[1:]
    frame = _frame(pos, width)
    flat: Acts = {}
    for point in _STREAM:
        z = acts[point]
        energy = torch.linalg.matrix_norm(z.double(), keepdim=True)  # [batch, 1, 1]
        flat[point] = (energy * frame.to(z.device) / min(pos, width) ** 0.5).to(z.dtype)
    return block, acts | flat


@lru_cache(maxsize=4)
def _frame(pos: int, width: int) -> Float[Tensor, "pos width"]:
    """Returns a random matrix that is orthonormal along its shorter axis, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(max(pos, width), min(pos, width), generator=generator, dtype=torch.float64)
    frame = torch.linalg.qr(noise)[0]
    return frame if pos >= width else frame.T


CONTROLS: dict[str, Control] = {
    "random subspaces": random_subspaces,
    "permuted heads": permuted_heads,
    "tight frame": tight_frame,
}


def check_controls(controls: object) -> int:
    """Returns the number of samples that controls see, as an int.

    Raises ValueError for anything but a whole number, and for True and False.
    """
    if isinstance(controls, bool):
        wanted = "32 for the first 32 samples" if controls else "0 for no controls"
        raise ValueError(f"controls={controls} is not a number of samples. Give controls={wanted}.")
    return checks.count("controls", controls, least=0)


@dataclass
class Controls:
    """Measures the controls on the first `count` samples of a batch, in the sweep's own forward.

    start: the number of the first sample. extra: tensors that probes read in addition to
    activations. of_weights: values already computed from each layer's weights.
    """

    chunk: Chunk
    probes: Sequence[Probe]
    start: int
    count: int
    extra: Acts
    of_weights: list[dict]
    found: dict[str, Answers] = field(default_factory=dict)

    def readings(self) -> list[Reading]:
        """Returns readings of all activations that probes and controls need, layer by layer."""
        points = _points(self._layers(), self.probes, CONTROLS)
        seen = an_eighth(self.start, self.count)
        return [Reading(points, self._measure)] if points and seen else []

    def _layers(self) -> Any:
        return getattr(self.chunk.model, self.chunk.blocks)

    def _measure(self, layer: int, acts: Acts, batch: Batch) -> None:
        for place in an_eighth(self.start, self.count):
            one, seed = slice(place, place + 1), (self.start + place << 16) + layer
            extra = _some(self.extra, one)
            with measuring(_some(acts, one), batch.inputs.device.type) as shown:
                self._measure_one(layer, shown, extra, seed)

    def _measure_one(self, layer: int, shown: Acts, extra: Acts, seed: int) -> None:
        """Adds the probes' numbers for one sample in a layer, without and with each control."""
        block = self._layers()[layer]
        # the probes measure the model again, since another batch size may change the last bits
        own = LayerActs(shown | extra, self.of_weights[layer])
        _add(self.found.setdefault("model", {}), self.probes, block, layer, own)
        for name, change in CONTROLS.items():
            other, acts = change(block, shown, torch.Generator().manual_seed(seed))
            of_weights = self.of_weights[layer] if other is block else {}
            changed = [
                probe for probe in self.probes if _changes(probe, other is block, shown, acts)
            ]
            seen = LayerActs(acts | extra, of_weights)
            _add(self.found.setdefault(name, {}), changed, other, layer, seen)

    def table(self, own: Answers, untrained: HookedModel, batch: Tensor) -> pd.DataFrame:
        """Returns means over samples under each control, and the model's means on the same samples.

        There is a row for each control, statistic and layer. "random weights" is `untrained`, a
        twin with the official initialisation; the other controls are those of CONTROLS. own: the
        probes' numbers for the whole batch.
        """
        first = slice(self.count)
        extra, whole = _some(self.extra, first), {k: v[first].double() for k, v in own.items()}
        blocks, forward = self.chunk.blocks, self.chunk.forward
        other = _measured(untrained, self.probes, batch[first], blocks, forward, extra)
        rows = _rows("random weights", other, whole)
        for name in CONTROLS:
            rows += _rows(name, self.found.get(name, {}), self.found.get("model", {}))
        return pd.DataFrame(rows, columns=COLUMNS)


def _some(acts: Acts, which: slice) -> Acts:
    return {name: value[which] for name, value in acts.items()}


def _changes(probe: Probe, same_block: bool, before: Acts, after: Acts) -> bool:
    """Tells whether a control may change the numbers of a probe.

    A built-in probe says whether it uses U; a user's probe may read any weight.
    """
    if not same_block and (probe.subspaces or not is_ours(probe.measure)):
        return True
    points = (*probe.points, *probe.optional)
    return any(after.get(point) is not before.get(point) for point in points)


def _points(layers: Any, probes: Sequence[Probe], changes: Mapping[str, Control]) -> list[str]:
    """Returns the existing points that probes read or controls need.

    Returns an empty list if no probe reads activations.
    """
    wanted = [point for probe in probes for point in (*probe.points, *probe.optional)]
    if not any(probe.points for probe in probes):
        return []
    names = set(dict(layers[0].named_modules()))
    needed = (*_STREAM, "attn.hook_z", around_attention(layers[0])[1]) if changes else ()
    return [point for point in dict.fromkeys((*wanted, *needed)) if point in names]


def _add(
    found: Answers, probes: Sequence[Probe], block: Any, layer: int, shared: LayerActs
) -> None:
    """Appends each probe's numbers for a layer to this probe's numbers for earlier samples.

    Probes that read no activations are left out.
    """
    for probe in probes:
        if probe.points:
            for name, value in on_activations(probe, block, shared).items():
                key = (probe.name, name, layer)
                earlier = [found[key]] if key in found else []
                found[key] = torch.cat([*earlier, value.double()])


def _measured(
    model: HookedModel,
    probes: Sequence[Probe],
    batch: Tensor,
    blocks: str,
    forward: Forward,
    extra: Acts,
) -> Answers:
    """Returns the probes' numbers for a batch."""
    layers, found = getattr(model, blocks), {}
    points = _points(layers, probes, {})

    def measure(layer: int, acts: Acts) -> None:
        with measuring(acts, batch.device.type) as shown:
            _add(found, probes, layers[layer], layer, LayerActs(shown | extra, {}))

    if points:
        with torch.no_grad(), read(model, points, measure, blocks=blocks):
            forward(model, batch)
    return found


def _rows(control: str, values: dict, own: dict) -> list[tuple]:
    rows: list[tuple] = []
    for key, value in values.items():
        if key in own and not torch.equal(value.nan_to_num(-1), own[key].nan_to_num(-1)):
            there = ~value.isnan().reshape(len(value), -1).any(dim=1)
            means = float(value.nanmean()), float(own[key].nanmean())
            # for each sample, the mean over heads
            one, two = (side.reshape(len(side), -1).mean(dim=1) for side in (own[key], value))
            rows.append((control, *key, *means, int(there.sum()), int((one < two).sum())))
    order = {pair: place for place, pair in enumerate(dict.fromkeys(row[1:3] for row in rows))}
    return sorted(rows, key=lambda row: (order[row[1:3]], row[3]))
