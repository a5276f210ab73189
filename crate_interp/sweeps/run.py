"""ci.sweep: probes over a data set in one stream."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp import checks
from crate_interp.data import Data, Samples, forms
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.hooked import HookedModel
from crate_interp.models.offload import with_weights
from crate_interp.probes import Probe, resolve
from crate_interp.probes.probe import MASKS, on_activations, on_final, on_weights
from crate_interp.probes.shared import LayerActs
from crate_interp.sweeps.controls import check_controls
from crate_interp.sweeps.controls import controls as run_controls
from crate_interp.sweeps.provenance import data_meta, probes_meta
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.stream import (
    Batch,
    Chunk,
    Forward,
    Reading,
    check_model,
    fold,
    run,
    samples_of,
)
from crate_interp.sweeps.tables import merged_controls, no_controls, tables_of
from crate_interp.sweeps.tally import Tally
from crate_interp.sweeps.twins import twin

Probes = str | Probe | Sequence[str | Probe] | None


@with_weights
def sweep(
    model: HookedModel,
    data: Data,
    *,
    probes: Probes = None,
    batch_size: int = 32,
    limit: int | None = None,
    blocks: str = "blocks",
    forward: Forward = run,
    controls: int = 32,
    progress: bool = True,
) -> SweepResult:
    """Runs the model over `data` once and keeps what the probes measure in each layer.

    probes: names, Probe objects, or both; None takes those of the default four whose points the
    model has. data: see `ci.data.open_data` and `ci.data.open_text`. limit: the first n samples.
    blocks: "decoder_blocks" measures the decoder of a masked autoencoder. forward(model, batch):
    another way to run the model; by default a masked autoencoder sees every patch. controls:
    on how many samples, the first of the data, to measure the negative controls,
    `result.controls()`; 0 for none. They cost about six more forwards of these samples.

    Memory does not grow with the number of samples, but for the numbers themselves: the activations
    of a layer are let go as soon as the probes have seen them. Hooks that are on the model stay on.

    Raises ValueError, before work starts, if probes or data are unknown, if the data is empty, if
    `controls` is no number of samples, or if images or weights hold NaN or Inf. Raises ValueError,
    with layer and samples, if a statistic is not finite.
    """
    checks.count("batch_size", batch_size)
    controls = check_controls(controls)
    check_model(model, blocks)
    chosen = fitting(probes, model, blocks)
    samples = samples_of(model, data, limit)
    check_masks(chosen, samples)
    started = time.perf_counter()
    layers: Any = getattr(model, blocks)
    meta = data_meta(model, samples, batch_size) | probes_meta(chosen, model)
    meta |= {"blocks": blocks, "n_layers": len(layers), "controls": controls}
    if model.cfg.kind == "mae" and forward is run:
        meta["mask_ratio"] = 0.0
    measure = partial(_of_chunk, probes=chosen, meta=meta)
    options: dict[str, Any] = dict(blocks=blocks, forward=forward, progress=progress)
    result = fold(
        model, samples, measure, SweepResult.merge, batch_size=batch_size, what="sweep", **options
    )
    result.meta["seconds"] = round(time.perf_counter() - started, 3)
    return result


def _of_chunk(chunk: Chunk, probes: list[Probe], meta: dict[str, Any]) -> SweepResult:
    samples = chunk.samples
    tally, controlled = Tally(samples.n, samples.start), no_controls()
    with torch.no_grad():
        layers: Any = getattr(chunk.model, chunk.blocks)
        measure_weights(layers, probes, tally)
        of_weights: list[dict] = [{} for _ in layers]
        untrained: Any = twin(chunk.model, 0) if samples.start < meta["controls"] else None
        for batch in chunk.batches():
            extra = _masks(probes, samples, batch)
            measure_batch(chunk, batch, probes, tally, of_weights, extra)
            if batch.start >= meta["controls"]:
                untrained = None  # its memory is free for the rest
            else:
                first = slice(meta["controls"] - batch.start)
                few = {name: value[first] for name, value in extra.items()}
                options = (chunk.blocks, chunk.forward, few)
                more = run_controls(chunk.model, untrained, probes, batch.inputs[first], *options)
                controlled = merged_controls(controlled, more, meta)
    tables = tables_of(tally, samples.labels, meta["n_layers"]) | {"controls": controlled}
    return SweepResult(tables, meta | chunk.range | {"counts": tally.totals()})


def measure_batch(
    chunk: Chunk,
    batch: Batch,
    probes: list[Probe],
    tally: Tally,
    of_weights: list[dict],
    extra: dict[str, Tensor],
) -> None:
    """Runs the model on a batch and adds what the probes measure in each layer.

    of_weights: what has been computed of each layer's weights. extra: what probes read beside
    activations.
    """
    chunk.measure(batch, _readings(chunk, probes, tally, of_weights, extra))
    tally.flush(probes)


def _readings(
    chunk: Chunk,
    probes: list[Probe],
    tally: Tally,
    of_weights: list[dict],
    extra: dict[str, Tensor],
) -> list[Reading]:
    """Returns a reading for each probe, so that it measures a layer while its points are in cache.

    What probes of one layer share is kept until the last of them has measured the layer.
    """
    layers: Any = getattr(chunk.model, chunk.blocks)
    names = set(dict(layers[0].named_modules()))
    reading = [item for item in probes if item.points]
    made: list[dict] = [{} for _ in layers]
    left = [len(reading)] * len(layers)

    def measure(layer: int, acts: dict[str, Tensor], batch: Batch, item: Probe) -> None:
        shared = LayerActs(acts | extra, of_weights[layer], made[layer])
        try:
            answer = on_activations(item, layers[layer], shared)
        except ValueError as error:
            where = f"{item.name} in layer {layer}, samples {batch.start} to {batch.last}"
            raise ValueError(f"{where}: {error}") from error
        tally.add(item, layer, answer, batch.start)
        left[layer] -= 1
        if not left[layer]:
            made[layer].clear()

    def measure_final(layer: int, acts: dict[str, Tensor], batch: Batch) -> None:
        for item in probes:
            answer = on_final(item, acts["hook_resid_post"], layers[layer])
            tally.add(item, layer + 1, answer, batch.start)

    readings = []
    for item in reading:
        points = [*item.points, *(point for point in item.optional if point in names)]
        readings.append(Reading(points, partial(measure, item=item)))
    if any(item.final for item in probes):
        readings.append(Reading("hook_resid_post", measure_final, [len(layers) - 1]))
    return readings


def fitting(probes: Probes, model: HookedModel | DecoderView, blocks: str) -> list[Probe]:
    """Returns the probes asked for; of the default ones those whose points the layers have.

    Raises KeyError if a probe that was asked for reads a point that the layers lack.
    """
    chosen = resolve(probes)
    names = set(dict(getattr(model, blocks)[0].named_modules()))
    if probes is None:
        chosen = [item for item in chosen if set(item.points) <= names]
    for point in (point for item in chosen for point in item.points):
        if blocks == "blocks" and hasattr(model, "check_point"):
            model.check_point(full_name(point, 0))
        elif point not in names:
            raise KeyError(
                f"the layers of {blocks} have no hook point {point!r}: see model.hook_dict."
            )
    return chosen


def check_masks(probes: list[Probe], samples: Samples | None) -> None:
    """Raises ValueError if a probe needs masks and there are none, or the first cannot be read."""
    name = next((item.name for item in probes if item.masks), None)
    if name is None:
        return
    if samples is None:
        raise ValueError(
            f"the probe {name!r} needs masks, and a cache has none: "
            "use ci.sweep on data with masks."
        )
    if samples.masks is None:
        raise ValueError(
            f"the probe {name!r} needs masks, and the data has none: give {forms(masks=True)}, "
            "or a datasets.Dataset with an image and a mask column."
        )
    samples.masks(samples.start, samples.start + 1)  # raises now, not under a progress bar


def _masks(probes: list[Probe], samples: Samples, batch: Batch) -> dict[str, Tensor]:
    """Returns what probes of masks get of a batch (`MASKS`), if there is such a probe."""
    if samples.masks is None or not any(item.masks for item in probes):
        return {}
    start, stop = batch.start, batch.last + 1
    masks, after = samples.masks(start, stop), stop % (samples.of or samples.n)
    others = torch.cat([masks[1:], samples.masks(after, after + 1)])
    values = (masks, others, torch.arange(start, stop))
    device = batch.inputs.device
    return {name: value.to(device) for name, value in zip(MASKS, values, strict=True)}


def measure_weights(layers: Any, probes: list[Probe], tally: Tally) -> None:
    """Adds what the probes measure of the weights of each layer."""
    for layer, block in enumerate(layers):
        for item in probes:
            tally.add_weights(item.name, layer, on_weights(item, block))
