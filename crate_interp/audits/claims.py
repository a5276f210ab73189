"""The records of the audit: the papers' claims about a layer, and when a claim counts as kept.

The bounds are the same for every model. A claim has one number or several. A number's record says
whether it is judged at every eps. Pages, tables and docs take their words from here. The records
stand in claims.toml beside this file.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GRID = (0.01, 0.1, 1.0, 10.0, 100.0)  # further eps at which rates are measured
# properties that a claim needs of a layer; `why_not` in crate_interp/audits/layer.py tells which
# properties a layer lacks
Need = Literal["subspaces", "series", "several heads", "lasso", "square dictionary"]


@dataclass(frozen=True)
class Number:
    """A number of the audit, kept if it lies in [low, high]; None means no bound.

    null: the baseline whose value is subtracted to give the excess. draws: the random weights whose
    value is subtracted to give the gain. every_eps: whether the number is judged at every eps, not
    only at the main eps. of_weights: whether it needs no data. ceiled: whether an upper limit
    (ceiling) is measured. top: this limit, if a formula gives it. form: how a value is written.
    """

    title: str
    formula: str
    low: float | None = None
    high: float | None = None
    null: str = ""
    draws: str = ""
    every_eps: bool = False
    of_weights: bool = False
    ceiled: bool = False
    top: float | None = None
    form: str = "{:.2g}"

    @property
    def bounds(self) -> tuple[float, float]:
        """Returns (low, high); a missing bound is -inf or inf."""
        low = float("-inf") if self.low is None else self.low
        return low, float("inf") if self.high is None else self.high

    @property
    def better(self) -> int:
        """Returns -1 if low values are better, 1 if high values are, 0 if values in between are."""
        if self.low is None:
            return -1
        return 1 if self.high is None else 0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the audit: a claim of a paper about layers, and the numbers that decide it.

    title: its heading on a page. short: its heading in a table. says: the paper's claim in our
    words; where: its place in the paper. needs: the properties that a layer must have. held,
    missed, still: the words in the column `on` if the claim holds, if it fails, and if nothing
    changes.
    """

    title: str
    short: str
    says: str
    where: str
    group: str
    needs: Sequence[Need]
    numbers: dict[str, Number]
    held: str = "holds"
    missed: str = "does not hold"
    still: str = ""


@dataclass(frozen=True)
class Null:
    """What replaces a layer's update or weights in a random baseline.

    says: what it is, for a page. words: how the reason of a verdict names it.
    """

    says: str
    words: str = ""


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
for _claim in _TABLES["claims"].values():
    _claim["numbers"] = {name: Number(**number) for name, number in _claim["numbers"].items()}
CLAIMS = {name: Claim(**claim) for name, claim in _TABLES["claims"].items()}
NUMBERS = {name: number for claim in CLAIMS.values() for name, number in claim.numbers.items()}
# number -> the claim it belongs to
CLAIM_OF = {number: name for name, claim in CLAIMS.items() for number in claim.numbers}
# what is measured in addition to the numbers of claims -> its formula
BESIDE: dict[str, str] = _TABLES["beside"]
JOBS: str = _TABLES["jobs"]
LEGEND: str = _TABLES["legend"]
NULLS = {name: Null(**fields) for name, fields in _TABLES["nulls"].items()}
IN_VERDICTS = {name for number in NUMBERS.values() for name in (number.null, number.draws) if name}
LIMITS: dict[str, str] = _TABLES["limits"]  # ceilings, constructions and the papers' operators
