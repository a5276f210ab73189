"""AuditResult: each layer against each claim, with intervals, and the untrained network."""

import html
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.results import Result, by, counted, first
from crate_interp.sweeps.bootstrap import intervals
from crate_interp.sweeps.text import as_text

KEPT, BROKEN, UNDECIDED, NOT_APPLICABLE = "kept", "broken", "undecided", "not applicable"
_SIGN = {KEPT: "+", BROKEN: "-", UNDECIDED: "?", NOT_APPLICABLE: "", "": ""}
_COLUMNS = [
    "layer", "claim", "value", "low", "high", "verdict", "untrained", "untrained_verdict", "n",
    "reason",
]  # fmt: skip


def verdict(claim: str, low: float, high: float) -> str:
    """Returns the word for a confidence interval: where it lies against the claim's bounds."""
    facts = CLAIMS[claim]
    least = -np.inf if facts.low is None else facts.low
    most = np.inf if facts.high is None else facts.high
    if not np.isfinite(low) or not np.isfinite(high):
        return UNDECIDED
    if least <= low and high <= most:
        return KEPT
    return BROKEN if high < least or low > most else UNDECIDED


def _claims(result: Result) -> pd.DataFrame:
    own = _cells(result.table("numbers"), result.table("weights"), result.meta)
    other = _cells(result.table("untrained"), result.table("untrained_weights"), result.meta)
    rows: list[tuple] = []
    for layer in range(result.meta["n_layers"]):
        for claim in CLAIMS:
            value, low, high, word, n = own[layer, claim]
            beside = other.get((layer, claim), (np.nan, np.nan, np.nan, "", 0))
            reason = result.meta["reasons"][layer].get(claim, "")
            rows.append((layer, claim, value, low, high, word, beside[0], beside[3], n, reason))
    return pd.DataFrame(rows, columns=_COLUMNS)


def _layers(result: Result) -> pd.DataFrame:
    numbers = result.table("numbers")
    shown = [name for name in NUMBERS if name in numbers]
    means: Any = numbers.groupby("layer")[shown].mean()
    return means.reset_index()


class AuditResult(Result):
    """What an audit measured.

    `table()` has a row per layer and claim: layer, claim, value, low, high, verdict, untrained,
    untrained_verdict, n, reason. value: the mean over samples. low, high: its 95 % bootstrap
    interval (percentile, 2,000 resamples of samples, seed 0); of weights the value itself. verdict:
    "kept" if the interval lies within the claim's bounds, "broken" if it lies outside, "undecided"
    if a bound lies inside it or there is a single sample, "not applicable" if `reason` says why.

    Stored tables: `numbers` (a row per sample and layer), `weights` (a row per layer), and the same
    of the untrained twins, `untrained` and `untrained_weights`, with their seed.
    """

    KIND = "audit"
    META = {"settings": dict, "reasons": list, "untrained": int}
    MAIN = "claims"
    STORED = {
        "numbers": by("sample", "layer"),
        "weights": first,
        "untrained": by("seed", "sample", "layer"),
        "untrained_weights": first,
    }
    DERIVED = {"claims": _claims, "layers": _layers}

    def layers(self) -> pd.DataFrame:
        """Returns the numbers measured beside the claims, a row per layer: means over samples.

        crate_interp/audits/claims.py says what each number is.
        """
        return self.table("layers")

    def text(self) -> str:
        """Returns a table as text: layers down, claims across, the untrained network in brackets.

        A value is followed by + (kept), - (broken) or ? (undecided).
        """
        lines = [["layer", *CLAIMS]]
        for layer, rows in self._table("claims").groupby("layer"):
            lines.append([str(layer), *(_cell(row) for row in rows.itertuples())])
        return as_text(lines[0], lines[1:])

    def headline(self) -> str:
        """Returns how many cells are kept, broken, undecided or not applicable."""
        words = self._table("claims")["verdict"].value_counts().to_dict()
        counts = ", ".join(f"{count} {word}" for word, count in words.items())
        samples = counted(self.meta["n_samples"], self.meta["unit"])
        where = f"{self.meta['model'] or 'a model'} on {samples}"
        return f"Of {sum(words.values())} claims about layers of {where}: {counts}."

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.headline())}</p><pre>{html.escape(self.text())}</pre>"


def _cell(row: Any) -> str:
    if row.verdict == NOT_APPLICABLE:
        return "n/a"
    cell = f"{row.value:.2g}{_SIGN[row.verdict]}"
    beside = f" ({row.untrained:.2g}{_SIGN[row.untrained_verdict]})"
    return cell + (beside if row.untrained_verdict else "")


def _cells(
    numbers: pd.DataFrame, weights: pd.DataFrame, meta: dict[str, Any]
) -> dict[tuple[int, str], tuple]:
    """Returns (value, low, high, verdict, n) of each layer and claim."""
    cells: dict[tuple[int, str], tuple] = {}
    waiting: dict[tuple[int, str], np.ndarray] = {}  # resampled together
    if not len(numbers) and not len(weights):
        return cells
    for layer in range(meta["n_layers"]):
        rows: Any = numbers[numbers["layer"] == layer]
        own: Any = weights[weights["layer"] == layer]
        for claim, facts in CLAIMS.items():
            if claim in meta["reasons"][layer]:
                cells[layer, claim] = (np.nan, np.nan, np.nan, NOT_APPLICABLE, 0)
            elif facts.of_weights:
                values = own[claim].to_numpy()
                low, high = values.min(), values.max()  # several untrained seeds differ
                word = verdict(claim, low, high)
                cells[layer, claim] = (values.mean(), low, high, word, len(values))
            else:
                waiting[layer, claim] = rows[claim].to_numpy()
    if waiting:
        low, high = intervals(np.stack(list(waiting.values()), axis=1))
        for (key, values), least, most in zip(
            waiting.items(), low.tolist(), high.tolist(), strict=True
        ):
            word = verdict(key[1], least, most)
            cells[key] = (values.mean(), least, most, word, len(values))
    return cells
