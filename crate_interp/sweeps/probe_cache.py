"""ci.probe: the probes of ci.sweep, on a cache."""

from typing import Any

import torch

from crate_hooks import full_name
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.cache import CrateCache
from crate_interp.models.compat.offload import with_weights
from crate_interp.probes import Probe
from crate_interp.probes.layer_reading import LayerActs
from crate_interp.probes.probe import on_activations, on_final
from crate_interp.questions.batches import Batch, last_point
from crate_interp.questions.provenance import model_meta, probes_meta
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import Probes, check_masks, fitting, measure_weights, naming
from crate_interp.sweeps.sweep_tables import Tally, tables_of


@with_weights
def probe(cache: CrateCache, probes: Probes = None) -> SweepResult:
    """Measures the cache of `model.run_with_cache(x)`, with the model's current weights.

    Texts of unequal length, which were padded, are measured one by one without their padding.

    The decoder of a masked autoencoder is `ci.probe(cache.decoder)`; the towers of a CLIP are
    `cache.visual` and `cache.text`. Controls are not measured, as they need another forward.

    Raises ValueError for anything but such a cache, if the cache has no batch axis or only some of
    the tokens, and if the model's weights have changed since the cache was made. Raises KeyError if
    the cache lacks a hook point that the probes read.
    """
    if not isinstance(cache, CrateCache):
        raise ValueError(
            f"got {type(cache).__name__}, "
            "but ci.probe takes the cache of model.run_with_cache(images). Use "
            "logits, cache = model.run_with_cache(images); ci.probe(cache)."
        )
    model = cache.model
    if model.towers:
        raise ValueError(
            "a CLIP is two models. Probe its towers with "
            "ci.probe(cache.visual) and ci.probe(cache.text)."
        )
    chosen = fitting(probes, model, "blocks")
    check_masks(chosen, None)
    n = _check(cache, chosen)
    cache.check_weights()
    tally = Tally(n)
    with torch.no_grad():
        measure_weights(model, "blocks", chosen, tally)
        for first, part in cache.parts():
            _measure(part, chosen, tally, first)
        tally.flush(chosen)
    cache.check_weights()  # a probe may have written into them
    blocks = "decoder_blocks" if isinstance(model, DecoderView) else "blocks"
    meta = model_meta(model, n) | probes_meta(chosen, model)
    meta |= {"blocks": blocks, "controls": 0, "counts": tally.totals()}
    return SweepResult(tables_of(tally, None, len(model.blocks)), meta)


def _measure(cache: CrateCache, probes: list[Probe], tally: Tally, first: int) -> None:
    """Adds the answers of probes on a cache without padding.

    first: the number of the cache's first sample.
    """
    model: Any = cache.model
    reading = [item for item in probes if item.points]
    points = [point for item in reading for point in (*item.points, *item.optional)]
    batch = Batch(next(iter(cache.values())), first)
    for layer, block in enumerate(model.blocks):
        names = {point: full_name(point, layer) for point in points}
        held = {point: cache[name] for point, name in names.items() if name in cache.cache_dict}
        acts = LayerActs(held, {})
        for item in reading:
            with naming(item, layer, batch):
                tally.add(item, layer, on_activations(item, block, acts), first)
    for item in (item for item in probes if item.final):
        with naming(item, len(model.blocks), batch):
            answer = on_final(item, cache[last_point(model)], model.blocks[-1])
            tally.add(item, len(model.blocks), answer, first, final=True)


def _check(cache: CrateCache, probes: list[Probe]) -> int:
    """Checks that a cache has all that the probes read, and returns its number of samples."""
    model: Any = cache.model
    if not cache.has_batch_dim:
        raise ValueError(
            "the cache has no batch axis. Call run_with_cache without remove_batch_dim=True."
        )
    points = [point for item in probes for point in item.points]
    wanted = [full_name(point, layer) for point in points for layer in range(len(model.blocks))]
    wanted += [last_point(model)] if any(item.final for item in probes) else []
    missing = [name for name in dict.fromkeys(wanted) if name not in cache.cache_dict]
    if missing:
        shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise KeyError(
            f"the cache lacks {len(missing)} hook points that the probes read: {shown}. "
            "Cache these points too, or cache all points."
        )
    _check_tokens(cache)
    return len(next(iter(cache.values())))  # the first axis of every point is the batch


def _check_tokens(cache: CrateCache) -> None:
    """Raises ValueError if a cache holds only a slice of the tokens: probes need all tokens."""
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
            "the cache holds some of the tokens only. Call run_with_cache without pos_slice."
        )
