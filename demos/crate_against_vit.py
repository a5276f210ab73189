"""Which properties come from CRATE's design? Five tiny CRATEs and ViTs each, on the same hooks.

    python demos/crate_against_vit.py --out runs/crate-against-vit

It takes less than 5 minutes on two CPU cores and needs no network: demos/train_pairs.py
trained the ten under one budget, and they are shipped. Each is measured on 256 test composites
(--limit), and so is the untrained network that it started from. A network is the unit: intervals
are Student's and Welch's over the 5 seeds, p is adjusted over the properties (Holm).

A ViT has no U. The maps of its values stand in for it, or those of its keys: a choice that every
number names. --out gets the table, the picture, and the comparison of all statistics, layer by
layer (`ci.compare`).

`crate-interp compare crate-alpha-b16 google/vit-base-patch16-224 --data DATA` compares two real
networks, one against one, with intervals over images.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from pair_measures import Network, measure, sample
from pair_verdicts import Row, finding, judged, values_of
from pairs import KINDS, SEEDS, facts_of, untuned
from training import arguments

import crate_interp as ci

PICTURES = "embedded:pictures"
COLOURS = {"crate": "#1f6fb4", "vit": "#c05a1a"}
NAMES = {"crate": "CRATE", "vit": "ViT"}


def long(sweeps: dict[Network, ci.SweepResult], segments: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per network and source, "probe.statistic": the mean over layers."""
    parts = []
    for network, result in sweeps.items():
        layers: Any = pd.concat([result.table("layers"), result.heads()])
        # the stream after the last layer is no layer's
        rows = layers[layers["layer"] < result.meta["n_layers"]]
        own = rows.assign(source=rows["probe"] + "." + rows["statistic"])
        value = own.groupby("source", as_index=False)["mean"].mean()
        of = dict(zip(network._fields, network, strict=True))
        parts.append(value.rename(columns={"mean": "value"}).assign(**of))
    masks = segments.assign(source="segmentation." + segments["statistic"], subspaces="")
    columns = ["kind", "subspaces", "seed", "trained", "source", "value"]
    every: Any = pd.concat([*parts, masks])[columns]
    return every.reset_index(drop=True)


def text(rows: list[Row]) -> str:
    """Returns two tables of the properties: where networks stand, and what training brings."""
    stand = [
        f"{'where they stand':37} {'wanted':>6} {'CRATE':>7} {'ViT':>7}   {'CRATE - ViT':>26}   "
        f"untrained: {'CRATE':>7} {'ViT':>7}"
    ]
    brings = [
        f"{'trained - untrained':37} {'wanted':>6} {'CRATE':>26}   {'ViT':>26}   "
        f"{'CRATE - ViT':>26} {'p':>8}  brought to"
    ]
    for row in rows:
        start = f"{row.property.name:37} {'low' if row.property.way < 0 else 'high':>6}"
        gap, *gains = (
            f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f})"
            for one in (row.difference, *row.gains, row.excess)
        )
        stand.append(
            f"{start} {row.trained[0]:7.3f} {row.trained[1]:7.3f}   {gap:>26}   "
            f"{row.untrained[0]:18.3f} {row.untrained[1]:7.3f}"
        )
        cells = "   ".join(f"{gain:>26}" for gain in gains)
        brings.append(f"{start} {cells} {row.excess.p:8.2g}  {row.verdict}")
    return "\n".join([*stand, "", *brings])


def picture(table: pd.DataFrame, rows: list[Row]) -> Figure:
    """Returns a panel for each property: every network, untrained and trained, and the verdict."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    axes = figure.subplots(3, 5)
    for axis, row in zip(axes.flat, rows, strict=False):
        asked = row.property
        for place, kind in enumerate(KINDS):
            before, after = (values_of(table, asked, kind, t) for t in (False, True))
            x = [3 * place, 3 * place + 1]
            look: dict[str, Any] = dict(color=COLOURS[kind], marker="o", markersize=4, alpha=0.7)
            axis.plot(x, [before, after], linewidth=1, **look)
        if asked.chance:
            axis.axhline(float(asked.chance), color="0.5", linewidth=0.8, linestyle=":")
        arrow = "low" if asked.way < 0 else "high"
        axis.set_title(f"{asked.name}\nwanted {arrow}; brought to: {row.verdict}", fontsize=8.5)
        axis.set_ylabel(asked.unit, fontsize=7)
        labels = [f"{NAMES[kind]}\n{when}" for kind in KINDS for when in ("start", "trained")]
        axis.set_xticks([0, 1, 3, 4], labels, fontsize=7)
        axis.set_xlim(-0.6, 4.6)
        axis.tick_params(axis="y", labelsize=7)
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    last = axes.flat[len(rows)]
    words = (
        "One line is one network,\nfrom the weights it started with\nto the trained ones.\n\n"
        "Dotted: no change, chance,\nor even attention."
    )
    last.text(0, 0.95, words, va="top", fontsize=9, transform=last.transAxes)
    return figure


def accuracies() -> str:
    """Returns a line about the accuracy and the size of both kinds, from their cards."""
    facts = {kind: [facts_of(kind, seed) for seed in SEEDS] for kind in KINDS}
    tests = {kind: [one["test"] for one in each] for kind, each in facts.items()}
    return "; ".join(
        f"{NAMES[kind]}: {own[0]['params']:,} parameters, {own[0]['steps']:,} steps, test accuracy "
        f"{min(tests[kind]):.1%} to {max(tests[kind]):.1%}"
        for kind, own in facts.items()
    ) + "; chance 10 %."  # fmt: skip


def caution() -> str:
    """Returns what may explain a difference beside the design, or "" if accuracies overlap."""
    tests = {kind: [facts_of(kind, seed)["test"] for seed in SEEDS] for kind in KINDS}
    for better, worse in (KINDS, KINDS[::-1]):
        if min(tests[better]) > max(tests[worse]):
            gain, low, high = untuned(worse)
            return (
                f"Caution: under this budget every {NAMES[better]} answers better than every "
                f"{NAMES[worse]}, so part of a difference may be how far each got. Of the learning "
                f"rates of a search of equal budget, the best adds {gain:.1f} points to "
                f"{NAMES[worse]} ({low:+.1f} to {high:+.1f}).\n"
            )
    return ""


def compared(sweeps: dict[Network, ci.SweepResult]) -> ci.Comparison:
    """Returns the comparison of both kinds, layer by layer, beside what they started from."""
    groups: dict[tuple[str, bool], list[ci.SweepResult]] = {}
    for network, result in sweeps.items():
        if network.subspaces != "key":
            groups.setdefault((network.kind, network.trained), []).append(result)
    twins = (groups["crate", False], groups["vit", False])
    trained = (groups["crate", True], groups["vit", True])
    return ci.compare(*trained, untrained=twins, names=("CRATE", "ViT"))


def main() -> None:
    args = arguments(__doc__, out=Path("runs/crate-against-vit"), limit=256, data="")
    if args.data not in ("", PICTURES):
        raise SystemExit(
            f"--data {args.data}: the ten are measured on their own test composites, or on "
            f"{PICTURES}, whose objects are of all sizes. `crate-interp compare` takes any data."
        )
    shown = ci.data.embedded("pictures") if args.data else sample()
    shown = shown.select(range(min(args.limit, len(shown))))
    print(accuracies())
    print(f"{len(shown)} {args.data or 'test composites'}, {len(SEEDS)} seeds of each kind.\n")
    sweeps, segments = measure(shown)
    table = long(sweeps, segments)
    rows = judged(table)
    zeros: Any = table[(table["source"] == "sparsity.zero_fraction") & table["trained"]]
    share = zeros.groupby("kind")["value"].mean()
    said = (
        f"{text(rows)}\n\nExact zeros in the code: CRATE {share['crate']:.3f}, ViT "
        f"{share['vit']:.3f}. A GELU has none by construction, so no verdict rests on them.\n\n"
        f"{finding(rows, len(SEEDS))}\n{caution()}"
    )
    print(said)
    (args.out / "finding.txt").write_text(said)
    table.to_csv(args.out / "networks.csv", index=False)
    picture(table, rows).savefig(args.out / "crate-against-vit.png", dpi=120)
    result = compared(sweeps)
    ci.viz.compare_page(result, args.out / "comparison")
    print(f"{result.headline()}\nwritten to {args.out}")


if __name__ == "__main__":
    main()
