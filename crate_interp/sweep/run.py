"""ci.sweep: probes over a data set in one stream; ci.probe: the same probes on a cache."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from crate_hooks import full_name, read
from crate_interp.data import open_data
from crate_interp.measures.checks import all_finite
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.probes import Probe, resolve
from crate_interp.probes.probe import on_activations, on_final, on_weights
from crate_interp.probes.shared import LayerActs
from crate_interp.sweep.provenance import cache_meta, sweep_meta
from crate_interp.sweep.result import SweepResult, result_of
from crate_interp.sweep.tally import Tally

Probes = str | Probe | Sequence[str | Probe] | None


def sweep(
    model: Any,
    data: Any,
    *,
    probes: Probes = None,
    batch_size: int = 32,
    limit: int | None = None,
    progress: bool = True,
) -> SweepResult:
    """Runs the model over `data` once and keeps what the probes say of each layer, sample by sample.

    probes: names and/or Probe objects, None for the default four. data: see `crate_interp.data.open_data`. limit: the
    first n samples. Memory does not grow with the number of samples, but for the numbers themselves: a layer's
    activations are let go as soon as the probes have seen them. Hooks that are on the model stay on and act.

    Raises ValueError, before work starts, for unknown probes or data, empty data, and NaN or Inf in images or
    weights; and for a statistic that is not finite, naming layer and samples.
    """
    chosen = resolve(probes)
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: give a whole number of at least 1.")
    _check_model(model, chosen)
    samples = open_data(data, model.preprocess, limit)
    started = time.perf_counter()
    tally = Tally(samples.n)
    with torch.no_grad(), tqdm(total=samples.n, desc="sweep", unit="image", disable=not progress) as bar:
        _measure_weights(model, chosen, tally)
        of_weights: list[dict] = [{} for _ in model.blocks]
        for start in range(0, samples.n, batch_size):
            images = samples.read(start, min(start + batch_size, samples.n)).to(model.cfg.device)
            _measure_batch(model, chosen, images, tally, start, of_weights)
            bar.update(len(images))
    meta = sweep_meta(model, chosen, samples, batch_size, time.perf_counter() - started)
    return result_of(tally, samples.labels, meta)


def probe(cache: Any, probes: Probes = None) -> SweepResult:
    """The same probes on the cache of `model.run_with_cache(images)`, with the weights the model has now.

    Raises ValueError for anything but such a cache, for one without batch axis or with some of the tokens, KeyError
    for one that lacks a hook point the probes read.
    """
    if not isinstance(cache, CrateCache):
        raise ValueError(
            f"ci.probe takes the cache of model.run_with_cache(images), got {type(cache).__name__}: "
            "logits, cache = model.run_with_cache(images); ci.probe(cache)."
        )
    chosen, model = resolve(probes), cache.model
    _check_kind(model)
    if not cache.has_batch_dim:
        raise ValueError("the cache has no batch axis: run_with_cache without remove_batch_dim=True.")
    layers = range(len(model.blocks))
    _check_cached(cache, chosen, layers)
    _check_tokens(cache)
    n = len(next(iter(cache.values())))  # every point has the batch first
    tally = Tally(n)
    with torch.no_grad():
        _measure_weights(model, chosen, tally)
        for layer in layers:
            reading = [item for item in chosen if item.points]
            points = [point for item in reading for point in item.points]
            acts = LayerActs({point: cache[full_name(point, layer)] for point in points}, {})
            for item in reading:
                tally.add(item.name, layer, on_activations(item, model.blocks[layer], acts), 0)
        for item in (item for item in chosen if item.final):
            tally.add(item.name, len(layers), on_final(item, cache[_last(model)]), 0)
    return result_of(tally, None, cache_meta(model, chosen, n))


def _check_model(model: Any, probes: list[Probe]) -> None:
    if not isinstance(model, HookedModel):
        raise ValueError(f"cannot measure {type(model).__name__}: give a hooked model, such as ci.load(...) returns.")
    _check_kind(model)
    for point in (point for item in probes for point in item.points):
        model.check_point(full_name(point, 0))
    for name, value in model.named_parameters():
        if not all_finite(value):
            raise ValueError(f"the weights hold NaN or Inf ({name}): nothing can be measured.")


def _check_kind(model: Any) -> None:
    """The probes read a CLS token and a U in every layer, which image classifiers have."""
    if model.cfg.kind != "vision":
        tower = " Its image tower can be measured: model.visual." if model.cfg.kind == "clip" else ""
        raise ValueError(
            f"the probes measure image classifiers, got a {type(model).__name__}.{tower} Use model.run_with_cache and ci.measures on its "
            "activations."
        )


def _measure_weights(model: Any, probes: list[Probe], tally: Tally) -> None:
    for layer, block in enumerate(model.blocks):
        for item in probes:
            tally.add_weights(item.name, layer, on_weights(item, block))


def _measure_batch(
    model: Any, probes: list[Probe], images: Tensor, tally: Tally, start: int, of_weights: list[dict]
) -> None:
    """One forward; each layer is measured as soon as its points have fired."""
    if not all_finite(images):
        bad = [start + index for index, image in enumerate(images) if not all_finite(image)]
        raise ValueError(f"images hold NaN or Inf: samples {', '.join(map(str, bad[:8]))}.")
    reading = [item for item in probes if item.points]
    finals = [item for item in probes if item.final]

    def measure(layer: int, acts: dict[str, Tensor]) -> None:
        shared = LayerActs(acts, of_weights[layer])
        for item in reading:
            tally.add(item.name, layer, on_activations(item, model.blocks[layer], shared), start)

    def measure_final(layer: int, acts: dict[str, Tensor]) -> None:
        for item in finals:
            tally.add(item.name, layer + 1, on_final(item, acts["hook_resid_post"]), start)

    points = [point for item in reading for point in item.points]
    if not points and not finals:
        return
    last = [len(model.blocks) - 1] if finals else []
    with (
        read(model, points, measure) if points else nullcontext(),
        read(model, ["hook_resid_post"], measure_final, layers=last),
    ):
        model(images)


def _last(model: Any) -> str:
    return full_name("hook_resid_post", len(model.blocks) - 1)


def _check_cached(cache: Any, probes: list[Probe], layers: range) -> None:
    wanted = [full_name(point, layer) for item in probes for point in item.points for layer in layers]
    wanted += [_last(cache.model)] if any(item.final for item in probes) else []
    for name in wanted:
        cache.model.check_point(name)
    missing = [name for name in dict.fromkeys(wanted) if name not in cache.cache_dict]
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise KeyError(f"the cache lacks {len(missing)} hook points the probes read: {shown}. Cache them too, or all.")


def _check_tokens(cache: CrateCache) -> None:
    """A slice of the tokens would be measured as if it were all of them."""
    shapes = {name: value.shape for name, value in cache.cache_dict.items() if name.startswith("blocks.")}
    counts = {shape[-2:] for name, shape in shapes.items() if name.endswith("attn.hook_pattern")}
    sliced = any(query != key for query, key in counts)
    streams = {shape[1] for name, shape in shapes.items() if "hook_resid_" in name}
    cfg = cache.model.cfg
    if not cfg.interpolate_pos:
        sliced |= bool(streams - {cfg.n_ctx})
    if sliced or len(streams) > 1:
        raise ValueError("the cache holds some of the tokens only: run_with_cache without pos_slice.")
