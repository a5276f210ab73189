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
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rules import Interval, answer, rules
from tqdm.auto import tqdm

from crate_interp.core.files import write_text
from crate_interp.results.result import Result, by
from crate_interp.stats.intervals import student_interval

FORMS = ("quick", "full")
TEXTS = Path(__file__).parent / "data" / "texts.toml"
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

    def numbers(self, quantity: str, **chosen: Any) -> Any:
        """Returns the rows of one quantity, and of one setting, seed or place if given."""
        table: Any = self.table("numbers")  # pandas' own types are too wide here
        rows = table["quantity"] == quantity
        for name, value in chosen.items():
            rows &= table[name] == value
        return table[rows].reset_index(drop=True)


@cache
def texts(name: str) -> dict[str, Any]:
    """Returns the texts of a lab in data/texts.toml.

    They are its headline, the title of its figure, and texts of claims: those of all, and by the
    key of a rule those of its own.
    """
    return tomllib.loads(TEXTS.read_text(encoding="utf-8")).get(name, {})


def claim(
    rule: str,
    ours: Any,
    *,
    baseline: Any,
    cases: Mapping[str, Any] | None = None,
    interval: Interval | None = None,
    n: int | None = None,
    met: bool = True,
    **words: Any,
) -> dict[str, Any]:
    """Returns a row of the table of claims, with the answer that its rule gives.

    rule: its name in data/rules.csv. ours: the number, or a value for each unit, whose mean and
    interval are taken in the range of the rule. cases: what the rule is asked about, that of ours
    if None. n: the number of units, if ours does not say. met: whether what the rule needs is
    there. words: what fills the text of the claim and those of data/texts.toml: published, size,
    why, and baseline_is, which the rule says otherwise; or such a text itself.

    Raises ValueError if the interval leaves the possible range.
    """
    asked, ends = rules()[rule], interval or (math.nan, math.nan)
    if np.ndim(ours):
        n = len(ours) if n is None else n
        ours, ends = mean_and_interval(ours, asked.bounds())
    least, most = asked.bounds()
    if ends[0] < least or ends[1] > most:
        raise ValueError(f"{rule}: the interval {ends} leaves the possible range {asked.range}.")
    kept: Any = {
        name: tuple(float(f"{end:.6g}") for end in ends_of(case))
        for name, case in ({"": ends} if cases is None else cases).items()
    }
    said: Any = {"published": "", "why": "", "baseline_is": asked.baseline}
    said |= texts(asked.lab) | texts(asked.lab).get(asked.key, {}) | words
    words = words | {"n": n, "baseline": baseline}
    published, name, size, why = (
        said[text].format(**words) for text in ("published", "baseline_is", "size", "why")
    )
    row = (asked.claim.format(**words), asked.place, published, float(ours), *map(float, ends),
           float(baseline), name, n, size, answer(asked, kept, met), why, rule,
           json.dumps(kept))  # fmt: skip
    return dict(zip(CLAIMS, row, strict=True))


def ends_of(case: Any) -> Interval:
    """Returns a tuple as it is, the 95 % interval of values by unit, or a number twice."""
    if isinstance(case, tuple):
        return case
    return mean_and_interval(case)[1] if np.ndim(case) else (case, case)


def values(
    rows: Iterable[Sequence], quantity: str, setting: str | None = None, place: int | None = None
) -> np.ndarray:
    """Returns what rows of numbers have of a quantity; of one setting and place if given."""
    return np.array([
        row[4] for row in rows
        if row[0] == quantity and setting in (None, row[1]) and place in (None, row[3])
    ])  # fmt: skip


def of_limit(
    rule: str, rows: Iterable[Sequence], of: tuple[str, str], limit: float, last: int, **words: Any
) -> dict[str, Any]:
    """Returns the claim that a number goes to a limit; of: its quantity and setting; last: place.

    Its texts may name half, what it is half-way.
    """
    begun, half, end = (values(rows, *of, at) for at in (0, last // 2, last))
    return claim(
        rule, end, cases=towards(*(abs(each - limit) for each in (begun, half, end))),
        baseline=begun.mean(), half=half.mean(), **words,
    )  # fmt: skip


def towards(begun: Values, half: Values, end: Values) -> dict[str, Interval]:
    """Returns the cases of the claim that a number goes to a limit: both must lie above 0.

    begun, half, end: how far it is from the limit before training, half-way and at the end, by
    seed. Nearer: by how much less at the end than before. Closing: the logarithm of half-way over
    end, unless all have arrived (1e-9).
    """
    cases: dict[str, Interval] = {"nearer": ends_of(np.subtract(begun, end))}
    if max(end) > 1e-9:
        far = np.maximum(np.array([half, end]), 1e-12)
        cases["closing"] = ends_of(np.log(far[0] / far[1]))
    return cases


def result(
    name: str, form: str, claims: Sequence[dict], numbers: Sequence[Sequence], **words: Any
) -> LabResult:
    """Returns a result from its rows; numbers: (quantity, setting, seed, place, value) each.

    words: what fills the headline of data/texts.toml beside the claims; or the headline itself.
    """
    from importlib.metadata import version

    versions = {package: version(package) for package in ("crate_interp", "torch", "numpy")}
    headline = (texts(name) | words)["headline"].format(claims=claims, **words)
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

    def all(self, jobs: Mapping[str, Callable[[], Any]], what: str) -> dict[str, Any]:
        """Does steps by name, under a bar that says what, and returns what they made."""
        bar = tqdm(jobs.items(), desc=what, unit="step")
        return {name: self.do(name, make) for name, make in bar}

    def rows(self, jobs: Mapping[str, Callable[[], Any]], what: str) -> list[list]:
        """Returns the rows of such steps as one list."""
        return list(chain.from_iterable(self.all(jobs, what).values()))


def descended(
    parameters: Sequence[Any],
    rates: Sequence[Any],
    loss: Callable[[], Any],
    look: Callable[[], dict[str, Any]],
    key: tuple[str, int],
    iterations: int,
    every: int,
) -> list[list]:
    """Descends the gradient of a loss in tensors, and returns the rows of numbers of `look`.

    key: setting and seed. look: measures every so many iterations, before the step, and at the end.
    """
    import torch

    rows = []
    for at in range(iterations + 1):
        if at % every == 0:
            with torch.no_grad():
                rows += [[name, *key, at, float(value)] for name, value in look().items()]
        slopes = torch.autograd.grad(loss(), parameters)
        with torch.no_grad():
            for parameter, rate, slope in zip(parameters, rates, slopes, strict=True):
                parameter -= rate * slope
    return rows


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
    run: Callable[..., LabResult],
    draw: Callable[[LabResult], Any],
    arguments: Sequence[str] | None = None,
    **files: str,
) -> LabResult:
    """Runs a lab as a command: prints finding and claims, writes them; files: options' help."""
    module: Any = sys.modules[run.__module__]
    parser = argparse.ArgumentParser(
        description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="form", action="store_const", const="quick")
    size.add_argument("--full", dest="form", action="store_const", const="full")
    parser.add_argument("--out", type=Path, required=True, help="the folder of what is written")
    for name, words in files.items():
        parser.add_argument(f"--{name}", type=Path, help=words)
    given = parser.parse_args(arguments)
    form, paths = given.form or "quick", {name: getattr(given, name) for name in files}
    found = run(form, Steps(given.out / f"steps-{form}", form=form), **paths)
    path = written(found, draw, given.out)
    print(found.headline())
    shown: Any = found.table()
    columns = ["claim", "published", "ours", "low", "high", "baseline", "answer"]
    print(shown[columns].to_string(index=False, float_format=lambda number: f"{number:.4g}"))
    print(f"figure: {path}")
    return found
