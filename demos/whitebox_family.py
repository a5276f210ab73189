"""Is the objective followed, and by whom? Six kinds of transformer, trained under one budget.

    python demos/whitebox_family.py --out runs/family

takes about 7 minutes of one CPU core and needs no network. CRATE, CRATE-alpha, ToST-ISTA, CBT, AoT
and a ViT have the same layers, heads, tokens and steps, and as many parameters within 1.2 %
(demos/pairs.py). CRATE and the ViT had their matrix products in bfloat16, the others in float32. A
network is the unit: intervals are Student's over 5 seeds. Of the four that are new here three seeds
are shipped. What this command measured of the others is read from demos/weights/family.csv, unless
`train_pairs.py --family` has made them again.

Own objective: what the attention of a kind is derived from, of the tokens as the layer reads them:
R^c, its variational bound (ToST), or the rate of the representatives (CBT), in `ci.audit`. Its
change by attention is a share of what it was, the mean over layers. Beside it stand the changes by
the same updates in another order of the tokens ("shuffled"), by random output maps with the
singular values of the learned one (32 draws, on the first 8 of 32 images), and by the attention of
the untrained network. A ViT has none.

Cost: processor time of a forward over 1,024 patches, the least of 9, by the size of an image.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pair_measures import Network, load, sample, segmented
from pair_verdicts import Interval, mean_interval
from pairs import SEEDS, WEIGHTS, facts_of, make_model, name_of
from tqdm.auto import tqdm
from training import arguments

import crate_interp as ci
from crate_interp.core.safe_text import in_markdown

STORED = WEIGHTS / "family.csv"  # a row per kind, seed and statistic
NAMES = {
    "crate": "CRATE",
    "crate-alpha": "CRATE-alpha",
    "tost-ista": "ToST-ISTA",
    "cbt": "CBT",
    "aot": "AoT",
    "vit": "ViT",
}
AUDITED, TOKENS = 32, {32: 65, 64: 257, 128: 1025}  # images; side of an image -> tokens
NULLS = ("shuffled", "random", "untrained")
# statistic -> what it is called, and what it is without any effect, where that is a number
SHOWN = {
    "accuracy": ("accuracy on 4,000 test images", 0.1),
    "change": ("change of the own objective by attention", 0.0),
    "zeros": ("share of exact zeros in the code", None),
    "fixed": ("Jaccard index, less that of the next image's mask", 0.0),
}


def of_audit(model: Any, data: Any) -> dict[str, float]:
    """Returns the objective before and after attention, its change, and that of the nulls."""
    result = ci.audit(model, data, limit=AUDITED, untrained=2, progress=False)
    at = "frame == 'read' and eps == 0.1 and basis == 'stored' and tokens == 'all'"
    numbers: Any = result.table("numbers").query(at)
    untrained: Any = result.table("untrained").query(f"{at} and weights == 'drawn'")
    place = ["layer", "sample"]
    own = numbers[numbers["of"] == "layer"].set_index(place)

    def beside(null: str) -> float:
        """Returns the change under a null, over its draws, paired by sample: not all have each."""
        draws = numbers[numbers["of"].str.fullmatch(rf"{null}( \d+)?")]  # "random map 0"
        change = own["compresses"]
        return change.mean() + (draws.groupby(place)["compresses"].mean() - change).mean()

    return {
        "before": own["rate_before"].mean(),
        "after": own["rate_after"].mean(),
        "change": own["compresses"].mean(),
        "untrained": untrained["compresses"].mean(),
        "shuffled": beside("shuffled"),
        "random": beside("random map"),
    }


def zeros(model: Any, data: Any) -> float:
    """Returns the share of exact zeros in the code, the mean over layers."""
    layers: Any = ci.sweep(model, data, probes=["sparsity"], controls=0, progress=False).layers()
    return layers.query("statistic == 'zero_fraction'")["mean"].mean()


def measured(kind: str, seed: int, data: Any) -> dict[str, float]:
    """Returns every statistic of a network, and of the one that it started from."""
    found = {"accuracy": facts_of(kind, seed)["test"]}
    subspaces = "value" if kind == "vit" else ""
    for trained, end in ((True, ""), (False, "_untrained")):
        model = load(Network(kind, seed, trained, subspaces))
        found["fixed" + end] = segmented(model, data)["fixed"]
        if kind != "aot":
            found["zeros" + end] = zeros(model, data)
        if trained and kind != "vit":
            found |= of_audit(model, data)
    return found


def measure(data: Any) -> tuple[pd.DataFrame, int]:
    """Returns a row per kind, seed and statistic, and how many networks were read from a file."""
    stored = pd.read_csv(STORED) if STORED.exists() else None
    parts, read = [], 0
    for kind in tqdm(NAMES, desc="kinds"):
        for seed in SEEDS:
            if (WEIGHTS / name_of(kind, seed)).is_dir():
                found = measured(kind, seed, data)
                rows = pd.DataFrame({"statistic": found.keys(), "value": found.values()})
                parts.append(rows.assign(kind=kind, seed=seed))
            elif stored is not None:
                parts.append(stored[(stored["kind"] == kind) & (stored["seed"] == seed)])
                read += 1
    table: Any = pd.concat(parts)[["kind", "seed", "statistic", "value"]]
    return table, read


def values_of(table: pd.DataFrame, kind: str, statistic: str) -> np.ndarray:
    """Returns one number for each seed, in their order; none if the kind has no such statistic."""
    rows: Any = table[(table["kind"] == kind) & (table["statistic"] == statistic)]
    return rows.sort_values("seed")["value"].to_numpy(dtype=float)


def followed(table: pd.DataFrame, kind: str) -> tuple[str, dict[str, Interval]]:
    """Returns whether attention lowers its own objective, and its change less each null.

    "yes" if the interval of the change and of each difference lies below 0, "no" if one lies above,
    else "can't tell".
    """
    change = values_of(table, kind, "change")
    found = {name: mean_interval(change - values_of(table, kind, name)) for name in NULLS}
    every = [mean_interval(change), *found.values()]
    if any(one.low > 0 for one in every):
        return "no", found
    return "yes" if all(one.high < 0 for one in every) else "can't tell", found


def costs() -> pd.DataFrame:
    """Returns the microseconds of processor time per token, by kind and number of tokens."""
    rows = {kind: [_cost(kind, side) for side in TOKENS] for kind in NAMES}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(TOKENS.values()))


def _cost(kind: str, side: int) -> float:
    model: Any = make_model(kind, 0).eval()
    more = {"interpolate_pos_encoding": True} if kind == "vit" else {}
    model = model if kind == "vit" else model.resized(side)
    images = torch.rand(1024 * 16 // side**2, 3, side, side)
    least = min(_seconds(lambda: model(images, **more)) for _ in range(9))
    return 1e6 * least / (len(images) * TOKENS[side])


@torch.no_grad()
def _seconds(call: Callable[[], Any]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _shown(values: np.ndarray, times: float = 1.0, digits: int = 1) -> str:
    if not len(values):
        return ""
    found = mean_interval(values * times)
    if np.isnan(found.low):  # they are all equal
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def finding(table: pd.DataFrame) -> str:
    """Returns a sentence on whose attention lowers its own objective beyond every null."""
    members = [kind for kind in NAMES if kind != "vit"]
    found = [
        f"{NAMES[kind]} ({100 * values_of(table, kind, 'change').mean():.1f} %)"
        for kind in members
        if followed(table, kind)[0] == "yes"
    ]
    return (
        f"Of {len(members)} members trained alike, attention lowers its own objective beyond every "
        f"null in {', '.join(found) or 'no one'}."
    )


def text(table: pd.DataFrame, cost: pd.DataFrame) -> str:
    """Returns the tables in Markdown."""
    names = ("accuracy", "zeros", "zeros_untrained", "fixed", "fixed_untrained")
    levels, objectives, costs = [], [], []
    for kind, name in NAMES.items():
        levels.append((name, *(_shown(values_of(table, kind, one), 100) for one in names)))
        own = cost.loc[kind]
        costs.append((name, *(f"{one:.1f}" for one in own), f"{own.iloc[-1] / own.iloc[0]:.2f}"))
        if kind != "vit":
            change = values_of(table, kind, "change")
            less = [_shown(change - values_of(table, kind, null), 100) for null in NULLS]
            rates = [_shown(values_of(table, kind, when)) for when in ("before", "after")]
            cells = (*rates, _shown(change, 100), *less, followed(table, kind)[0])
            objectives.append((name, *cells))
    head = ("kind", "accuracy, %", "zeros, %", "untrained", "Jaccard, x 100", "untrained")
    second = ("own objective", "before, nats", "after", "change, %", "minus shuffled",
              "minus random W_O", "minus untrained", "followed")  # fmt: skip
    third = ("microseconds a token", *(f"{tokens:,} tokens" for tokens in cost), "last / first")
    tables = ((head, levels), (second, objectives), (third, costs))
    return "\n\n".join(in_markdown(*one) for one in tables)


def picture(table: pd.DataFrame, cost: pd.DataFrame) -> Figure:
    """Returns a panel for each statistic: every network, beside its nulls; and one of costs."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, 3)
    nulls = {"change": NULLS, "zeros": ("zeros_untrained",), "fixed": ("fixed_untrained",)}
    colours = {"shuffled": "#c05a1a", "random": "#7a5aa6"}
    for axis, (statistic, (title, chance)) in zip(axes.flat, SHOWN.items(), strict=False):
        for null in nulls.get(statistic, ()):
            look: dict[str, Any] = dict(marker="_", s=60, color=colours.get(null, "0.55"))
            _dots(axis, table, null, 0.22, label=null.rpartition("_")[2], **look)
        _dots(axis, table, statistic, 0.0, label="trained", s=18, color="#1f6fb4")
        if chance is not None:
            axis.axhline(chance, color="0.5", linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(NAMES)), list(NAMES.values()), fontsize=8, rotation=20)
        axis.set_xlim(-0.5, len(NAMES) - 0.3)
    axes[0, 1].legend(fontsize=8)
    for kind, name in NAMES.items():
        axes[1, 1].plot(cost.columns, cost.loc[kind], marker="o", markersize=4, label=name)
    axes[1, 1].set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds")
    for axis, ticks in ((axes[1, 1].xaxis, cost.columns), (axes[1, 1].yaxis, (10, 20, 50, 100))):
        axis.set_ticks(list(ticks), labels=[f"{tick:,}" for tick in ticks], minor=False)
        axis.set_ticks([], minor=True)
    axes[1, 1].set_title("processor time of a forward, per token", fontsize=10)
    axes[1, 1].legend(fontsize=8)
    words = (
        "One dot is one network (5 seeds).\n\nshuffled: the same updates in another order\n"
        "of the tokens. random: other output maps.\nuntrained: before training.\n\n"
        "Dotted: chance, no change."
    )
    axes[1, 2].set_axis_off()
    axes[1, 2].text(0, 0.95, words, va="top", fontsize=10, transform=axes[1, 2].transAxes)
    return figure


def _dots(axis: Any, table: pd.DataFrame, statistic: str, shift: float, **look: Any) -> None:
    for place, kind in enumerate(NAMES):
        own = values_of(table, kind, statistic)
        axis.scatter(np.full(len(own), place + shift), own, alpha=0.8, **look)
        look.pop("label", None)  # one entry in the legend


def main() -> None:
    args = arguments(__doc__, out=Path("runs/family"))
    table, read = measure(sample())
    cost = costs()
    said = text(table, cost)
    count = len(table[["kind", "seed"]].drop_duplicates())
    print(f"{count} networks, {read} of them read from {STORED.name}.")
    print(f"{finding(table)}\n\n{said}")
    (args.out / "family.md").write_text(said + "\n")
    table.to_csv(args.out / STORED.name, index=False, float_format="%.6g")
    picture(table, cost).savefig(args.out / "whitebox-family.png", dpi=110)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
