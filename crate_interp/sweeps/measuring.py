"""Measures probes on weights and on a batch, and under negative controls.

A negative control has nothing to find: it replaces the activations of a layer, or its weights, on
the same samples. Statistics that a control does not change are left out. The control with random
weights sees every controlled sample. The three controls within a layer see only an eighth of the
samples: on one sample, the probes on all three take as long as two forwards. These controls are
measured sample by sample, because each sample has its own random subspaces.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.measures import checks, rates
from crate_interp.models import autoencoder, weights
from crate_interp.models.hooked import HookedModel
from crate_interp.probes import Probe
from crate_interp.probes.layer_reading import Block, LayerActs, StandIn, around_attention, subspaces
from crate_interp.probes.probe import is_ours, on_activations, on_final, on_weights
from crate_interp.questions.batches import Batch, Chunk, Reading, measuring
from crate_interp.sweeps import layer_curves, moments
from crate_interp.sweeps.sweep_tables import CONTROLS as COLUMNS
from crate_interp.sweeps.sweep_tables import Numbers, Tally

_STREAM = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
Acts = dict[str, Tensor]
OfWeights = Sequence[dict]  # for each layer, values computed from its weights, by name
Reported = dict[tuple[str, bool], set[str]]  # (probe, whether of Z^L) -> its statistics
Control = Callable[[Any, Acts, torch.Generator], tuple[Any, Acts]]


@contextmanager
def probe_readings(
    layers: nn.ModuleList,
    probes: Sequence[Probe],
    batch: Batch,
    numbers: Numbers,
    reported: Reported,
    of_weights: OfWeights,
    extra: Acts,
) -> Iterator[list[Reading]]:
    """Yields a reading for each probe, which puts the probe's numbers of a batch into `numbers`.

    Each layer is measured as soon as it has run, while its points are in the processor's cache.
    Values that a layer's probes share are kept until the last of these probes is done. reported:
    what the probes have reported so far. extra: tensors that probes read besides activations.
    Raises ValueError at the end, unless every layer ran once.
    """
    reading = [item for item in probes if item.points]
    left = [len(reading)] * len(layers)  # how many probes have not measured each layer yet
    made: list[dict] = [{} for _ in layers]
    names, device = set(dict(layers[0].named_modules())), batch.inputs.device.type

    def measure(layer: int, acts: Acts, batch: Batch, items: list[Probe], final: bool) -> None:
        for item in items:
            place = layer + final
            block: Any = layers[layer]
            with naming(item, place, batch), measuring(acts, device) as own:
                if final:
                    answer = on_final(item, own["hook_resid_post"], block)
                else:
                    shared = LayerActs(own | extra, of_weights[layer], made[layer])
                    answer = on_activations(item, block, shared)
                if reported.setdefault((item.name, final), set(answer)) != set(answer):
                    words = "the probe gave other statistics in earlier layers or batches"
                    raise ValueError(f"{words}: return each statistic every time.")
            numbers.update({(item.name, name, place): value for name, value in answer.items()})
        if not final:
            left[layer] -= 1
            if not left[layer]:
                made[layer].clear()

    readings = []
    for item in reading:
        points = [*item.points, *(point for point in item.optional if point in names)]
        readings.append(Reading(points, partial(measure, items=[item], final=False)))
    finals = [item for item in probes if item.final]
    if finals:
        last = [len(layers) - 1]
        readings.append(Reading(_STREAM[2:], partial(measure, items=finals, final=True), last))
    yield readings
    for layer, count in enumerate(left):
        if count:
            often = "more than once" if count < 0 else "not at all"
            where = f"samples {batch.start} to {batch.last}: give a forward that runs it once"
            raise ValueError(f"layer {layer} ran {often} on {where}.")


def measure_batch(
    chunk: Chunk,
    batch: Batch,
    probes: Sequence[Probe],
    of_weights: OfWeights,
    extra: Acts | None = None,
    reported: Reported | None = None,
    further: Sequence[Reading] = (),
) -> Numbers:
    """Runs the model on a batch, and returns the probes' numbers, in the order of the probes.

    further: further readings; for the other parameters, see `probe_readings`.
    """
    numbers: Numbers = {}
    layers = getattr(chunk.model, chunk.blocks)
    reported = {} if reported is None else reported
    how = (layers, probes, batch, numbers, reported, of_weights, extra or {})
    with probe_readings(*how) as readings:
        chunk.measure(batch, [*readings, *further])
    order = [probe.name for probe in probes]
    return dict(sorted(numbers.items(), key=lambda item: order.index(item[0][0])))


@contextmanager
def naming(probe: Probe, layer: int, batch: Batch) -> Iterator[None]:
    """Puts the names of a probe, layer and samples before the text of a ValueError."""
    try:
        yield
    except ValueError as error:
        where = f"{probe.name} in layer {layer}, samples {batch.start} to {batch.last}"
        raise ValueError(f"{where}: {error}") from error


def measure_weights(
    model: HookedModel | autoencoder.DecoderView, blocks: str, probes: Sequence[Probe], tally: Tally
) -> None:
    """Adds the probes' numbers for the weights of each layer.

    Numbers of built-in probes are cached until the weights change.
    """
    whole = model if isinstance(model, HookedModel) else model.whole
    layers: Any = getattr(model, blocks)
    found = []
    for item in probes:
        function = item.weights if item.points else item.measure
        ours = is_ours(function) and not hasattr(function, "func")  # every partial is a new one
        name = (item.name, function, layers is getattr(whole, "blocks", None))
        store = weights.values_of_weights(whole) if ours else {}
        if name not in store:
            store[name] = [on_weights(item, block) for block in layers]
        found.append(store[name])
    for layer in range(len(layers)):
        for item, answers in zip(probes, found, strict=True):
            tally.add_weights(item.name, layer, answers[layer])


def random_subspaces(block: Block, acts: Acts, generator: torch.Generator) -> tuple[Any, Acts]:
    """Replaces each U_k by a random U'_k = Q' R_k with the same singular values."""
    u = subspaces(block)
    if u is None:
        return block, acts
    noise = torch.randn(u.shape, generator=generator, dtype=torch.float64)
    noise = noise.to(device=u.device, dtype=u.dtype)
    random = checks.qr(noise)[0] @ checks.qr(u)[1]
    stand_in = StandIn(block, attn=StandIn(block.attn, U=random))
    codes = rates.head_codes(acts[around_attention(block)[1]].to(u.dtype), random)
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


def measure_controls(
    chunk: Chunk,
    batch: Batch,
    probes: Sequence[Probe],
    of_weights: OfWeights,
    extra: Acts,
    reported: Reported,
    untrained: HookedModel,
    count: int,
) -> tuple[Numbers, pd.DataFrame]:
    """Returns a batch's numbers, and the table of controls on its first `count` samples.

    The table has the means over samples under each control, and the model's means on the same
    samples: a row for each control, statistic and layer. "random weights" is `untrained`, an
    untrained copy with the official initialisation; CONTROLS has the other controls.
    """
    layers: Any = getattr(chunk.model, chunk.blocks)
    seen = layer_curves.an_eighth(batch.start, count)
    found: dict[str, Numbers] = {"model": {}, **{name: {} for name in CONTROLS}}

    def measure(layer: int, acts: Acts, batch: Batch) -> None:
        block = layers[layer]
        for place in seen:
            one = slice(place, place + 1)
            beside, seed = _some(extra, one), (batch.start + place << 16) + layer
            with measuring(_some(acts, one), batch.inputs.device.type) as shown:
                # the probes measure the model again, as another batch size may change the last bits
                own = LayerActs(shown | beside, of_weights[layer])
                _add(found["model"], reading, block, layer, own)
                for name, change in CONTROLS.items():
                    other, new = change(block, shown, torch.Generator().manual_seed(seed))
                    known = of_weights[layer] if other is block else {}
                    changed = [one for one in reading if _changes(one, other is block, shown, new)]
                    _add(found[name], changed, other, layer, LayerActs(new | beside, known))

    reading, more = [probe for probe in probes if probe.points], []
    if reading and seen:
        names = set(dict(layers[0].named_modules()))
        points = [point for probe in reading for point in (*probe.points, *probe.optional)]
        points += [*_STREAM, "attn.hook_z", around_attention(layers[0])[1]]
        more = [Reading([point for point in dict.fromkeys(points) if point in names], measure)]
    numbers = measure_batch(chunk, batch, probes, of_weights, extra, reported, more)
    few, first = Batch(batch.inputs[:count], batch.start), slice(count)
    beside, blank = _some(extra, first), [{} for _ in layers]
    other = measure_batch(replace(chunk, model=untrained), few, reading, blank, beside)
    whole = {key: value[first].double() for key, value in numbers.items() if key[2] < len(layers)}
    rows = _rows("random weights", other, whole)
    for name in CONTROLS:
        rows += _rows(name, found[name], found["model"])
    return numbers, pd.DataFrame(rows, columns=COLUMNS)


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


def _add(numbers: Numbers, probes: list[Probe], block: Any, layer: int, shared: LayerActs) -> None:
    """Appends each probe's numbers for a layer to this probe's numbers for earlier samples."""
    for probe in probes:
        for name, value in on_activations(probe, block, shared).items():
            key = (probe.name, name, layer)
            earlier = [numbers[key]] if key in numbers else []
            numbers[key] = torch.cat([*earlier, value.double()])


def _rows(control: str, values: Numbers, numbers: Numbers) -> list[tuple]:
    rows: list[tuple] = []
    for key, value in sorted(values.items(), key=lambda item: item[0][2]):
        value = value.double()
        if key in numbers and not torch.equal(value.nan_to_num(-1), numbers[key].nan_to_num(-1)):
            there = ~value.isnan().reshape(len(value), -1).any(dim=1)
            means = float(value.nanmean()), float(numbers[key].nanmean())
            # for each sample, the mean over heads
            one, two = (side.reshape(len(side), -1).mean(dim=1) for side in (numbers[key], value))
            rows.append((control, *key, *means, int(there.sum()), int((one < two).sum())))
    order = {pair: place for place, pair in enumerate(dict.fromkeys(row[1:3] for row in rows))}
    return sorted(rows, key=lambda row: (order[row[1:3]], row[3]))


def position_sums(
    chunk: Chunk, name: str, points: Sequence[str], of: Callable[[Mapping[str, Tensor]], Tensor]
) -> dict[str, pd.DataFrame]:
    """Returns the table `name`: layer, pos, n, sums (bytes).

    sums: of `of(acts)` `[batch, ...]` over samples. Texts of several lengths have a row for each
    layer and length `pos`.
    """
    sums: dict[tuple[int, int], Tensor] = {}
    counts: Counter[int] = Counter()

    def add(layer: int, acts: Mapping[str, Tensor], batch: Batch) -> None:
        pos = acts[points[0]].shape[1]
        sums[layer, pos] = sums.get((layer, pos), 0) + of(acts).sum(dim=0)
        counts[pos] += len(batch.inputs) if not layer else 0

    chunk.measure_all(Reading(points, add))
    rows = [(*key, counts[key[1]], moments.to_bytes(total)) for key, total in sorted(sums.items())]
    return {name: pd.DataFrame(rows, columns=["layer", "pos", "n", "sums"])}
