"""Do R^c and the zeros of the code change with depth? Three trained networks beside untrained ones.

    python demos/labs/by_depth.py    # prints data/by_depth.csv and writes it anew, 3 min

R^c is that of the authors' script (`official_rate`), zeros are those of the code (`zero_fraction`);
what counts is the last layer less the first. A unit is an image or a text: the windows of a text
are alike, so their mean is one number. Beside each network stand five of its shape with random
weights, whose interval is over networks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lab import mean_and_interval
from tqdm.auto import tqdm
from twins import CUTOUTS, FASHION, UNTRAINED, composites, loaded

import crate_interp as ci
from crate_interp.questions.untrained_twins import twin

TABLE = Path(__file__).parent / "data" / "by_depth.csv"
LANGUAGE, IMAGES = "crate-tiny-lm", 128
STATISTICS = {"rate": "compression.official_rate", "zeros": "sparsity.zero_fraction"}


def units_of(name: str) -> list[Any]:
    """Returns what is measured at once: all images, or one text after the other."""
    if name == LANGUAGE:
        return [[text] for text in ci.data.embedded("held-out-text")["text"]]
    rows = composites() if name == CUTOUTS else ci.data.embedded("fashion")
    return [loaded(name).preprocess(rows["image"][:IMAGES])]


def first_and_last(model: ci.HookedCrate, units: list[Any]) -> dict[str, np.ndarray]:
    """Returns each statistic in the first and the last layer, `[unit, 2]`."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in STATISTICS}
    ends = [0, model.cfg.n_layers - 1]
    for data in units:
        swept: Any = ci.sweep(
            model, data, probes=["compression", "sparsity"], controls=0, progress=False
        )
        for name, column in STATISTICS.items():
            table = swept.samples().pivot(index="sample", columns="layer", values=column)
            values = table[ends].to_numpy()
            found[name].append(values.mean(axis=0, keepdims=True) if len(units) > 1 else values)
    return {name: np.concatenate(values) for name, values in found.items()}


def measured(name: str) -> list[dict[str, Any]]:
    """Returns a row for each statistic of a network."""
    model, units, rows = loaded(name), units_of(name), []
    own = first_and_last(model, units)
    copies = [first_and_last(twin(model, seed), units) for seed in UNTRAINED]
    for statistic, values in own.items():
        random = np.array([copy[statistic].mean(axis=0) for copy in copies])  # [network, 2]
        row: dict[str, Any] = {"network": name, "statistic": statistic, "n": len(values)}
        for prefix, ends in (("", values), ("untrained_", random)):
            low, high = mean_and_interval(np.diff(ends)[:, 0])[1]
            first, last = ends.mean(axis=0)
            numbers = {"first": first, "last": last, "low": low, "high": high}
            row |= {prefix + key: value for key, value in numbers.items()}
        rows.append(row)
    return rows


if __name__ == "__main__":
    names = (FASHION, CUTOUTS, LANGUAGE)
    table = pd.DataFrame([row for name in tqdm(names, desc="networks") for row in measured(name)])
    table.to_csv(TABLE, index=False, float_format="%.4g")
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
