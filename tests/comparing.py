"""Results of sweeps with numbers that are known, for the tests of comparisons."""

import numpy as np
import pandas as pd

import crate_interp as ci
from crate_interp.sweeps.sweep_tables import no_controls

MOMENTS = ["probe", "statistic", "layer", "head", "n", "mean", "squares"]
WEIGHTS = ["probe", "statistic", "layer", "head", "value"]


def made(values, *, heads=None, weights=None, n_layers=None, name="made", **meta):
    """A SweepResult of "probe.statistic" -> numbers.

    values: [sample, layer]. heads: [sample, layer, head]. weights: [layer], or [layer, head].
    """
    every = [*values.values(), *(heads or {}).values()]
    n, layers = every[0].shape[:2] if every else (1, 1)
    sample, layer = np.indices((n, layers)).reshape(2, -1)
    samples = pd.DataFrame({"sample": sample, "label": None, "layer": layer})
    for key, numbers in values.items():
        samples[key] = numbers.reshape(-1)
    place = {"sample": [], "layer": [], "head": []}
    columns = {}
    for key, numbers in (heads or {}).items():
        place = dict(zip(place, np.indices(numbers.shape).reshape(3, -1), strict=True))
        columns[key] = numbers.reshape(-1)
    of_weights = []
    for key, numbers in (weights or {}).items():
        for at, value in enumerate(numbers):
            each = enumerate(value) if np.ndim(value) else [(None, value)]
            of_weights += [(*key.split("."), at, head, float(one)) for head, one in each]
    tables = {
        "samples": samples,
        "head_samples": pd.DataFrame(place | columns),
        "moments": pd.DataFrame(columns=MOMENTS),
        "weights": pd.DataFrame(of_weights, columns=WEIGHTS).astype({"head": "Int64"}),
        "controls": no_controls(),
    }
    keys = [*values, *(heads or {}), *(weights or {})]
    about = {
        "model": name,
        "model_digest": f"sha256:{name}",
        "config": {"family": "crate", "model_name": name},
        "n_layers": n_layers or layers,
        "data": [{"fingerprint": "f", "start": 0, "stop": n}],
        "n_samples": n,
        "unit": "images",
        "dtype": "float32",
        "device": "cpu",
        "versions": {"torch": "2"},
        "probes": {key.split(".")[0]: {"points": [], "settings": {"eps": 0.1}} for key in keys},
        "statistics": {key: ["nats", None, None, "as it is"] for key in keys},
        "counts": {},
        "seconds": 1.0,
    }
    return ci.SweepResult(tables, about | meta)


def numbers(seed, *shape, shift=0.0):
    """Skewed numbers with mean 1 + shift."""
    return np.random.default_rng(seed).exponential(size=shape) + shift


def row(result, statistic, layer):
    """The row of a comparison for "probe.statistic" and a layer of a."""
    probe, name = statistic.split(".")
    table = result.table()
    own = table[
        (table["probe"] == probe) & (table["statistic"] == name) & (table["layer"] == layer)
    ]
    (found,) = own.to_dict("records")
    return found
