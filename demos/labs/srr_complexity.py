"""Does sparse rate reduction foretell generalisation better than 22 other measures?

    python demos/labs/srr_complexity.py --out runs/labs/srr_complexity

arXiv 2411.17182 Tables 1 and 5 correlate measures of complexity with the gap of generalisation over
31 and 32 networks on CIFAR-10. Here are 32 small CRATEs on scikit-learn's digits: 4 variants, 2
depths, 2 learning rates, 2 batches. Gap: cross-entropy on test minus on training images, at the
first look (every 20 steps) at which that on training images is at most 0.01. The quick form
measures the weights in demos/weights/zoo; of the slow search for the noise sigma it repeats two and
takes the others from trainings.csv. --full trains and searches anew (15 min).
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import complexity
import layerwise
import numpy as np
import pandas as pd
import zoo
from drawing import panels, tidy, titled
from lab import LabResult, Steps, claim, main, result
from zoo import Recipe

AXES = ("variant", "layers", "lr", "batch")
PUBLISHED = Path(__file__).parent / "data" / "srr_tables.csv"
DRAWS = 2000  # resamplings
REPEATED = 2  # searches for sigma that the quick form repeats
FORMS = [
    (frame, eps, share)
    for frame in layerwise.FRAMES
    for eps in (0.1, 0.5, 1.0)
    for share in (False, True)
]  # what the paper leaves open, and the frames


def tau_b(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Returns Kendall's tau-b of two lists; 0 where one of them is constant.

    `sum sign(x_i - x_j) sign(y_i - y_j) / sqrt(pairs untied in x * pairs untied in y)`. Without
    ties it is the tau of arXiv 2411.17182. Raises ValueError for other lengths or NaN.
    """
    a, b = np.asarray(x, float), np.asarray(y, float)
    if a.shape != b.shape or a.ndim != 1 or np.isnan(a).any() or np.isnan(b).any():
        raise ValueError(
            f"tau_b of shapes {a.shape} and {b.shape}: give two lists of one length without NaN."
        )
    return float(_tau_of(_signs(a), _signs(b)))


def standard_error(n: int) -> float:
    """Returns tau's deviation for n independent pairs, `sqrt(2 (2n + 5) / (9 n (n - 1)))`."""
    return math.sqrt(2 * (2 * n + 5) / (9 * n * (n - 1)))


def _signs(values: np.ndarray) -> np.ndarray:
    return np.sign(values[..., :, None] - values[..., None, :])


def _tau_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns tau-b from matrices of signs [..., n, n] and [n, n]."""
    pairs = np.sqrt((x * x).sum(axis=(-2, -1)) * (y * y).sum())
    return np.where(pairs > 0, (x * y).sum(axis=(-2, -1)) / np.where(pairs > 0, pairs, 1), 0.0)


def resampled(measures: Any, gap: Sequence[float], seed: int = 0) -> Any:
    """Returns tau-b of each column with the gap in DRAWS resamplings of the networks (rows).

    A network that is drawn twice is tied with itself, which tau-b leaves out.
    """
    columns, target = _signs(measures.to_numpy(float).T), _signs(np.asarray(gap, float))
    random, n = np.random.default_rng(seed), len(target)
    rows = []
    for _ in range(DRAWS):
        chosen = random.integers(0, n, n)
        grid = np.ix_(chosen, chosen)
        rows.append(_tau_of(columns[:, grid[0], grid[1]], target[grid]))
    return pd.DataFrame(rows, columns=measures.columns)


def groups(table: Any, axis: str, axes: Sequence[str], name: str) -> np.ndarray:
    """Returns tau-b of a measure with the gap along one axis, for each setting of the others."""
    others = [other for other in axes if other != axis]
    return np.array([tau_b(rows[name], rows["gap"]) for _, rows in table.groupby(others)])


def granulated(table: Any, axes: Sequence[str], name: str) -> tuple[dict[str, float], np.ndarray]:
    """Returns psi of each axis, and Psi, their mean, in DRAWS resamplings.

    `psi = mean over settings of the other axes of tau along this one`. A resampling draws settings
    with replacement, for each axis apart, since a network out of its group compares with nothing.
    table: a row for each network, with the axes, the measure and `gap`.
    """
    random, psi, total = np.random.default_rng(0), {}, np.zeros(DRAWS)
    for axis in axes:
        each = groups(table, axis, axes, name)
        psi[axis] = float(each.mean())
        total += random.choice(each, size=(DRAWS, len(each))).mean(axis=1) / len(axes)
    return psi, total


def interval(draws: Sequence[float] | np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Returns the percentiles that hold the share `level` of the draws between them."""
    ends = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.percentile(np.asarray(draws, float), ends)
    return float(low), float(high)


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
    jobs = {}
    for place, recipe in enumerate(zoo.grid()):
        known = form == "quick" and place >= REPEATED
        sigma = float(kept[recipe.name]) if known else None
        jobs[recipe.name] = partial(network, recipe, form, sigma)
    return pd.DataFrame(list(steps.all(jobs, "networks").values()))


def correlation_claim(table: Any, draws: Any) -> dict[str, Any]:
    """Returns the claim that the measure correlates with the gap, by reading of eq. 11.

    The number is of the measure as the other claims take it.
    """
    names = [form_name(*each) for each in FORMS]
    readings = resampled(table[names], table["gap"])
    taus = [tau_b(table[name], table["gap"]) for name in names]
    return claim(
        "srr_complexity.tau", tau_b(table["SRR"], table["gap"]),
        interval=interval(draws["SRR"]), baseline=0.0, n=len(table),
        cases={name: interval(readings[name]) for name in names},
        error=standard_error(len(table)), least=min(taus), most=max(taus),
    )  # fmt: skip


def against_others(rule: str, found: dict[str, float], draws: Any, n: int) -> dict[str, Any]:
    """Returns the claim that the measure has the largest of a number, with a case for each other.

    draws: the number of each measure in resamplings. An interval is so wide that one of all of
    them misses in 5 % of cases (Bonferroni), since the best other is chosen among them.
    """
    others = [name for name in found if name != "SRR"]
    best = max(others, key=lambda name: found[name])
    level = 1 - 0.05 / len(others)
    cases = {name: interval(draws["SRR"] - draws[name], level) for name in others}
    return claim(
        rule, found["SRR"] - found[best], cases=cases, interval=cases[best], n=n, best=best,
        baseline=found[best], others=len(others),
        above=sum(found[name] > found["SRR"] for name in others),
    )  # fmt: skip


def compared_claims(table: Any, draws: Any) -> list[dict[str, Any]]:
    """Returns the claims that no other measure correlates as well, and of psi of the variant.

    In tau, and in Psi, the mean of the granulated coefficients.
    """
    taus = {name: tau_b(table[name], table["gap"]) for name in complexity.MEASURES}
    both = {name: granulated(table, AXES, name) for name in complexity.MEASURES}
    totals = {name: float(np.mean(list(psi.values()))) for name, (psi, _) in both.items()}
    drawn = {name: total for name, (_, total) in both.items()}
    each = groups(table, "variant", AXES, "SRR")
    means = np.random.default_rng(0).choice(each, size=(DRAWS, len(each))).mean(axis=1)
    return [
        against_others("srr_complexity.beats", taus, draws, len(table)),
        against_others("srr_complexity.total", totals, drawn, len(table)),
        claim("srr_complexity.type", each.mean(), interval=interval(means), baseline=0.0,
              n=len(each)),
    ]  # fmt: skip


def number_rows(table: Any, draws: Any) -> list[tuple]:
    """Returns the numbers: tau, its interval and psi of each measure, and each network's values."""
    rows: list[tuple] = []
    for name in complexity.MEASURES:
        psi, total = granulated(table, AXES, name)
        found = {"tau": tau_b(table[name], table["gap"])}
        found["tau low"], found["tau high"] = interval(draws[name])
        found |= {f"psi {axis}": value for axis, value in psi.items()}
        found["Psi"] = sum(psi.values()) / len(psi)
        found["Psi low"], found["Psi high"] = interval(total)
        rows += [(quantity, name, 0, 0, value) for quantity, value in found.items()]
    for name in (form_name(*each) for each in FORMS):
        rows.append(("tau", name, 0, 0, tau_b(table[name], table["gap"])))
    for recipe, each in zip(zoo.grid(), table.to_dict("records"), strict=True):
        values = [(name, value) for name, value in each.items() if name not in ("seed", *AXES)]
        rows += [(name, recipe.name, recipe.seed, 0, value) for name, value in values]
    return rows


def run(form: str, steps: Steps) -> LabResult:
    """Returns the correlations of 23 measures with the gap."""
    table = gathered(form, steps)
    draws = resampled(table[list(complexity.MEASURES)], table["gap"])
    claims = [correlation_claim(table, draws), *compared_claims(table, draws)]
    numbers = number_rows(table, draws)
    return result("srr_complexity", form, claims, numbers, networks=len(table))


def draw(found: LabResult) -> Any:
    """Returns the figure: tau of each measure, ours and published, and the gap by the measure."""
    figure, (left, right) = panels(2, size=(11, 6.5), width_ratios=[1.3, 1])
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
    for style, label in (("oC0", "here, 95 %"), ("x", "published, d = 384"), ("+", "d = 768")):
        left.plot([], [], style, **({} if "C" in style else {"color": "0.45"}), label=label)
    left.axvline(0, color="0.7", lw=1)
    left.set_yticks(range(len(names)), names)
    tidy(left, xlabel="Kendall's tau with the gap of generalisation", xlim=(-1, 1))
    for variant, colour in zip(("c", "n", "t", "crate"), ("C3", "C1", "C2", "C0"), strict=True):
        for layers, marker in ((2, "o"), (4, "^")):
            own = [r for r in zoo.grid() if (r.variant, r.layers) == (variant, layers)]
            x, y = (
                [found.numbers(quantity, setting=r.name)["value"][0] for r in own]
                for quantity in ("SRR", "gap")
            )
            label = f"{zoo.NAMES[variant]}, {layers} layers"
            right.plot(x, y, marker, color=colour, label=label, alpha=0.8)
    words = "SRR, summed over layers, nats"
    tidy(right, xlabel=words, ylabel="gap of cross-entropy, nats")
    return titled(figure, found)


if __name__ == "__main__":
    main(run, draw)
