"""Which properties come from CRATE's design? Five tiny CRATEs and ViTs each, on the same hooks.

    python demos/crate_against_vit.py --out runs/crate-against-vit
    python demos/crate_against_vit.py --pair alpha-b16 --data imagefolder:DIR --out runs/alpha
    python demos/crate_against_vit.py --crate X --black-box Y --data ... --out runs/mine

The first takes less than 5 minutes on two CPU cores and needs no network: demos/train_pairs.py
trained the ten under one budget, and they are shipped. Each is measured on 256 test composites
(--limit), and so is the untrained network that it started from. A network is the unit: intervals
are Student's and Welch's over the 5 seeds, p is adjusted over the properties (Holm).

A ViT has no U. The maps of its values stand in for it, or those of its keys: a choice that every
number names. --out gets the table, the picture, and the comparison of all statistics, layer by
layer (`ci.compare`).

--pair compares two real networks of the Hub, one against one, so that its intervals are over images
or windows and not over seeds. "alpha-b16" is CRATE-alpha B/16 with ViT-B/16, "lm" is CRATE-LM with
GPT-2: its authors' own GPT-2 is not published, so that data and training differ there. --crate and
--black-box take what ci.load and ci.bridge.load take.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from pair_measures import Network, measure, sample
from pair_verdicts import Row, finding, judged, values_of
from pairs import KINDS, SEEDS, facts_of, untuned

import crate_interp as ci

PICTURES = "embedded:pictures"
COLOURS = {"crate": "#1f6fb4", "vit": "#c05a1a"}
NAMES = {"crate": "CRATE", "vit": "ViT"}
PAIRS = {  # name -> CRATE, black box, data
    "alpha-b16": ("crate-alpha-b16", "google/vit-base-patch16-224", PICTURES),
    "lm": ("crate-lm-12l", "openai-community/gpt2", "embedded:held-out-text"),
}


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
    lines = [
        f"{'where they stand':37} {'wanted':>6} {'CRATE':>7} {'ViT':>7}   {'CRATE - ViT':>26}   "
        f"untrained: {'CRATE':>7} {'ViT':>7}"
    ]
    for row in rows:
        way = "low" if row.property.way < 0 else "high"
        lines.append(
            f"{row.property.name:37} {way:>6} {row.trained[0]:7.3f} {row.trained[1]:7.3f}   "
            f"{_interval(row.difference):>26}   {row.untrained[0]:18.3f} {row.untrained[1]:7.3f}"
        )
    lines += [
        "",
        f"{'trained - untrained':37} {'wanted':>6} {'CRATE':>26}   {'ViT':>26}   "
        f"{'CRATE - ViT':>26} {'p':>8}  brought to",
    ]
    for row in rows:
        way = "low" if row.property.way < 0 else "high"
        gains = [_interval(gain) for gain in (*row.gains, row.excess)]
        lines.append(
            f"{row.property.name:37} {way:>6} {gains[0]:>26}   {gains[1]:>26}   {gains[2]:>26} "
            f"{row.excess.p:8.2g}  {row.verdict}"
        )
    return "\n".join(lines)


def _interval(found: Any) -> str:
    return f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


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


def accuracies(seeds: tuple[int, ...] = SEEDS) -> str:
    """Returns a line about the accuracy and the size of both kinds, from their cards."""
    said = []
    for kind in KINDS:
        facts = [facts_of(kind, seed) for seed in seeds]
        tests = [one["test"] for one in facts]
        said.append(
            f"{NAMES[kind]}: {facts[0]['params']:,} parameters, {facts[0]['steps']:,} steps, test "
            f"accuracy {min(tests):.1%} to {max(tests):.1%}"
        )
    return "; ".join(said) + "; chance 10 %."


def caution(seeds: tuple[int, ...] = SEEDS) -> str:
    """Returns what may explain a difference beside the design, or "" if accuracies overlap."""
    tests = {kind: [facts_of(kind, seed)["test"] for seed in seeds] for kind in KINDS}
    for better, worse in (("crate", "vit"), ("vit", "crate")):
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
    groups = {
        (kind, trained): [
            result
            for network, result in sweeps.items()
            if (network.kind, network.trained) == (kind, trained)
            and network.subspaces in ("", "value")
        ]
        for kind in KINDS
        for trained in (True, False)
    }
    twins = (groups["crate", False], groups["vit", False])
    return ci.compare(
        groups["crate", True], groups["vit", True], untrained=twins, names=("CRATE", "ViT")
    )


def seeds_against_seeds(out: Path, data: str | None, limit: int | None) -> None:
    """Measures the shipped networks, prints what was found, and writes it into a folder."""
    if data not in (None, PICTURES):
        raise SystemExit(
            f"--data {data}: the ten are measured on their own test composites, or on {PICTURES}, "
            "whose objects are of all sizes. With --crate and --black-box give any data."
        )
    shown = ci.data.embedded("pictures") if data else sample()
    shown = shown if limit is None else shown.select(range(min(limit, len(shown))))
    print(accuracies())
    print(f"{len(shown)} {data or 'test composites'}, {len(SEEDS)} seeds of each kind.\n")
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
    (out / "finding.txt").write_text(said)
    table.to_csv(out / "networks.csv", index=False)
    picture(table, rows).savefig(out / "crate-against-vit.png", dpi=120)
    result = compared(sweeps)
    ci.viz.compare_page(result, out / "comparison")
    print(f"{result.headline()}\nwritten to {out}")


def opened(crate: str, black_box: str) -> tuple[Any, Any]:
    """Returns a CRATE and a black box. Raises SystemExit, with the reason, if one is not there."""
    models: list[Any] = []
    for name, read in ((crate, ci.load), (black_box, ci.bridge.load)):
        try:
            models.append(read(name))
        except (ci.CheckpointError, OSError, ValueError) as error:
            raise SystemExit(f"{name} cannot be read, so nothing was compared: {error}") from None
    return models[0], models[1]


def one_against_one(args: argparse.Namespace) -> None:
    """Compares two networks of the user's or of the Hub, paired by sample."""
    pair = (args.crate, args.black_box, args.data or PICTURES)
    crate, black_box, data = PAIRS.get(args.pair, pair)
    if crate is None or black_box is None:
        raise SystemExit("give both, --crate X --black-box Y, or --pair NAME.")
    first, second = opened(crate, black_box)
    result = ci.compare(first, second, args.data or data, limit=args.limit, untrained=3)
    ci.viz.compare_page(result, args.out / "comparison")
    print(f"{result.headline()}\n{result.caution()}\nwritten to {args.out}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/crate-against-vit"))
    parser.add_argument("--limit", type=int, help="the first n samples")
    parser.add_argument("--pair", choices=PAIRS, help="a pair of real networks on the Hub")
    parser.add_argument("--crate", help="what ci.load takes")
    parser.add_argument("--black-box", help="what ci.bridge.load takes")
    parser.add_argument("--data", help="for two networks as ci.sweep takes it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.pair or args.crate or args.black_box:
        one_against_one(args)
    else:
        seeds_against_seeds(args.out, args.data, args.limit)


if __name__ == "__main__":
    main()
