"""Where numbers come from: model, data, settings, units, versions, time."""

import platform
from importlib.metadata import version
from typing import Any

from crate_interp import __version__, ranges
from crate_interp.data import Samples
from crate_interp.models.autoencoder import DecoderView
from crate_interp.models.digest import model_digest
from crate_interp.models.hooked import HookedModel
from crate_interp.probes import Probe

_PACKAGES = ("torch", "transformer-lens", "numpy")


def model_meta(model: HookedModel | DecoderView, n: int) -> dict[str, Any]:
    """Returns what is known of numbers measured on a model and n samples of unknown data."""
    digest = model_digest(model if isinstance(model, HookedModel) else model.model)
    versions = {"crate_interp": __version__, "python": platform.python_version()}
    return {
        "model": model.cfg.model_name,
        "model_digest": digest,
        "config": model.cfg.to_dict(),
        "n_layers": len(model.blocks),
        "data": ranges.of(None, 0, n),
        "n_samples": n,
        "unit": getattr(model, "unit", "images"),  # the decoder of a cache has none
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "device": str(model.cfg.device),
        "versions": versions | {name: version(name) for name in _PACKAGES},
    }


def probes_meta(probes: list[Probe], model: HookedModel | DecoderView) -> dict[str, Any]:
    """Returns the points and settings of probes, and how to read each statistic.

    The settings of probes that measure against U say what a black box has in its place.
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
            f"{item.name}.{name}": list(facts)
            for item in probes
            for name, facts in item.statistics.items()
            if name not in item.counts
        },
    }


def data_meta(model: HookedModel, samples: Samples, batch_size: int) -> dict[str, Any]:
    """Returns what is known of numbers measured on a model and samples of a data set."""
    stop = samples.start + samples.n
    data = ranges.of(samples.fingerprint, samples.start, stop)
    return model_meta(model, samples.n) | {"data": data, "batch_size": int(batch_size)}
