"""Provenance of numbers: model, data, settings, units, versions, time."""

import hashlib
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from crate_interp import __version__
from crate_interp.core.safe_text import plain
from crate_interp.data import Samples
from crate_interp.data.streams import Stream
from crate_interp.measures.checks import AUTOCAST
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.hooked import HookedModel
from crate_interp.models.weights import model_digest, values_of_weights
from crate_interp.probes import Probe, labels_of
from crate_interp.questions.code_digest import Unknown, hooks_of, parts_of
from crate_interp.results import sample_ranges

_PACKAGES = ("torch", "transformer-lens", "numpy")


def model_meta(model: HookedModel | DecoderView, n: int) -> dict[str, Any]:
    """Returns the meta of numbers measured on a model and n samples of unknown data."""
    whole = model if isinstance(model, HookedModel) else model.whole
    store = values_of_weights(whole)
    if "digest" not in store:
        store["digest"] = model_digest(whole)
    versions = {"crate_interp": __version__, "python": platform.python_version()}
    chosen = torch_settings()
    return {
        "model": model.cfg.model_name,
        "model_digest": store["digest"],
        "config": model.cfg.to_dict(),
        "n_layers": len(model.blocks),
        "data": sample_ranges.of(None, 0, n),
        "n_samples": n,
        "unit": getattr(model, "unit", "images"),  # a cache's decoder has no unit
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "device": str(model.cfg.device),
        "threads": torch.get_num_threads(),
        "versions": versions | {name: version(name) for name in _PACKAGES},
    } | ({"torch_settings": chosen} if chosen else {})


def probes_meta(probes: list[Probe], model: HookedModel | DecoderView) -> dict[str, Any]:
    """Returns the points and settings of probes, and how to read each statistic.

    For a black box, the settings of probes that use U say which map was used in place of U.
    """
    instead = getattr(model.cfg, "subspaces", None)
    chosen = {} if instead is None else {"subspaces": instead}
    facts: dict[str, Any] = {"probes": {}, "statistics": {}}
    for item in probes:
        settings = dict(item.settings) | (chosen if item.subspaces else {})
        facts["probes"][item.name] = {"points": list(item.points), "settings": settings}
        shown = {name: own for name, own in item.records.items() if name not in item.counts}
        facts["statistics"] |= {f"{item.name}.{name}": list(shown[name].facts) for name in shown}
    return facts | labels_of(probes)


def data_meta(model: HookedModel, samples: Samples | Stream, batch_size: int) -> dict[str, Any]:
    """Returns the meta of numbers measured on a model and samples of a data set.

    For a stream the number of samples is 0 until its chunks are known (`with_facts`).
    """
    n = samples.n or 0
    data = sample_ranges.of(samples.fingerprint, samples.start, samples.start + n)
    if isinstance(samples, Samples) and samples.groups is not None:
        data[0] |= sample_ranges.grouped(samples.groups)
    found = edits(model)
    more = {"edits": found} if found else {}
    return model_meta(model, n) | {"data": data, "batch_size": int(batch_size)} | more


def edits(model: HookedModel) -> list[str]:
    """Returns edits that weights and config do not show: points with hooks, edited MLPs."""
    found = [name for name, point in getattr(model, "hook_dict", {}).items() if point.fwd_hooks]
    for layer, block in enumerate(model.blocks):
        changed = getattr(getattr(block, "mlp", None), "edited", None) or {}
        found += [f"blocks.{layer}.mlp.{name}={value:g}" for name, value in changed.items()]
    return found


def code_of(model: nn.Module, read: Mapping[str, object], tag: str | None) -> dict[str, Any]:
    """Returns digests of what a run's numbers depend on and its meta does not show, by name.

    These are the values in `read`, such as functions of the user's, and the hooks on the model. The
    digests tell whether they are still what measured a folder's chunks. tag: a text that stands for
    values whose content cannot be read. Raises ValueError for such a value without a tag.
    """
    hooks = {
        f"hook {number} at {name}": function
        for name, functions in hooks_of(model).items()
        for number, function in enumerate(functions)
    }
    found: dict[str, Any] = {}
    for name, value in {**read, **hooks}.items():
        try:
            found[name] = parts_of(value)
        except Unknown as error:
            if tag is None:
                reads = f"{plain(name)} reads {plain(error, 300)}, which cannot be compared later"
                raise ValueError(f"{reads}: give tag='...' (--tag), which names it.") from None
            found[name] = f"tag {tag}"
    return found


def torch_settings() -> dict[str, str]:
    """Returns torch's settings that change numbers and are not those torch starts with."""
    found = {
        f"autocast {kind}": str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        for kind in AUTOCAST
        if torch.is_autocast_enabled(kind)
    }
    others = {
        "default dtype": (str(torch.get_default_dtype()).removeprefix("torch."), "float32"),
        "deterministic": (str(torch.are_deterministic_algorithms_enabled()), "False"),
        "cudnn deterministic": (str(torch.backends.cudnn.deterministic), "False"),
        "matmul precision": (torch.get_float32_matmul_precision(), "highest"),
    }
    return found | {name: now for name, (now, first) in others.items() if now != first}


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
