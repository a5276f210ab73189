"""Is a privileged basis CRATE's own? Native over rotated axes in five CRATEs and five ViTs.

    python demos/concentration_of_pairs.py --limit 64

Takes about 3 minutes on one CPU core and needs no network: the ten networks are shipped
(demos/pairs.py). `ci.circuits.concentration` swaps 16 nodes for a donor's, in the axes of a CRATE's
code, of the neurons of a ViT's MLPs, and of a ViT's stream. A ratio is how far native axes move the
gap between two answers, over how far random rotations do; 1 is no privilege. A network is
the unit: ratios are geometric means over the seeds, with Student's interval of the logarithm.
"""

import argparse

import numpy as np
import pandas as pd
from pair_measures import Network, load, sample
from pairs import SEEDS

import crate_interp as ci
from crate_interp.stats.intervals import student_interval

# what is swapped -> kind of network, point of the layers
ASKED = {
    "CRATE, axes of the code": ("crate", "code"),
    "ViT, neurons of the MLPs": ("vit", "code"),
    "ViT, axes of the stream": ("vit", "stream"),
}


def measured(limit: int, k: int) -> pd.DataFrame:
    """Returns a row per kind of axes, seed and layer: asked, seed, layer, share, ratio."""
    data, found = sample(), []
    columns = ["asked", "seed", "layer", "share", "ratio"]
    for asked, (kind, point) in ASKED.items():
        for seed in SEEDS:
            model = load(Network(kind, seed, True, "value" if kind == "vit" else ""))
            result = ci.circuits.concentration(
                model, data, k=[k], point=point, untrained=0, limit=limit, progress=False
            )
            shares = result.table().query("basis == 'native'")["share"].to_numpy()
            rows = result.table("contrasts").query("versus == 'rotated'")[["layer", "ratio"]]
            found.append(rows.assign(asked=asked, seed=seed, share=shares)[columns])
    return pd.concat(found, ignore_index=True)


def text(table: pd.DataFrame) -> str:
    """Returns a line per kind of axes and layer: the ratio with its interval, and the share."""
    groups = list(table.groupby(["asked", "layer"], sort=False))
    logs = np.stack([np.log(rows["ratio"].to_numpy()) for _, rows in groups], axis=1)
    mean, n = logs.mean(axis=0), len(logs)
    low, high = student_interval(mean, logs.std(axis=0, ddof=1) / n**0.5, n)
    lines = [f"{'axes':26} layer  native / rotated (95 %)   share of the gap"]
    for ((asked, layer), rows), *ends in zip(groups, *np.exp([mean, low, high]), strict=True):
        words = "{:.2f} ({:.2f} to {:.2f})".format(*ends)
        lines.append(f"{asked:26} {layer:5}  {words:25} {rows['share'].mean():.2f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=int, default=64, help="test composites to measure")
    parser.add_argument("-k", type=int, default=16, help="nodes to swap")
    given = parser.parse_args(argv)
    print(text(measured(given.limit, given.k)))


if __name__ == "__main__":
    main()
