"""Provenance of numbers: model, data, settings, units, versions, time."""

import hashlib
import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch

from crate_interp import __version__
from crate_interp.data import Samples
from crate_interp.data.streams import Stream
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.hooked import HookedModel
from crate_interp.models.weight_cache import kept, model_digest
from crate_interp.probes import Probe
from crate_interp.probes.built_in import labels_of
from crate_interp.results import sample_ranges
from crate_interp.sweeps.ledgers.code_digest import digest_of_code

_PACKAGES = ("torch", "transformer-lens", "numpy")


def model_meta(model: HookedModel | DecoderView, n: int) -> dict[str, Any]:
    """Returns the meta of numbers measured on a model and n samples of unknown data."""
    whole = model if isinstance(model, HookedModel) else model.model
    digest = kept(whole, "digest", lambda: model_digest(whole))
    versions = {"crate_interp": __version__, "python": platform.python_version()}
    return {
        "model": model.cfg.model_name,
        "model_digest": digest,
        "config": model.cfg.to_dict(),
        "n_layers": len(model.blocks),
        "data": sample_ranges.of(None, 0, n),
        "n_samples": n,
        "unit": getattr(model, "unit", "images"),  # a cache's decoder has no unit
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "device": str(model.cfg.device),
        "threads": torch.get_num_threads(),
        "versions": versions | {name: version(name) for name in _PACKAGES},
    }


def probes_meta(probes: list[Probe], model: HookedModel | DecoderView) -> dict[str, Any]:
    """Returns the points and settings of probes, and how to read each statistic.

    For a black box, the settings of probes that use U say which map was used in place of U.
    """
    instead = getattr(model.cfg, "subspaces", None)
    chosen = {} if instead is None else {"subspaces": instead}
    return {
        "probes": {
            item.name: {
                "points": list(item.points),
                "settings": dict(item.settings) | (chosen if item.subspaces else {}),
            }
            for item in probes
        },
        "statistics": {
            f"{item.name}.{name}": list(record.facts)
            for item in probes
            for name, record in item.records.items()
            if name not in item.counts
        },
    } | labels_of(probes)


def data_meta(model: HookedModel, samples: Samples | Stream, batch_size: int) -> dict[str, Any]:
    """Returns the meta of numbers measured on a model and samples of a data set.

    For a stream the number of samples is 0 until its chunks are known (`with_facts`).
    """
    n = samples.n or 0
    data = sample_ranges.of(samples.fingerprint, samples.start, samples.start + n)
    found = edits(model)
    more = {"edits": found} if found else {}
    return model_meta(model, n) | {"data": data, "batch_size": int(batch_size)} | more


def edits(model: HookedModel) -> list[str]:
    """Returns edits that weights and config do not show: points with hooks, edited MLPs."""
    points: Any = getattr(model, "hook_dict", {})
    found = [name for name, point in points.items() if point.fwd_hooks]
    for layer, block in enumerate(model.blocks):
        changed = getattr(getattr(block, "mlp", None), "edited", None) or {}
        found += [f"blocks.{layer}.mlp.{name}={value:g}" for name, value in changed.items()]
    return found


def code_of(probes: list[Probe], forward: object) -> dict[str, str]:
    """Returns a digest of the code of each probe and of the forward, by name.

    The digests tell whether the user's code is still the code that measured a folder's chunks.
    """
    named = {item.name: (item.measure, item.final, item.weights) for item in probes}
    return {
        name: digest_of_code(functions) for name, functions in {**named, "forward": forward}.items()
    }


def digest_of_labels(labels: Iterable[Any] | None) -> str | None:
    """Returns a digest of labels; None without labels.

    The data's fingerprint may not cover the labels.
    """
    if labels is None:
        return None
    digest = hashlib.sha256()
    for label in labels.tolist() if isinstance(labels, torch.Tensor) else labels:
        digest.update(f"{label}\n".encode(errors="backslashreplace"))
    return f"sha256:{digest.hexdigest()}"
