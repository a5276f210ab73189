"""ci.sweep: measures probes over a data set in one stream."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from crate_hooks import full_name
from crate_interp.core.pictures import Undecodable
from crate_interp.core.run_options import Run, RunOptions, run_options
from crate_interp.data import Data, Samples, forms
from crate_interp.data.streams import Stream
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.compat.offload import with_weights
from crate_interp.models.hooked import HookedModel
from crate_interp.models.weight_cache import values_of_weights, weight_mark
from crate_interp.probes import BUILT_IN, DEFAULT, Probe, resolve
from crate_interp.probes.built_in import OF_MEMBERS
from crate_interp.probes.layer_reading import LayerActs
from crate_interp.probes.probe import MASKS, is_ours, on_activations, on_final, on_weights
from crate_interp.questions import batches
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.experiment import Pass, Plan, Question, Tables
from crate_interp.questions.provenance import functions_of, probes_meta
from crate_interp.questions.untrained_twins import twin
from crate_interp.stats.contrasts import MOST_GROUPS
from crate_interp.sweeps.controls import Controls, check_controls
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.stores.replay import Replay, opened, readable
from crate_interp.sweeps.sweep_tables import Key, Tally, merged_controls, no_controls, tables_of

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
        probes: Names of probes, such as frames, which has the change of R^c by attention, Probe
            objects, or both. Default: compression, sparsity, attention and alignment.
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
    """The question of `sweep`. replay: the forward of a store, if the data is one."""

    probes: Any = None
    blocks: str = "blocks"
    forward: batches.Forward = batches.run_layers
    controls: int = 0
    precision: str | None = None
    replay: Replay | None = None
    result, streams = SweepResult, True

    def opened(
        self, model: HookedModel, data: Data, options: RunOptions
    ) -> tuple["Sweep", Samples | Stream]:
        """Opens the data, and fills in what model and samples decide."""
        controls = check_controls(self.controls)
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
        facts = probes_meta(list(self.probes), model) | {"blocks": self.blocks}
        facts |= {"n_layers": len(getattr(model, self.blocks)), "controls": self.controls}
        facts |= self.replay.meta if self.replay else {}
        if model.cfg.kind == "mae" and self.forward is batches.run_layers:
            facts["mask_ratio"] = 0.0
        return facts | ({"precision": self.precision} if self.precision else {})

    def read(self) -> Mapping[str, object]:
        """Returns what else the numbers depend on, by name."""
        return functions_of(list(self.probes), self.forward)

    def passes(self) -> Pass:
        """Returns the pass that measures the probes."""
        return sweep_pass("sweep", self.probes, self.blocks, self.forward, self.controls)

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        return (yield self.passes())


def sweep_pass(
    name: str,
    probes: Sequence[Probe],
    blocks: str = "blocks",
    forward: batches.Forward = batches.run_layers,
    controls: int = 0,
) -> Pass:
    """Returns a pass that measures probes."""
    measure = partial(_of_chunk, probes=list(probes), controls=controls)
    masks = any(item.masks for item in probes)
    rules = SweepResult.STORED
    return Pass(name, measure, rules, masks=masks, blocks=blocks, forward=forward)


def _of_chunk(chunk: batches.Chunk, probes: list[Probe], controls: int) -> Tables:
    samples, mark = chunk.samples, weight_mark(chunk.model)
    reported = chunk.once.setdefault("reported", {})
    groups = None if samples.groups is None else np.array(samples.groups) % MOST_GROUPS
    tally = Tally(samples.n, samples.start, groups, reported=reported)
    controlled = no_controls()
    with torch.no_grad():
        layers: Any = getattr(chunk.model, chunk.blocks)
        if not chunk.number:  # weights are measured once, in the first chunk
            measure_weights(chunk.model, chunk.blocks, probes, tally)
        of_weights: list[dict] = chunk.once.setdefault("weights", [{} for _ in layers])
        untrained: Any = twin(chunk.model, 0) if samples.start < controls else None
        for batch in chunk.batches():
            extra = _masks(chunk, batch)
            if batch.start >= controls:
                untrained = None  # frees the twin's memory for the remaining batches
                measure_batch(chunk, batch, probes, tally, of_weights, extra)
                continue
            count = min(controls - batch.start, len(batch.inputs))
            watched = Controls(chunk, probes, batch.start, count, extra, of_weights)
            readings = watched.readings()
            own = measure_batch(chunk, batch, probes, tally, of_weights, extra, readings)
            more = watched.table(own, untrained, batch.inputs)
            controlled = merged_controls(controlled, more, {})
    if weight_mark(chunk.model) != mark:
        raise ValueError(
            f"the model's weights changed while samples {samples.start} to "
            f"{samples.start + samples.n - 1} were measured. Give a probe that does not write into "
            "weights, and do not train the model meanwhile."
        )
    counts = pd.DataFrame(list(tally.counts.items()), columns=["name", "value"])
    tables = tables_of(tally, samples.labels, len(layers)) | {"controls": controlled}
    return {**tables, "counts": counts.astype({"value": float})}


def measure_batch(
    chunk: batches.Chunk,
    batch: batches.Batch,
    probes: list[Probe],
    tally: Tally,
    of_weights: list[dict],
    extra: dict[str, Tensor],
    more: Sequence[batches.Reading] = (),
) -> dict[Key, Tensor]:
    """Runs the model on a batch, adds the probes' numbers to the tally, and returns the numbers.

    of_weights: values already computed from each layer's weights. extra: tensors that probes read
    in addition to activations. more: further readings.
    """
    left = [len([item for item in probes if item.points])] * len(of_weights)
    chunk.measure(batch, [*_readings(chunk, probes, tally, of_weights, extra, left), *more])
    for layer, count in enumerate(left):
        if count:
            raise ValueError(
                f"layer {layer} ran {'more than once' if count < 0 else 'not at all'} on samples "
                f"{batch.start} to {batch.last}: give a forward that runs every layer once."
            )
    answers = {(item.name, name, layer): value for item, layer, name, value, _ in tally.waiting}
    tally.flush(probes)
    return answers


def _readings(
    chunk: batches.Chunk,
    probes: list[Probe],
    tally: Tally,
    of_weights: list[dict],
    extra: dict[str, Tensor],
    left: list[int],
) -> list[batches.Reading]:
    """Returns a reading for each probe.

    Each layer is measured as soon as it has run, while its points are in the processor's cache.
    Values that a layer's probes share are kept until the last of these probes is done. left: how
    many probes have not measured each layer yet; the readings count it down.
    """
    layers: Any = getattr(chunk.model, chunk.blocks)
    names = set(dict(layers[0].named_modules()))
    reading = [item for item in probes if item.points]
    made: list[dict] = [{} for _ in layers]

    def measure(layer: int, acts: dict[str, Tensor], batch: batches.Batch, item: Probe) -> None:
        with naming(item, layer, batch), batches.measuring(acts, batch.inputs.device.type) as own:
            shared = LayerActs(own | extra, of_weights[layer], made[layer])
            answer = on_activations(item, layers[layer], shared)
            tally.add(item, layer, answer, batch.start)
        left[layer] -= 1
        if not left[layer]:
            made[layer].clear()

    def measure_final(layer: int, acts: dict[str, Tensor], batch: batches.Batch) -> None:
        for item in probes:
            device = batch.inputs.device.type
            with naming(item, layer + 1, batch), batches.measuring(acts, device) as own:
                answer = on_final(item, own["hook_resid_post"], layers[layer])
                tally.add(item, layer + 1, answer, batch.start, final=True)

    readings = []
    for item in reading:
        points = [*item.points, *(point for point in item.optional if point in names)]
        readings.append(batches.Reading(points, partial(measure, item=item)))
    if any(item.final for item in probes):
        readings.append(batches.Reading("hook_resid_post", measure_final, [len(layers) - 1]))
    return readings


@contextmanager
def naming(probe: Probe, layer: int, batch: batches.Batch) -> Iterator[None]:
    """Puts the names of a probe, layer and samples before the text of a ValueError."""
    try:
        yield
    except ValueError as error:
        where = f"{probe.name} in layer {layer}, samples {batch.start} to {batch.last}"
        raise ValueError(f"{where}: {error}") from error


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
            raise ValueError(
                f"the probe {probe.name!r} reads {point}, which the layers of family "
                f"{model.cfg.family!r} do not have: leave the probe out."
            )
        if blocks == "blocks" and hasattr(model, "check_point"):
            model.check_point(full_name(point, 0))
        elif point not in names:
            raise KeyError(
                f"the layers of {blocks} have no hook point {point!r}. See model.hook_dict."
            )
    return chosen


def check_masks(
    probes: list[Probe], samples: Samples | Stream | None, skip_bad: bool = False
) -> None:
    """Raises ValueError if a probe needs masks and there are none, or the first is unreadable.

    skip_bad: whether a first mask that cannot be decoded is allowed.
    """
    name = next((item.name for item in probes if item.masks), None)
    if name is None:
        return
    if samples is None:
        raise ValueError(
            f"the probe {name!r} needs masks, but a cache has none. "
            "Use ci.sweep on data with masks."
        )
    if isinstance(samples, Stream) or samples.masks is None:
        raise ValueError(
            f"the probe {name!r} needs masks, but the data has none. Give {forms(masks=True)}, "
            "or a datasets.Dataset with an image and a mask column. Maps need no masks: "
            "crate-interp explore shows them, and ci.maps.attention(cache, layer) returns them."
        )
    try:
        samples.masks(samples.start, samples.start + 1)  # raises now, not under a progress bar
    except Undecodable as error:
        if not skip_bad:
            raise ValueError(batches.advised(error)) from None


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
    device = batch.inputs.device
    return {name: value.to(device) for name, value in zip(MASKS, values, strict=True)}


def measure_weights(
    model: HookedModel | DecoderView, blocks: str, probes: list[Probe], tally: Tally
) -> None:
    """Adds the probes' numbers for the weights of each layer.

    Numbers of built-in probes are cached until the weights change.
    """
    whole = model if isinstance(model, HookedModel) else model.model
    layers: Any = getattr(model, blocks)
    found = []
    for item in probes:
        function = item.weights if item.points else item.measure
        ours = is_ours(function) and not hasattr(function, "func")  # every partial is a new one
        name = (item.name, function, layers is getattr(whole, "blocks", None))
        store = values_of_weights(whole) if ours else {}
        if name not in store:
            store[name] = _of_weights(item, layers)
        found.append(store[name])
    for layer in range(len(layers)):
        for item, answers in zip(probes, found, strict=True):
            tally.add_weights(item.name, layer, answers[layer])


def _of_weights(probe: Probe, layers: Any) -> list[dict[str, Tensor]]:
    answers = (on_weights(probe, block) for block in layers)
    return [{name: value.detach() for name, value in answer.items()} for answer in answers]
