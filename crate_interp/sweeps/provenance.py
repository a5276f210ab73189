"""Where numbers come from: digests of model and data, settings, units, versions, time."""

import platform
from importlib.metadata import version
from typing import Any

from crate_interp import __version__
from crate_interp.data import Samples
from crate_interp.models.digest import model_digest
from crate_interp.probes import Probe

_PACKAGES = ("torch", "transformer-lens", "numpy")


def cache_meta(model: Any, probes: list[Probe], n: int) -> dict[str, Any]:
    """What is known of numbers measured on a cache."""
    return {
        "model": model.cfg.model_name,
        "model_digest": model_digest(model)
        if hasattr(model, "state_dict")
        else None,  # not of a decoder's cache
        "config": model.cfg.to_dict(),
        "n_layers": len(model.blocks),
        "n_samples": n,
        "unit": "windows" if model.cfg.kind == "text" else "images",
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "device": str(model.cfg.device),
        "probes": {
            item.name: {"points": list(item.points), "settings": dict(item.settings)}
            for item in probes
        },
        "statistics": {
            f"{item.name}.{name}": list(facts)
            for item in probes
            for name, facts in item.statistics.items()
            if name not in item.counts
        },
        "versions": {"crate_interp": __version__, "python": platform.python_version()}
        | {name: version(name) for name in _PACKAGES},
    }


def sweep_meta(
    model: Any, probes: list[Probe], samples: Samples, batch_size: int, seconds: float
) -> dict[str, Any]:
    """What is known of a sweep."""
    facts = {
        "data_fingerprint": samples.fingerprint,
        "batch_size": batch_size,
        "seconds": round(seconds, 3),
    }
    return cache_meta(model, probes, samples.n) | facts
