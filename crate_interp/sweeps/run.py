"""ci.sweep: probes over a data set in one stream; ci.probe: the same probes on a cache."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crate_hooks import full_name, read
from crate_interp.data import Samples, forms
from crate_interp.models.cache import CrateCache
from crate_interp.probes import Probe, resolve
from crate_interp.probes.probe import MASKS, on_activations, on_final, on_weights
from crate_interp.probes.shared import LayerActs
from crate_interp.sweeps.controls import controls as run_controls
from crate_interp.sweeps.provenance import cache_meta, sweep_meta
from crate_interp.sweeps.result import SweepResult, result_of
from crate_interp.sweeps.stream import (
    Forward,
    batches,
    check_batch_size,
    check_model,
    last_point,
    run,
    samples_of,
)
from crate_interp.sweeps.tally import Tally

Probes = str | Probe | Sequence[str | Probe] | None


def sweep(
    model: Any,
    data: Any,
    *,
    probes: Probes = None,
    batch_size: int = 32,
    limit: int | None = None,
    blocks: str = "blocks",
    forward: Forward = run,
    controls: bool = True,
    progress: bool = True,
) -> SweepResult:
    """Runs the model over `data` once and keeps what the probes say of each layer, sample by sample.

    probes: names and/or Probe objects, None for those of the default four that the model has the points for. data: see
    `crate_interp.data.open_data` and `open_text`. limit: the first n samples. blocks: "decoder_blocks" for the decoder of a masked
    autoencoder. forward(model, batch): another way to run it; by default a masked autoencoder sees every patch. controls:
    negative controls on the first 8 samples, `result.controls()`, for which each probe is called again.

    Memory does not grow with the number of samples, but for the numbers themselves: a layer's activations are let go as
    soon as the probes have seen them. Hooks that are on the model stay on and act.

    Raises ValueError, before work starts, for unknown probes or data, empty data, and NaN or Inf in images or
    weights; and for a statistic that is not finite, naming layer and samples.
    """
    check_batch_size(batch_size)
    check_model(model, blocks)
    chosen = _fitting(probes, model, blocks)
    samples = samples_of(model, data, limit)
    check_masks(chosen, samples)
    started = time.perf_counter()
    tally, table = Tally(samples.n), None
    with torch.no_grad():
        _measure_weights(getattr(model, blocks), chosen, tally)
        of_weights: list[dict] = [{} for _ in getattr(model, blocks)]
        for start, batch in batches(model, samples, batch_size, "sweep", progress):
            extra = _masks(chosen, samples, start, batch)
            measure_batch(model, chosen, batch, tally, start, of_weights, blocks, forward, extra)
            if controls and table is None:
                table = run_controls(model, chosen, batch, blocks, forward, extra)
    meta = sweep_meta(model, chosen, samples, batch_size, time.perf_counter() - started)
    meta |= {"blocks": blocks, "counts": tally.totals()}
    if model.cfg.kind == "mae" and forward is run:
        meta["mask_ratio"] = 0.0
    return result_of(tally, samples.labels, meta, table)


def probe(cache: Any, probes: Probes = None) -> SweepResult:
    """The same probes on the cache of `model.run_with_cache(images)`, with the weights the model has now.

    Of a masked autoencoder's decoder: `ci.probe(cache.decoder)`; of a CLIP's towers: `cache.visual`, `cache.text`. Raises ValueError for
    anything but such a cache, for one without batch axis or with some of the tokens, KeyError for one that lacks a hook
    point the probes read. There are no controls: they need another forward.
    """
    if not isinstance(cache, CrateCache):
        raise ValueError(
            f"ci.probe takes the cache of model.run_with_cache(images), got {type(cache).__name__}: "
            "logits, cache = model.run_with_cache(images); ci.probe(cache)."
        )
    model = cache.model
    if model.cfg.kind == "clip":
        raise ValueError(
            "a CLIP is two models: probe its towers, ci.probe(cache.visual) and ci.probe(cache.text)."
        )
    chosen = _fitting(probes, model, "blocks")
    check_masks(chosen, None)
    if not cache.has_batch_dim:
        raise ValueError(
            "the cache has no batch axis: run_with_cache without remove_batch_dim=True."
        )
    layers = range(len(model.blocks))
    _check_cached(cache, chosen, layers)
    _check_tokens(cache)
    n = len(next(iter(cache.values())))  # every point has the batch first
    tally = Tally(n)
    with torch.no_grad():
        _measure_weights(model.blocks, chosen, tally)
        for layer in layers:
            reading = [item for item in chosen if item.points]
            names = {
                point: full_name(point, layer)
                for item in reading
                for point in (*item.points, *item.optional)
            }
            acts = LayerActs(
                {point: cache[name] for point, name in names.items() if name in cache.cache_dict},
                {},
            )
            for item in reading:
                tally.add(item, layer, on_activations(item, model.blocks[layer], acts), 0)
        for item in (item for item in chosen if item.final):
            tally.add(item, len(layers), on_final(item, cache[last_point(model)]), 0)
        tally.flush(chosen)
    return result_of(tally, None, cache_meta(model, chosen, n) | {"counts": tally.totals()})


def _fitting(probes: Probes, model: Any, blocks: str) -> list[Probe]:
    """The probes asked for; of the default ones those whose points the layers have. KeyError for one that was named and cannot read."""
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
    """ValueError where a probe reads masks and there are none, or the first of them cannot be read."""
    wanting = next((item.name for item in probes if item.masks), None)
    if wanting and samples is None:
        raise ValueError(
            f"the probe {wanting!r} needs masks, and a cache has none: ci.sweep it over data with masks."
        )
    if wanting and samples and samples.masks is None:
        raise ValueError(
            f"the probe {wanting!r} needs masks, and the data has none: give {forms(masks=True)}, "
            "or a datasets.Dataset with an image and a mask column."
        )
    if wanting and samples and samples.masks:
        samples.masks(
            0, 1
        )  # what is wrong with the first mask is said now, not under a progress bar


def _masks(probes: list[Probe], samples: Samples, start: int, batch: Tensor) -> dict[str, Tensor]:
    """What probes of masks get of a batch (`MASKS`), where one reads them."""
    if samples.masks is None or not any(item.masks for item in probes):
        return {}
    stop = start + len(batch)
    masks, after = samples.masks(start, stop), stop % samples.n
    others = torch.cat([masks[1:], samples.masks(after, after + 1)])
    values = (masks, others, torch.arange(start, stop))
    return {name: value.to(batch.device) for name, value in zip(MASKS, values, strict=True)}


def _measure_weights(layers: Any, probes: list[Probe], tally: Tally) -> None:
    for layer, block in enumerate(layers):
        for item in probes:
            tally.add_weights(item.name, layer, on_weights(item, block))


def measure_batch(
    model: Any,
    probes: list[Probe],
    batch: Tensor,
    tally: Tally,
    start: int,
    of_weights: list[dict],
    blocks: str = "blocks",
    forward: Forward = run,
    extra: dict[str, Tensor] | None = None,
) -> None:
    """One forward; each probe measures a layer as soon as its points have fired, while they are in a processor's cache."""
    layers = getattr(model, blocks)
    names = dict(layers[0].named_modules())
    reading = [item for item in probes if item.points]
    made: list[dict] = [
        {} for _ in layers
    ]  # what probes of a layer share, until the last of them has measured it
    left = [len(reading)] * len(layers)

    def measure(layer: int, acts: dict[str, Tensor], item: Probe) -> None:
        shared = LayerActs(acts | (extra or {}), of_weights[layer], made[layer])
        try:
            answer = on_activations(item, layers[layer], shared)
        except ValueError as error:
            last = start + len(batch) - 1
            raise ValueError(
                f"{item.name} in layer {layer}, samples {start} to {last}: {error}"
            ) from error
        tally.add(item, layer, answer, start)
        left[layer] -= 1
        if not left[layer]:
            made[layer].clear()
            left[layer] = len(reading)

    def measure_final(layer: int, acts: dict[str, Tensor]) -> None:
        for item in probes:
            tally.add(item, layer + 1, on_final(item, acts["hook_resid_post"]), start)

    with ExitStack() as stack:
        for item in reading:
            points = [*item.points, *(point for point in item.optional if point in names)]
            stack.enter_context(read(model, points, partial(measure, item=item), blocks=blocks))
        if any(item.final for item in probes):
            stack.enter_context(
                read(
                    model, "hook_resid_post", measure_final, layers=[len(layers) - 1], blocks=blocks
                )
            )
        if reading or any(item.final for item in probes):
            forward(model, batch)
    tally.flush(probes)


def _check_cached(cache: Any, probes: list[Probe], layers: range) -> None:
    wanted = [
        full_name(point, layer) for item in probes for point in item.points for layer in layers
    ]
    wanted += [last_point(cache.model)] if any(item.final for item in probes) else []
    missing = [name for name in dict.fromkeys(wanted) if name not in cache.cache_dict]
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise KeyError(
            f"the cache lacks {len(missing)} hook points the probes read: {shown}. Cache them too, or all."
        )


def _check_tokens(cache: CrateCache) -> None:
    """A slice of the tokens would be measured as if it were all of them."""
    shapes = {
        name: value.shape for name, value in cache.cache_dict.items() if name.startswith("blocks.")
    }
    counts = {shape[-2:] for name, shape in shapes.items() if name.endswith("attn.hook_pattern")}
    sliced = any(query != key for query, key in counts)
    streams = {shape[1] for name, shape in shapes.items() if "hook_resid_" in name}
    cfg = cache.model.cfg
    if cfg.kind == "vision" and not cfg.interpolate_pos:
        sliced |= bool(streams - {cfg.n_ctx})
    if sliced or len(streams) > 1:
        raise ValueError(
            "the cache holds some of the tokens only: run_with_cache without pos_slice."
        )
