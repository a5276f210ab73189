"""ci.sweep measures probes over a data set in one stream, ci.probe on a cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core import checks, device_waits, pictures
from crate_interp.core.run_options import Run, RunOptions, run_options
from crate_interp.data import Data, Samples, forms
from crate_interp.models import weights
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.models.runtimes import with_weights
from crate_interp.probes import BUILT_IN, DEFAULT, OF_MEMBERS, Probe, resolve
from crate_interp.probes.probe import MASKS
from crate_interp.questions import batches, provenance, untrained_twins
from crate_interp.questions.asking import Perhaps, ask
from crate_interp.questions.experiment import Opened, Pass, Question, Tables
from crate_interp.stats.contrasts import MOST_GROUPS
from crate_interp.sweeps import measuring
from crate_interp.sweeps.measuring import Reported
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.store_reading import Replay, opened, readable
from crate_interp.sweeps.sweep_tables import Numbers, Tally, merged_controls, no_controls, tables_of

Probes = str | Probe | Sequence[str | Probe] | None


@with_weights
def sweep(
    model: HookedModel,
    data: Data,
    *,
    probes: Probes = None,
    blocks: str = "blocks",
    forward: batches.Forward = batches.run_layers,
    controls: int = 32,
    precision: str | None = None,
    **run: Unpack[Run],
) -> Perhaps[SweepResult]:
    """Runs the model over `data` once, and keeps the probes' numbers for each layer.

    With more samples, memory grows only by the measured numbers. Hooks on the model stay active.

    Args:
        model: A hooked model.
        data: See `ci.data.open_data` and `open_text`, or the result of `ci.open_store`. If data is
            a stream, every process reads all rows.
        probes: Names of probes (such as "frames": how attention changes R^c), Probe objects, or
            both. Default: compression, sparsity, attention and alignment.
        blocks: "decoder_blocks" for a masked autoencoder's decoder.
        forward: Another way to run the model: forward(model, batch).
        controls: On how many of the first samples to measure the negative controls; each takes
            about two more forwards. 0: no controls.
        precision: bfloat16 runs the model under torch.autocast; probes measure in float32.
        run: The options of every streamed verb (crate_interp/core/run_options.py): batch_size,
            limit, workers, skip_bad, progress, out, chunk_size, resume, shard, engine. With out=, a
            folder keeps each chunk as soon as it is measured, and repeating the call continues
            where an earlier call stopped.

    Returns:
        The numbers of each layer and head; None while chunks of other shards are missing.

    Raises:
        ValueError: Before work starts, for arguments and data that cannot be measured, including
            NaN or Inf, and if the folder holds something else; with layer and samples, if a
            statistic is not finite.
    """
    question = Sweep(probes, blocks, forward, controls, precision)
    return ask(question, model, data, run_options(sweep, run))


@dataclass(frozen=True)
class Sweep(Question):
    """Measures probes over samples. replay: the forward of a store, if the data is one."""

    probes: Any = None
    blocks: str = "blocks"
    forward: batches.Forward = batches.run_layers
    controls: int = 0
    precision: str | None = None
    replay: Replay | None = None
    result, streams = SweepResult, True

    def opened(self, model: HookedModel, data: Data, options: RunOptions) -> Opened:
        """Opens the data, and fills in what model and samples decide."""
        controls = checks.count("controls", self.controls, least=0)
        chosen = fitting(self.probes, model, self.blocks)
        masks = any(item.masks for item in chosen)
        find = batches.samples_of if masks else batches.data_of
        samples, forward = opened(model, data, options, self.forward, find)
        chosen = readable(chosen, forward, model, self.blocks, some=self.probes is None)
        if masks:
            check_masks(chosen, samples, options.skip_bad)
        replay = forward if isinstance(forward, Replay) else None
        own = {"probes": tuple(chosen), "controls": 0 if replay else controls, "replay": replay}
        return replace(self, **own, forward=batches.in_precision(self.precision, forward)), samples

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        facts = provenance.probes_meta(list(self.probes), model) | {"blocks": self.blocks}
        facts |= {"n_layers": len(getattr(model, self.blocks)), "controls": self.controls}
        facts |= self.replay.meta if self.replay else {}
        if model.cfg.kind == "mae" and self.forward is batches.run_layers:
            facts["mask_ratio"] = 0.0
        return facts | ({"precision": self.precision} if self.precision else {})

    def read(self) -> Mapping[str, object]:
        """Returns what else the numbers depend on, by name."""
        kinds = ("measure", "final", "weights")
        parts = {f"{one.name}.{kind}": getattr(one, kind) for one in self.probes for kind in kinds}
        named = {name: own for name, own in parts.items() if own is not None}
        return named | {"forward": self.forward}

    def passes(self, model: HookedModel) -> Pass:
        """Returns the pass that measures the probes."""
        return sweep_pass("sweep", self.probes, self.blocks, self.forward, self.controls)


def sweep_pass(
    name: str,
    probes: Sequence[Probe],
    blocks: str = "blocks",
    forward: batches.Forward = batches.run_layers,
    controls: int = 0,
) -> Pass:
    """Returns a pass that measures probes."""
    measure = partial(_measured, probes=list(probes), controls=controls)
    masks = any(item.masks for item in probes)
    return Pass(name, measure, SweepResult.STORED, masks=masks, blocks=blocks, forward=forward)


def _measured(chunk: batches.Chunk, probes: list[Probe], controls: int) -> Tables:
    """Returns the stored tables of a chunk."""
    samples, mark = chunk.samples, weights.weight_mark(chunk.model)
    reported = chunk.once.setdefault("reported", {})
    groups = None if samples.groups is None else np.array(samples.groups) % MOST_GROUPS
    tally, controlled = Tally(samples.n, samples.start, groups), no_controls()
    with torch.no_grad():
        layers: Any = getattr(chunk.model, chunk.blocks)
        if not chunk.number:  # weights are measured once, in the first chunk
            measuring.measure_weights(chunk.model, chunk.blocks, probes, tally)
        of_weights: list[dict] = chunk.once.setdefault("weights", [{} for _ in layers])
        untrained: Any = untrained_twins.twin(chunk.model, 0) if samples.start < controls else None
        for batch in chunk.batches():
            how = (chunk, batch, probes, of_weights, _masks(chunk, batch), reported)
            count = min(controls - batch.start, len(batch.inputs))
            if count > 0:
                numbers, more = measuring.measure_controls(*how, untrained, count)
                controlled = merged_controls(controlled, more, {})
            else:
                untrained = None  # frees the twin's memory for the remaining batches
                numbers = device_waits.hoping(partial(measuring.measure_batch, *how), batch.inputs)
            tally.add(numbers, probes, batch.start)
    if weights.weight_mark(chunk.model) != mark:
        where = f"samples {samples.start} to {samples.start + samples.n - 1}"
        raise ValueError(f"a probe or a training changed the model's weights during {where}.")
    counts = pd.DataFrame(list(tally.counts.items()), columns=["name", "value"])
    tables = tables_of(tally, samples.labels, len(layers)) | {"controls": controlled}
    return {**tables, "counts": counts.astype({"value": float})}


def _masks(chunk: batches.Chunk, batch: batches.Batch) -> dict[str, Tensor]:
    """Returns the tensors that probes of masks read, by their names in `MASKS`.

    Returns no tensors if the stage reads no masks. "other_masks" has, for each sample, the mask of
    the next sample; for the last sample, that of the first. Samples without a decodable mask are
    skipped.
    """
    read = chunk.samples.masks
    if batch.masks is None or read is None:
        return {}
    others = torch.cat([batch.masks[1:], chunk.after(batch.last, read)])
    values = (batch.masks, others, torch.arange(batch.start, batch.last + 1))
    return {name: value.to(batch.inputs.device) for name, value in zip(MASKS, values, strict=True)}


def fitting(probes: Probes, model: HookedModel | DecoderView, blocks: str) -> list[Probe]:
    """Returns the requested probes, or the default probes whose points the layers have.

    Raises ValueError if a requested probe of this package reads a point that the layers lack, and
    KeyError for a probe of your own.
    """
    chosen = resolve((*DEFAULT, *OF_MEMBERS) if probes is None else probes)
    names = set(dict(getattr(model, blocks)[0].named_modules()))
    if probes is None:
        chosen = [item for item in chosen if set(item.points) <= names]
    for probe, point in [(each, point) for each in chosen for point in each.points]:
        if blocks == "blocks" and probe.name in BUILT_IN and point not in names:
            family = f"family {model.cfg.family!r} do not have: leave the probe out"
            raise ValueError(f"{probe.name!r} reads {point}, which layers of {family}.")
        if blocks == "blocks" and hasattr(model, "check_point"):
            model.check_point(full_name(point, 0))
        elif point not in names:
            raise KeyError(f"the layers of {blocks} have no hook point {point!r}.")
    return chosen


def check_masks(probes: list[Probe], samples: object, skip_bad: bool = False) -> None:
    """Raises ValueError if a probe needs masks and there are none, or the first is unreadable.

    skip_bad: whether a first mask that cannot be decoded is allowed.
    """
    name = next((item.name for item in probes if item.masks), None)
    if name is None:
        return
    if not isinstance(samples, Samples) or samples.masks is None:
        raise ValueError(
            f"the probe {name!r} needs masks, but the data has none: ci.sweep takes "
            f"{forms(masks=True)}, or a datasets.Dataset with an image and a mask column."
        )
    try:
        samples.masks(samples.start, samples.start + 1)  # raises now, not under a progress bar
    except pictures.Undecodable as error:
        if not skip_bad:
            raise ValueError(batches.advised(error)) from None


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
        raise ValueError(f"ci.probe takes a cache, not {type(cache).__name__}.")
    model = cache.model
    if model.towers:
        raise ValueError("a CLIP is two models: give cache.visual or cache.text.")
    chosen = fitting(probes, model, "blocks")
    check_masks(chosen, None)
    _check(cache, chosen)
    cache.check_weights()
    n, reported = len(next(iter(cache.values()))), {}
    tally = Tally(n)
    with torch.no_grad():
        measuring.measure_weights(model, "blocks", chosen, tally)
        for first, part in cache.parts():
            tally.add(_numbers(part, chosen, first, reported), chosen, first)
    cache.check_weights()  # a probe may have written into them
    blocks = "decoder_blocks" if isinstance(model, DecoderView) else "blocks"
    meta = provenance.model_meta(model, n) | provenance.probes_meta(chosen, model)
    meta |= {"blocks": blocks, "controls": 0, "counts": tally.totals()}
    return SweepResult(tables_of(tally, None, len(model.blocks)), meta)


def _numbers(cache: CrateCache, probes: list[Probe], first: int, reported: Reported) -> Numbers:
    """Returns the numbers of a cache without padding, whose first sample has the number `first`."""
    layers: Any = cache.model.blocks
    numbers: Numbers = {}
    batch = batches.Batch(next(iter(cache.values())), first)
    blank: list[dict] = [{} for _ in layers]
    with measuring.probe_readings(layers, probes, batch, numbers, reported, blank, {}) as readings:
        for reading in readings:
            for layer in range(len(layers)) if reading.layers is None else reading.layers:
                names = {point: full_name(point, layer) for point in reading.points}
                held = {point: cache[name] for point, name in names.items() if name in cache}
                reading.measure(layer, held, batch)
    return numbers


def _check(cache: CrateCache, probes: list[Probe]) -> None:
    """Raises an error for a cache that has not all tokens and points for the probes."""
    layers = range(len(cache.model.blocks))
    points = [(point, layer) for item in probes for point in item.points for layer in layers]
    points += [("hook_resid_post", -1)] if any(item.final for item in probes) else []
    for point, layer in points:
        cache.at(point, layer)
    shapes = {name: act.shape for name, act in cache.cache_dict.items() if name[:7] == "blocks."}
    patterns = [shape[-2:] for name, shape in shapes.items() if name.endswith("attn.hook_pattern")]
    streams = {shape[1] for name, shape in shapes.items() if "hook_resid_" in name}
    fixed = cache.model.cfg.kind == "vision" and not cache.model.cfg.interpolate_pos
    cut = any(query != key for query, key in patterns) or len(streams) > 1
    if cut or (fixed and streams - {cache.model.cfg.n_ctx}):
        raise ValueError("the cache holds some of the tokens only: cache without pos_slice.")
