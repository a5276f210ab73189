"""What the labs share: one shape of result, steps that are kept, and the command line.

A lab is a module with a function `run(form, steps) -> LabResult` and a function
`draw(result) -> Figure`, and `main(run, draw)` at its end:

    python demos/labs/NAME.py [--quick | --full] --out DIR

It prints the finding and the claims, and writes the tables, NAME.png and meta.json into DIR. What
takes long is done in steps, each kept as soon as it is done: the same command goes on after them.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rules import Interval, answer, rules

from crate_interp.core.files import write_text
from crate_interp.results.result import Result, by
from crate_interp.stats.intervals import student_interval

FORMS = ("quick", "full")
Values = Sequence[float] | np.ndarray
CLAIMS = [
    "claim", "where", "published", "ours", "low", "high", "baseline", "baseline_is", "n", "size",
    "answer", "why", "rule", "cases",
]  # fmt: skip
NUMBERS = ["quantity", "setting", "seed", "place", "value"]


class LabResult(Result):
    """The claims and numbers of a lab.

    `table()`: a row for each claim of a document, with the columns `CLAIMS`. published: the paper's
    number as it is printed, or "". ours, low, high: our number and a 95 % interval, NaN where
    there is none. baseline: what an untrained network, permuted labels or chance give, which
    baseline_is names. n: over how many units the interval goes. size: "published size", or what is
    smaller. rule: the name of its rule in data/rules.csv. cases: the intervals that the rule was
    asked about, by name, as JSON. answer: what followed, at this size; why: one sentence.

    `table("numbers")`: a row for each number that was measured, with the columns `NUMBERS`. place:
    the layer, step or iteration.
    """

    KIND = "lab"
    MAIN = "claims"
    STORED = {"claims": by(), "numbers": by()}
    ALONE = "results of labs do not merge: run the lab with more seeds."

    def headline(self) -> str:
        """Returns the finding in one sentence, as the lab wrote it."""
        return self.meta["headline"]

    def numbers(self, quantity: str, **chosen: Any) -> pd.DataFrame:
        """Returns the rows of one quantity, and of one setting, seed or place if given."""
        table: Any = self.table("numbers")
        rows = table["quantity"] == quantity
        for name, value in chosen.items():
            rows &= table[name] == value
        return table[rows].reset_index(drop=True)


def claim(
    rule: str,
    ours: float | Sequence[float],
    *,
    why: str,
    size: str,
    n: int,
    baseline: float,
    baseline_is: str = "",
    cases: Mapping[str, Interval] | None = None,
    interval: Interval | None = None,
    published: str = "",
    met: bool = True,
    **words: Any,
) -> dict[str, Any]:
    """Returns a row of the table of claims, with the answer that its rule gives.

    rule: its name in data/rules.csv. ours: the number, or a value for each unit, whose mean and
    interval are taken in the range of the rule. cases: the intervals that the rule is asked about,
    that of ours if None. baseline_is: what the baseline is, if the rule does not say. met: whether
    what the rule needs is there. words: what fills the text of the claim.

    Raises ValueError if the interval leaves the possible range.
    """
    asked, ends = rules()[rule], interval or (math.nan, math.nan)
    if isinstance(ours, Sequence):
        ours, ends = mean_and_interval(ours, asked.bounds())
    least, most = asked.bounds()
    if ends[0] < least or ends[1] > most:
        raise ValueError(f"{rule}: the interval {ends} leaves the possible range {asked.range}.")
    kept = {
        name: (float(f"{low:.6g}"), float(f"{high:.6g}"))
        for name, (low, high) in ({"": ends} if cases is None else cases).items()
    }
    row = (asked.claim.format(**words), asked.place, published, float(ours), *map(float, ends),
           float(baseline), baseline_is or asked.baseline, n, size, answer(asked, kept, met), why,
           rule, json.dumps(kept))  # fmt: skip
    return dict(zip(CLAIMS, row, strict=True))


def towards(begun: Values, half: Values, end: Values) -> dict[str, Interval]:
    """Returns the cases of the claim that a number goes to a limit: both must lie above 0.

    begun, half, end: how far it is from the limit before training, half-way and at the end, by
    seed. Nearer: by how much less at the end than before. Closing: the logarithm of half-way over
    end, unless all have arrived (1e-9).
    """
    cases = {"nearer": mean_and_interval(np.subtract(begun, end).tolist())[1]}
    if max(end) > 1e-9:
        far = np.maximum(np.array([half, end]), 1e-12)
        cases["closing"] = mean_and_interval(np.log(far[0] / far[1]).tolist())[1]
    return cases


def finished(figure: Any, title: str, bottom: float) -> Any:
    """Gives a figure its title; bottom: the share of its height that is left for a legend."""
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    return figure


def result(
    name: str, form: str, headline: str, claims: Sequence[dict], numbers: Sequence[Sequence]
) -> LabResult:
    """Returns a result from its rows; numbers: (quantity, setting, seed, place, value) each."""
    from importlib.metadata import version

    versions = {package: version(package) for package in ("crate_interp", "torch", "numpy")}
    meta = {"lab": name, "form": form, "headline": headline, "versions": versions}
    # there is no one model: what every saved result says of its model is empty
    meta |= {"model": None, "model_digest": "", "config": {}, "n_layers": 0}
    meta |= {"dtype": "", "device": "cpu", "data": []}
    tables = {
        "claims": pd.DataFrame(list(claims), columns=CLAIMS),
        "numbers": pd.DataFrame([tuple(row) for row in numbers], columns=NUMBERS),
    }
    return LabResult(tables, {**meta, "n_samples": len(tables["numbers"]), "unit": "numbers"})


def mean_and_interval(
    values: Values, bounds: Interval = (-math.inf, math.inf)
) -> tuple[float, Interval]:
    """Returns the mean and its 95 % interval by Student's t; NaN ends for one value.

    bounds: the possible values. Student's interval may leave them, so with a lower bound it is that
    of ln((x - low) / (high - x)), or of ln(x - low), turned back into x.
    """
    column = np.asarray(values, dtype=float)
    n, mean = len(column), float(column.mean())
    error = float(column.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    least, most = bounds
    below, above = mean - least, most - mean
    if math.isinf(least) or min(below, above) <= 0:  # at a bound nothing lies on its other side
        (low,), (high,) = student_interval(np.array([mean]), np.array([error]), n)
        return mean, (max(float(low), least), min(float(high), most))
    factors = np.exp(student_interval(np.zeros(1), np.array([error / below + error / above]), n))
    odds = below / above * factors[:, 0]
    ends = least + below * factors[:, 0]
    if math.isfinite(most):
        ends = least + (most - least) * odds / (1 + odds)
    return mean, (float(ends[0]), float(ends[1]))


class Steps:
    """Steps of a lab, each kept in a file of its own as soon as it is done.

    place: the folder of the files; None keeps nothing. settings: what all steps depend on.
    """

    def __init__(self, place: Path | None, **settings: Any) -> None:
        self.place, self.settings = place, settings

    def do(self, name: str, make: Callable[[], Any]) -> Any:
        """Does a step unless it was done before, and returns what `make` returned; JSON holds it.

        Raises SystemExit if the step was done with other settings.
        """
        if self.place is None:
            return json.loads(json.dumps(make()))
        path = self.place / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["settings"] != self.settings:
                raise SystemExit(
                    f"{path} was made with {kept['settings']}, now it is {self.settings}: give "
                    "another --out, or remove the folder."
                )
            return kept["value"]
        value = make()
        self.place.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"settings": self.settings, "value": value}))
        return json.loads(json.dumps(value))


def written(found: LabResult, draw: Callable[[LabResult], Any], out: Path) -> Path:
    """Saves a result and its figure into a folder, and returns the figure's path."""
    from matplotlib import pyplot

    found.save(out)
    path = out / f"{found.meta['lab']}.png"
    figure = draw(found)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def main(
    run: Callable[[str, Steps], LabResult],
    draw: Callable[[LabResult], Any],
    arguments: Sequence[str] | None = None,
) -> LabResult:
    """Runs a lab as a command: prints the finding and the claims, writes tables and a figure."""
    module: Any = sys.modules[run.__module__]
    parser = argparse.ArgumentParser(
        description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="form", action="store_const", const="quick")
    size.add_argument("--full", dest="form", action="store_const", const="full")
    parser.add_argument("--out", type=Path, required=True, help="the folder of what is written")
    given = parser.parse_args(arguments)
    form = given.form or "quick"
    found = run(form, Steps(given.out / f"steps-{form}", form=form))
    path = written(found, draw, given.out)
    print(found.headline())
    shown: Any = found.table()
    columns = ["claim", "published", "ours", "low", "high", "baseline", "answer"]
    print(shown[columns].to_string(index=False, float_format=lambda number: f"{number:.4g}"))
    print(f"figure: {path}")
    return found
