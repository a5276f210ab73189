"""Does sparse rate reduction foretell generalisation better than 22 other measures?

    python demos/labs/srr_complexity.py --out runs/labs/srr_complexity

arXiv 2411.17182 Tables 1 and 5 correlate measures of complexity with the gap of generalisation over
31 and 32 networks on CIFAR-10. Here are 32 small CRATEs on scikit-learn's digits: 4 variants, 2
depths, 2 learning rates, 2 batches. Gap: cross-entropy on test minus on training images, at the
first look (every 20 steps) at which that on training images is at most 0.01. The quick form
measures the weights in demos/weights/zoo; of the slow search for the noise sigma it repeats two and
takes the others from trainings.csv. --full trains and searches anew (15 min).
"""

from pathlib import Path
from typing import Any

import complexity
import kendall
import layerwise
import pandas as pd
import zoo
from lab import LabResult, Steps, answer_above, answer_of, claim, main, result
from tqdm.auto import tqdm
from zoo import Recipe

AXES = ("variant", "layers", "lr", "batch")
SIZE = "32 networks of d = 32, 2 or 4 layers, digits 8x8 (published: 31 of d = 384, CIFAR-10)"
PAPER = "arXiv 2411.17182"
PUBLISHED = Path(__file__).parent / "data" / "srr_tables.csv"
REPEATED = 2  # searches for sigma that the quick form repeats
FORMS = [
    (frame, eps, share)
    for frame in layerwise.FRAMES
    for eps in (0.1, 0.5, 1.0)
    for share in (False, True)
]  # what the paper leaves open, and the frames

HEADLINE = (
    "Over {networks} small CRATEs tau of the measure with the gap is {tau[ours]:.2f} "
    "[{tau[low]:.2f}, {tau[high]:.2f}]; {rank[why]} ({rank[baseline]:.2f}); difference "
    "{rank[ours]:.2f} [{rank[low]:.2f}, {rank[high]:.2f}]."
)


def form_name(frame: str, eps: float, share: bool) -> str:
    """Returns the name of one reading of eq. 11."""
    return f"SRR {frame}, eps {eps:g}, {'share' if share else 'count'}"


def network(recipe: Recipe, form: str, sigma: float | None) -> dict[str, Any]:
    """Returns a network's gap and its measures; sigma: that of the noise, None to search for it."""
    model = zoo.fit_grid(recipe)[0] if form == "full" else zoo.trained(recipe)
    images, labels, test_images, test_labels = zoo.digits()
    train_ce, _ = zoo.scores(model, images, labels)
    test_ce, accuracy = zoo.scores(model, test_images, test_labels)
    sigma = sigma or complexity.noise_level(model, images, labels)
    trained = complexity.Trained(model, zoo.start(recipe), images, labels, sigma)
    row: dict[str, Any] = {axis: getattr(recipe, axis) for axis in AXES} | {"seed": recipe.seed}
    row |= {"gap": test_ce - train_ce, "train_ce": train_ce, "accuracy": accuracy, "sigma": sigma}
    row |= complexity.measured(trained)
    for frame, eps, share in FORMS:
        each = layerwise.layer_measures(model, images, frame, eps, share=share)
        row[form_name(frame, eps, share)] = float(each.sum())
    return row


def gathered(form: str, steps: Steps) -> Any:
    """Returns a row for each network of the grid."""
    kept: Any = pd.read_csv(zoo.TRAININGS).set_index("name")["sigma"] if form == "quick" else {}
    rows = []
    for place, recipe in enumerate(tqdm(zoo.grid(), desc="networks", unit="network")):
        known = form == "quick" and place >= REPEATED
        sigma = float(kept[recipe.name]) if known else None
        rows.append(steps.do(recipe.name, lambda r=recipe, s=sigma: network(r, form, s)))
    return pd.DataFrame(rows)


def mean_claim(table: Any) -> dict[str, Any]:
    """Returns the claim that the measure correlates with the gap, for the mean over layers.

    It was added after the others were seen: the sum grows with the number of layers, which is 12
    throughout the paper and an axis here. Rule: as `correlation_claim`.
    """
    both = table.assign(mean=table["SRR"] / table["layers"])[["mean", "1/margin"]]
    draws = kendall.resampled(both, table["gap"])
    tau, margin = (kendall.tau_b(both[name], table["gap"]) for name in both)
    low, high = kendall.interval(draws["mean"])
    ends = kendall.interval(draws["mean"] - draws["1/margin"])
    return claim(
        "the same with the mean over layers (added later: here the depth varies)",
        f"{PAPER} Tables 1 and 5, overall", tau,
        published=".445 (d = 384), .407 (d = 768)", interval=(low, high),
        baseline=0.0, baseline_is="independence", n=len(table), size=SIZE,
        answer=answer_above((low, high)),
        why=f"minus tau of 1/margin: {tau - margin:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]",
    )  # fmt: skip


def correlation_claim(table: Any, draws: Any) -> dict[str, Any]:
    """Returns the claim that the measure correlates with the gap.

    Rule: supported if the interval of tau lies above 0, not supported if below, else depends.
    """
    ours, ends = kendall.tau_b(table["SRR"], table["gap"]), kendall.interval(draws["SRR"])
    answer = answer_above(ends)
    error = kendall.standard_error(len(table))
    return claim(
        "networks with a higher measure have a larger gap (Kendall's tau)",
        f"{PAPER} Tables 1 and 5, overall", ours,
        published=".445 (d = 384), .407 (d = 768)", interval=ends,
        baseline=0.0, baseline_is=f"independence, standard error {error:.3f}",
        n=len(table), size=SIZE, answer=answer, why="by the interval over networks",
    )  # fmt: skip


def rank_claim(table: Any, draws: Any) -> dict[str, Any]:
    """Returns the claim that no other measure correlates as well.

    Rule: supported only if the interval of tau minus that of the best other lies above 0.
    """
    others = [name for name in complexity.MEASURES if name != "SRR"]
    taus = {name: kendall.tau_b(table[name], table["gap"]) for name in [*others, "SRR"]}
    best = max(others, key=lambda name: taus[name])
    ends = kendall.interval(draws["SRR"] - draws[best])
    above = sum(taus[name] > taus["SRR"] for name in others)
    return claim(
        "the measure beats the 22 others (its tau minus that of the best other)",
        f"{PAPER} Table 1, overall", taus["SRR"] - taus[best],
        published=".030 over 1/margin (d = 384), .070 over 1/pac-bayes-flatness (d = 768)",
        interval=ends, baseline=taus[best], baseline_is=f"tau of {best}", n=len(table), size=SIZE,
        answer="supported" if ends[0] > 0 else "not supported",
        why=f"{above} of 22 measures have a higher tau, the best is {best}",
    )  # fmt: skip


def granulated_claims(table: Any) -> list[dict[str, Any]]:
    """Returns the claims of the granulated coefficients: Psi, and psi of the variant.

    Rule of Psi: as `rank_claim`. Rule of psi: as `correlation_claim`.
    """
    import numpy as np

    both = {name: kendall.granulated(table, AXES, name) for name in complexity.MEASURES}
    totals = {name: float(np.mean(list(psi.values()))) for name, (psi, _) in both.items()}
    best = max((name for name in totals if name != "SRR"), key=lambda name: totals[name])
    ends = kendall.interval(both["SRR"][1] - both[best][1])
    first = claim(
        "the measure has the largest Psi (its Psi minus that of the best other)",
        f"{PAPER} Tables 1 and 5, last column", totals["SRR"] - totals[best],
        published=".086 over 1/margin (d = 384), -.096 to 1/pac-bayes-flatness (d = 768)",
        interval=ends, baseline=totals[best], baseline_is=f"Psi of {best}", n=len(table),
        size=SIZE, answer="supported" if ends[0] > 0 else "not supported",
        why=f"Psi of the measure is {totals['SRR']:.3f}, the best other is {best}",
    )  # fmt: skip
    each = kendall.groups(table, "variant", AXES, "SRR")
    draws = np.random.default_rng(0).choice(each, size=(kendall.DRAWS, len(each))).mean(axis=1)
    low, high = kendall.interval(draws)
    answer = answer_above((low, high))
    second = claim(
        "it orders the variants at equal other settings (psi of the type)",
        f"{PAPER} Tables 1 and 5, type", float(each.mean()), published=".714, .375",
        interval=(low, high), baseline=0.0, baseline_is="independence", n=len(each), size=SIZE,
        answer=answer, why=f"over {len(each)} settings of depth, rate and batch",
    )  # fmt: skip
    return [first, second]


def open_claim(table: Any) -> dict[str, Any]:
    """Returns the claim that tau does not depend on what the paper leaves open.

    Rule: supported if the interval of tau lies above 0 for every eps, count or share, and frame;
    not supported if for none; else depends.
    """
    names = [form_name(*each) for each in FORMS]
    draws = kendall.resampled(table[names], table["gap"])
    taus = [kendall.tau_b(table[name], table["gap"]) for name in names]
    kept = [kendall.interval(draws[name])[0] > 0 for name in names]
    above, answer = sum(kept), answer_of(kept)
    return claim(
        "tau is above 0 whatever eps, count or share, and frame (its median over these)",
        f"{PAPER} eq. 11 leaves eps and the count open", float(pd.Series(taus).median()),
        interval=(min(taus), max(taus)), baseline=0.0, baseline_is="independence", n=len(names),
        size=SIZE, answer=answer,
        why=f"above 0 in {above} of {len(names)} readings; low and high are the extremes",
    )  # fmt: skip


def printed_claim() -> dict[str, Any]:
    """Returns whether the published figures themselves separate the two best measures.

    Rule: supported only if they differ by more than two standard errors under independence.
    """
    table = pd.read_csv(PUBLISHED)
    taus: Any = table[table["table"] == 1].set_index("measure")["overall"]
    error, gap = kendall.standard_error(31), float(taus["SRR"] - taus.drop("SRR").max())
    return claim(
        "the published tau of the measure is apart from the next best (their difference)",
        f"{PAPER} Table 1: .445 against .415", gap, published=".030",
        baseline=error, baseline_is="standard error of a tau, n = 31", n=31,
        size="published size", answer="supported" if gap > 2 * error else "not supported",
        why=f"the difference is {gap / error:.2f} standard errors of one tau",
    )  # fmt: skip


def number_rows(table: Any, draws: Any) -> list[tuple]:
    """Returns the numbers: tau, its interval and psi of each measure, and each network's values."""
    rows: list[tuple] = []
    for name in complexity.MEASURES:
        psi, total = kendall.granulated(table, AXES, name)
        rows.append(("tau", name, 0, 0, kendall.tau_b(table[name], table["gap"])))
        ends = kendall.interval(draws[name])
        rows += [("tau low", name, 0, 0, ends[0]), ("tau high", name, 0, 0, ends[1])]
        rows += [(f"psi {axis}", name, 0, 0, value) for axis, value in psi.items()]
        rows.append(("Psi", name, 0, 0, sum(psi.values()) / len(psi)))
        ends = kendall.interval(total)
        rows += [("Psi low", name, 0, 0, ends[0]), ("Psi high", name, 0, 0, ends[1])]
    for name in (form_name(*each) for each in FORMS):
        rows.append(("tau", name, 0, 0, kendall.tau_b(table[name], table["gap"])))
    for recipe, each in zip(zoo.grid(), table.to_dict("records"), strict=True):
        values = [(name, value) for name, value in each.items() if name not in ("seed", *AXES)]
        rows += [(name, recipe.name, recipe.seed, 0, value) for name, value in values]
    return rows


def run(form: str, steps: Steps) -> LabResult:
    """Returns the correlations of 23 measures with the gap."""
    table = gathered(form, steps)
    draws = kendall.resampled(table[list(complexity.MEASURES)], table["gap"])
    claims = [correlation_claim(table, draws), rank_claim(table, draws)]
    claims += [*granulated_claims(table), open_claim(table), printed_claim()]
    claims.append(mean_claim(table))
    tau, rank = claims[0], claims[1]
    headline = HEADLINE.format(networks=len(table), tau=tau, rank=rank)
    return result("srr_complexity", form, headline, claims, number_rows(table, draws))


def draw(found: LabResult) -> Any:
    """Returns the figure: tau of each measure, ours and published, and the gap by the measure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.3, 1])
    names = list(complexity.MEASURES)[::-1]
    printed: Any = pd.read_csv(PUBLISHED)
    for place, name in enumerate(names):
        tau, low, high = (
            found.numbers(quantity, setting=name)["value"][0]
            for quantity in ("tau", "tau low", "tau high")
        )
        colour = "C3" if name == "SRR" else "C0"
        left.errorbar(tau, place, xerr=[[tau - low], [high - tau]], fmt="o", color=colour, ms=4)
        for table, marker in ((1, "x"), (5, "+")):
            rows = printed[(printed["measure"] == name) & (printed["table"] == table)]
            left.plot(rows["overall"], [place], marker, color="0.45")
    styles = (
        ("here, 95 %", "o", "C0"),
        ("published, d = 384", "x", "0.45"),
        ("d = 768", "+", "0.45"),
    )
    for label, marker, colour in styles:
        left.plot([], [], marker, color=colour, label=label)
    left.axvline(0, color="0.7", lw=1)
    left.set_yticks(range(len(names)), names)
    left.set(xlabel="Kendall's tau with the gap of generalisation", xlim=(-1, 1))
    left.legend(loc="upper right", fontsize="small")
    draw_gap(right, found)
    rank = found.table().iloc[1]
    ends = f"{rank['ours']:.2f} [{rank['low']:.2f}, {rank['high']:.2f}]"
    figure.suptitle(f"SRR minus the best other measure: {ends}\n32 small CRATEs on digits 8x8")
    return figure


def draw_gap(axes: Any, found: LabResult) -> None:
    """Draws the gap of each network against its measure, by variant and depth."""
    for variant, colour in zip(("c", "n", "t", "crate"), ("C3", "C1", "C2", "C0"), strict=True):
        for layers, marker in ((2, "o"), (4, "^")):
            own = [r for r in zoo.grid() if (r.variant, r.layers) == (variant, layers)]
            x, y = (
                [found.numbers(quantity, setting=r.name)["value"][0] for r in own]
                for quantity in ("SRR", "gap")
            )
            label = f"{zoo.NAMES[variant]}, {layers} layers"
            axes.plot(x, y, marker, color=colour, label=label, alpha=0.8)
    axes.set(xlabel="SRR, summed over layers, nats", ylabel="gap of cross-entropy, nats")
    axes.legend(fontsize="small")


if __name__ == "__main__":
    main(run, draw)
