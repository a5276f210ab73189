"""The tables of at most five columns that commands print below their finding."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import crate_interp as ci
from crate_interp.results.result import as_text
from crate_interp.sweeps import layer_curves

HEADS = 10  # heads that `ablate` prints
_COLUMNS = 5


def of_sweep(result: ci.SweepResult, untrained: pd.DataFrame | None = None) -> str:
    """Returns the main statistics by layer.

    untrained: a table with a row per statistic and layer and a column untrained_mean, whose values
    stand in brackets.
    """
    header, rows = layer_curves.summary(result, [])
    names = [name for name, _ in layer_curves.columns(result)]
    if untrained is not None and "untrained_mean" in untrained:
        known = untrained.assign(name=untrained["probe"] + "." + untrained["statistic"])
        means = known.set_index(["name", "layer"])["untrained_mean"].to_dict()
        for row in rows:
            for at, name in enumerate(names, start=1):
                mean = means.get((name, int(row[0])), np.nan)
                row[at] += "" if np.isnan(mean) or not row[at] else f" ({mean:.4g})"
    return as_text(header[:_COLUMNS], [row[:_COLUMNS] for row in rows])


def of_report(folder: Path) -> str:
    """Returns the main statistics by layer of a report's folder, with the untrained means."""
    return of_sweep(ci.SweepResult.load(folder), pd.read_csv(folder / "layers.csv"))


def of_head_ablation(result: ci.HeadAblation, named: set[tuple[int, int]]) -> str:
    """Returns the heads with the largest effects, all that are shown to have one, and `named`."""
    every: Any = result.heads().sort_values("drop", key=abs, ascending=False, kind="stable")
    largest: Any = enumerate(every.itertuples())
    kept = [i < HEADS or row.p <= 0.05 or (row.layer, row.head) in named for i, row in largest]
    header = ["head", "base", "ablated", "drop (95 %)", "p"]
    rows = [
        [f"L{row.layer}H{row.head}", f"{row.base:.4g}", f"{row.ablated:.4g}"]
        + [
            f"{row.drop:+.3g} ({result.interval_words(row.low, row.high, before='')})",
            f"{row.p:.2g}",
        ]
        for row in every[kept].itertuples()
    ]
    table, left = as_text(header, rows), every[[not one for one in kept]]
    if not len(left):
        return table
    name = f"L{left['layer'].iloc[0]}H{left['head'].iloc[0]}"
    some = f"{len(rows)} of {len(every)} heads; --head {name} adds {name}, --format csv prints all."
    return f"{table}\n{some}"


def of_concentration(result: ci.circuits.Concentration) -> str:
    """Returns what each layer and number of nodes carry in three bases."""
    shares: Any = result.table("shares").pivot(
        index=["layer", "k"], columns="basis", values="carried"
    )
    shown: Any = shares[["native", "pca", "rotated"]].reset_index()
    return shown.to_string(index=False, float_format="{:.3g}".format)


def of_atoms(result: ci.AtomResult) -> str:
    """Returns how many atoms of each layer are on, and how often."""
    shown: Any = result.layers()[["layer", "atoms", "dead", "dense", "firing_rate"]]
    return shown.to_string(index=False, float_format="{:.3g}".format)


def of_atlas(result: ci.Atlas) -> str:
    """Returns the atoms with the largest exact effects on the loss, or "" if none was measured."""
    table: Any = result.table()
    known = table[table["ablation"].notna()]
    most = known.sort_values("ablation", key=abs, ascending=False, kind="stable").head(HEADS)
    header = ["atom", "loss without it (95 %)", "on at", "energy", "nearest"]
    rows = [
        [f"L{row.layer}A{row.atom}"]
        + [f"{row.ablation:+.3g} ({_ends(result, row)})"]
        + [f"{row.firing_rate:.1%}", f"{row.energy_share:.1%}", row.nearest.split(",")[0]]
        for row in most.itertuples()
    ]
    return as_text(header, rows) if rows else ""


def _ends(result: ci.Atlas, row: Any) -> str:
    return result.interval_words(row.ablation_low, row.ablation_high, before="")
