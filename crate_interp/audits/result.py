"""AuditResult: each layer against each claim, with intervals over samples, beside the same network untrained."""

import html
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.files import write_parquet, write_text
from crate_interp.sweeps.bootstrap import intervals
from crate_interp.sweeps.text import as_text

KEPT, BROKEN, UNDECIDED, NOT_APPLICABLE = "kept", "broken", "undecided", "not applicable"
_TABLES = ("numbers", "weights", "untrained", "untrained_weights")
_COLUMNS = [
    "layer",
    "claim",
    "value",
    "low",
    "high",
    "verdict",
    "untrained",
    "untrained_verdict",
    "n",
    "reason",
]


@dataclass(frozen=True)
class AuditResult:
    """What an audit found. `numbers`: a row per sample and layer; `weights`: a row per layer; `meta`: where it comes from."""

    numbers: pd.DataFrame
    weights: pd.DataFrame
    untrained: pd.DataFrame
    untrained_weights: pd.DataFrame
    meta: dict[str, Any]

    def table(self) -> pd.DataFrame:
        """One row per layer and claim: layer, claim, value, low, high, verdict, untrained, untrained_verdict, n, reason.

        value: the mean over samples; low, high: its 95 % bootstrap interval (percentile, 2,000 resamples of samples, seed 0;
        of weights the value itself). verdict: "kept" where the interval lies within the claim's bounds, "broken" where it lies outside,
        "undecided" where a bound lies inside it or there is a single sample, "not applicable" where reason says why.
        """
        return self._table.copy()

    @cached_property
    def _table(self) -> pd.DataFrame:
        own, other = (
            _cells(numbers, weights, self.meta)
            for numbers, weights in (
                (self.numbers, self.weights),
                (self.untrained, self.untrained_weights),
            )
        )
        rows: list[tuple] = []
        for layer in range(self.meta["n_layers"]):
            for claim in CLAIMS:
                value, low, high, word, n = own[layer, claim]
                beside = other.get((layer, claim), (np.nan, np.nan, np.nan, "", 0))
                reason = self.meta["reasons"][layer].get(claim, "")
                rows.append((layer, claim, value, low, high, word, beside[0], beside[3], n, reason))
        return pd.DataFrame(rows, columns=_COLUMNS)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text())}</pre>"

    def layers(self) -> pd.DataFrame:
        """The numbers measured beside the claims, a row per layer: means over samples (crate_interp/audits/claims.py says what each is)."""
        shown = [name for name in NUMBERS if name in self.numbers]
        means: Any = self.numbers.groupby("layer")[shown].mean()
        return means.reset_index()

    def text(self) -> str:
        """Layers down, claims across: the value, + kept, - broken, ? undecided; in brackets the same of the untrained network."""
        table = self.table()
        sign = {KEPT: "+", BROKEN: "-", UNDECIDED: "?", NOT_APPLICABLE: "", "": ""}
        lines = [["layer", *CLAIMS]]
        for layer, rows in table.groupby("layer"):
            found: Any = rows.itertuples()
            cells = [
                "n/a"
                if row.verdict == NOT_APPLICABLE
                else f"{row.value:.2g}{sign[row.verdict]}"
                + (
                    f" ({row.untrained:.2g}{sign[row.untrained_verdict]})"
                    if row.untrained_verdict
                    else ""
                )
                for row in found
            ]
            lines.append([str(layer), *cells])
        return as_text(lines[0], lines[1:])

    def __repr__(self) -> str:
        words = self.table()["verdict"].value_counts().to_dict()
        found = ", ".join(f"{count} {word}" for word, count in words.items())
        return f"AuditResult of {self.meta.get('model') or 'a model'} on {self.meta['n_samples']} {self.meta['unit']}: {found}"

    def save(self, folder: str | Path) -> Path:
        """Writes the tables as parquet and audit.json into `folder`, audit.json last."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _TABLES:
            write_parquet(folder / f"audit-{name}.parquet", getattr(self, name))
        write_text(folder / "audit.json", json.dumps(self.meta, indent=2) + "\n")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "AuditResult":
        """The audit saved in `folder`; ValueError where it holds none."""
        folder = Path(folder)
        try:
            meta = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
            tables = [pd.read_parquet(folder / f"audit-{name}.parquet") for name in _TABLES]
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder} holds no saved audit (audit.json and its tables): {error}"
            ) from None
        if not isinstance(meta, dict) or not {"n_layers", "reasons", "n_samples", "unit"} <= set(
            meta
        ):
            raise ValueError(f"{folder / 'audit.json'} is not what AuditResult.save writes.")
        return cls(*tables, meta=meta)


def verdict(claim: str, low: float, high: float) -> str:
    """The word for a confidence interval: where it lies against the claim's bounds."""
    facts = CLAIMS[claim]
    least = -np.inf if facts.low is None else facts.low
    most = np.inf if facts.high is None else facts.high
    if not np.isfinite(low) or not np.isfinite(high):
        return UNDECIDED
    if least <= low and high <= most:
        return KEPT
    return BROKEN if high < least or low > most else UNDECIDED


def _cells(
    numbers: pd.DataFrame, weights: pd.DataFrame, meta: dict[str, Any]
) -> dict[tuple[int, str], tuple]:
    """(value, low, high, verdict, n) of each layer and claim."""
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
                low, high = (
                    values.min(),
                    values.max(),
                )  # several untrained seeds differ, one model is exact
                cells[layer, claim] = (
                    values.mean(),
                    low,
                    high,
                    verdict(claim, low, high),
                    len(values),
                )
            else:
                waiting[layer, claim] = rows[claim].to_numpy()
    if waiting:
        low, high = intervals(np.stack(list(waiting.values()), axis=1))
        for (key, values), least, most in zip(
            waiting.items(), low.tolist(), high.tolist(), strict=True
        ):
            cells[key] = (values.mean(), least, most, verdict(key[1], least, most), len(values))
    return cells
