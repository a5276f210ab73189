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
import numpy as np
import pandas as pd
import zoo
from lab import LabResult, Steps, claim, main, result
from tqdm.auto import tqdm
from zoo import Recipe

AXES = ("variant", "layers", "lr", "batch")
SIZE = "32 networks of d = 32, 2 or 4 layers, digits 8x8 (published: 31 of d = 384, CIFAR-10)"
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


def correlation_claim(table: Any, draws: Any) -> dict[str, Any]:
    """Returns the claim that the measure correlates with the gap, by reading of eq. 11.

    The number is of the measure as the other claims take it.
    """
    names = [form_name(*each) for each in FORMS]
    readings = kendall.resampled(table[names], table["gap"])
    taus = [kendall.tau_b(table[name], table["gap"]) for name in names]
    return claim(
        "srr_complexity.tau", kendall.tau_b(table["SRR"], table["gap"]),
        interval=kendall.interval(draws["SRR"]), published=".445 (d = 384), .407 (d = 768)",
        cases={name: kendall.interval(readings[name]) for name in names},
        baseline=0.0, n=len(table), size=SIZE,
        baseline_is=f"independence, standard error {kendall.standard_error(len(table)):.3f}",
        why=f"By reading tau is {min(taus):.2f} to {max(taus):.2f}.",
    )  # fmt: skip


def against_others(
    rule: str, values: dict[str, float], draws: dict[str, Any], **words: Any
) -> dict[str, Any]:
    """Returns the claim that the measure has the largest of a number, with a case for each other.

    draws: the number of each measure in resamplings. An interval is so wide that one of all of
    them misses in 5 % of cases (Bonferroni), since the best other is chosen among them.
    """
    others = [name for name in values if name != "SRR"]
    best = max(others, key=lambda name: values[name])
    level = 1 - 0.05 / len(others)
    cases = {name: kendall.interval(draws["SRR"] - draws[name], level) for name in others}
    above = sum(values[name] > values["SRR"] for name in others)
    return claim(
        rule, values["SRR"] - values[best], cases=cases, baseline=values[best], size=SIZE,
        interval=cases[best],
        why=f"{above} of {len(others)} measures have a higher one, the best is {best}", **words,
    )  # fmt: skip


def rank_claim(table: Any, draws: Any) -> dict[str, Any]:
    """Returns the claim that no other measure correlates as well."""
    taus = {name: kendall.tau_b(table[name], table["gap"]) for name in complexity.MEASURES}
    best = max((name for name in taus if name != "SRR"), key=lambda name: taus[name])
    return against_others(
        "srr_complexity.beats", taus, draws, n=len(table), baseline_is=f"tau of {best}",
        published=".030 over 1/margin (d = 384), .070 over 1/pac-bayes-flatness (d = 768)",
    )  # fmt: skip


def granulated_claims(table: Any) -> list[dict[str, Any]]:
    """Returns the claims of the granulated coefficients: Psi, and psi of the variant."""
    both = {name: kendall.granulated(table, AXES, name) for name in complexity.MEASURES}
    totals = {name: float(np.mean(list(psi.values()))) for name, (psi, _) in both.items()}
    best = max((name for name in totals if name != "SRR"), key=lambda name: totals[name])
    first = against_others(
        "srr_complexity.total", totals, {name: draws for name, (_, draws) in both.items()},
        published=".086 over 1/margin (d = 384), -.096 to 1/pac-bayes-flatness (d = 768)",
        baseline_is=f"Psi of {best}", n=len(table),
    )  # fmt: skip
    each = kendall.groups(table, "variant", AXES, "SRR")
    draws = np.random.default_rng(0).choice(each, size=(kendall.DRAWS, len(each))).mean(axis=1)
    second = claim(
        "srr_complexity.type", float(each.mean()), published=".714, .375", baseline=0.0,
        interval=kendall.interval(draws), n=len(each), size=SIZE,
        why=f"over {len(each)} settings of depth, rate and batch",
    )  # fmt: skip
    return [first, second]


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
    claims += granulated_claims(table)
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
