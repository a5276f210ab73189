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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from crate_interp.core.files import write_text
from crate_interp.results.result import Result, by
from crate_interp.stats.intervals import student_interval

FORMS = ("quick", "full")
ANSWERS = ("supported", "not supported", "depends", "undecided")
CLAIMS = [
    "claim", "where", "published", "ours", "low", "high", "baseline", "baseline_is", "n", "size",
    "answer", "why",
]  # fmt: skip
NUMBERS = ["quantity", "setting", "seed", "place", "value"]


class LabResult(Result):
    """The claims and numbers of a lab.

    `table()`: a row for each claim of a paper, with the columns `CLAIMS`. published: the paper's
    number as it is printed, or "". ours, low, high: our number and a 95 % interval, NaN where
    there is none. baseline: what an untrained network, permuted labels or chance give, which
    baseline_is names. n: over how many seeds or samples. size: "published size", or what is
    smaller. answer: supported, not supported, depends or undecided, at this size; why: one
    sentence.

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
    text: str,
    where: str,
    ours: float,
    *,
    answer: str,
    why: str,
    size: str,
    published: str = "",
    interval: tuple[float, float] = (math.nan, math.nan),
    baseline: float = math.nan,
    baseline_is: str = "",
    n: int = 1,
) -> dict[str, Any]:
    """Returns a row of the table of claims.

    Raises ValueError for an answer that is none of ANSWERS, and for a baseline without a name.
    """
    if answer not in ANSWERS:
        raise ValueError(f"answer={answer!r}: give one of {', '.join(ANSWERS)}.")
    if math.isnan(baseline) == bool(baseline_is):
        raise ValueError(f"baseline={baseline} of {baseline_is!r}: give the number and its name.")
    numbers = (float(ours), *(float(end) for end in interval), float(baseline))
    return dict(
        zip(CLAIMS, (text, where, published, *numbers, baseline_is, n, size, answer, why),
            strict=True)
    )  # fmt: skip


def answer_of(kept: Sequence[bool]) -> str:
    """Returns the answer of a claim that was tested in several places; kept: in which it holds."""
    return "supported" if all(kept) else "depends" if any(kept) else "not supported"


def in_all(kept: Sequence[bool], what: str) -> dict[str, str]:
    """Returns the answer of a claim that was tested in several places, and why.

    what: the rest of the sentence after "2 of 6 ...".
    """
    return {"answer": answer_of(kept), "why": f"{sum(kept)} of {len(kept)} {what}"}


def finished(figure: Any, title: str, bottom: float) -> Any:
    """Gives a figure its title; bottom: the share of its height that is left for a legend."""
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    return figure


def answer_above(interval: tuple[float, float], level: float = 0.0) -> str:
    """Returns the answer to the claim that a value lies above a level, from its interval.

    It is "supported" above, "not supported" below, else "depends".
    """
    low, high = interval
    return "supported" if low > level else "not supported" if high < level else "depends"


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


def mean_and_interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Returns the mean and its 95 % interval by Student's t; NaN ends for one value."""
    column = pd.Series(list(values), dtype=float).to_frame()
    mean, error = column.mean().to_numpy(), column.sem().to_numpy()
    (low,), (high,) = student_interval(mean, error, len(column))
    return float(mean[0]), (float(low), float(high))


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
