"""ci.watch: probes on fixed samples while a model is trained."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from crate_interp.core import checks
from crate_interp.core.run_options import run_options
from crate_interp.data import Data, Samples
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.sweeps.run import Probes, planned
from crate_interp.training.callbacks import CALLBACKS
from crate_interp.training.watch_object import Watch

# what is not the same at another step, in another process or on another device
_FREE = ("model_digest", "device", "seconds")


def watch(
    model: HookedModel,
    data: Data,
    *,
    every: int = 100,
    probes: Probes = None,
    out: str | Path | None = None,
    callback: str | None = None,
    limit: int = 32,
    batch_size: int = 32,
    start: int = 0,
    resume: bool = True,
) -> Watch:
    """Returns what measures a model while it is trained, always on the first `limit` samples.

        with ci.watch(model, images, every=100) as watch:
            for x, y in batches:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.step()
        result = watch.result()

    The model is measured before the first update, after every `every` of them, and after the last.
    probes: as in `ci.sweep`; "frames" and "objective" measure R^c and the objective in the frames
    of the audit. A training has the same bits with and without it: the model is in eval mode only
    meanwhile, nothing draws from torch's random numbers, and gradients are untouched.

    callback: "transformers" or "lightning" makes what is returned a callback too, to be handed over
    as `Trainer(callbacks=[watch])`; it counts the updates itself, and the first process alone
    measures. The model is the hooked one, also where a trainer wraps it; weights that are sharded
    over processes (FSDP) cannot be measured.

    out: a folder that keeps each step as soon as it is measured, and the result. start: how many
    updates there were before, where a training goes on from a checkpoint: the steps up to there
    are taken from the folder. resume=False starts the folder over.

    A step at which a number is not finite, as in a training that diverges, is listed in
    meta["not_measured"] with a warning, and the training goes on. Raises ValueError before the
    training for arguments and data that cannot be measured, and if the folder holds something else
    or, at the step `start`, numbers that are not this model's;
    ImportError if the trainer's package is missing.
    """
    every, limit = checks.count("every", every), checks.count("limit", limit)
    options = run_options(watch, {"limit": limit, "batch_size": batch_size})
    start, resume = checks.count("start", start, least=0), checks.flag("resume", resume)
    made = Watch
    if callback is not None:
        made = CALLBACKS[checks.one_of("callback", callback, tuple(CALLBACKS))]()
    meta, stage, code = planned(model, data, probes, options)
    meta = {**meta, "model_digest": ""}  # it is another model at every step
    samples = stage.samples.kept() if isinstance(stage.samples, Stream) else stage.samples
    stage = replace(stage, samples=_remembered(samples))
    place, settings = None if out is None else Path(out), _settings(meta, code, every)
    return made(
        model, stage, meta, every=every, start=start, out=place, settings=settings, resume=resume
    )


def _settings(meta: dict[str, Any], code: dict[str, str], every: int) -> dict[str, Any]:
    """Returns what the steps in a folder depend on."""
    fixed = {name: value for name, value in meta.items() if name not in _FREE}
    run = {"format": 1, "kind": "watch", "stages": [], "settings": {**fixed, "every": every}}
    return {**run, "code": code}


def _remembered(samples: Samples) -> Samples:
    """Returns samples that are read once, and then stay in memory."""
    masks = None if samples.masks is None else functools.cache(samples.masks)
    return replace(samples, read=functools.cache(samples.read), masks=masks)
