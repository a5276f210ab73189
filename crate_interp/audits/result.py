"""AuditResult: layers against claims, compared with nulls, ceilings and untrained networks."""

from typing import Any

import pandas as pd

from crate_interp.audits.claim_summary import headline, judged, overview
from crate_interp.audits.claims import BESIDE
from crate_interp.audits.verdicts import cells, nulls
from crate_interp.core.safe_text import in_html, notebook_view
from crate_interp.results.result import Result, as_text, by, first


def _beside(result: Result) -> pd.DataFrame:
    numbers: Any = result.table("numbers")
    rows = numbers[numbers["of"] == "layer"] if len(numbers) else numbers
    shown = [name for name in BESIDE if name in rows]
    means = rows.groupby(["layer", "frame", "eps", "basis", "tokens"])[shown].mean()
    return means.dropna(how="all").reset_index()


class AuditResult(Result):
    """The result of an audit.

    `table()` has a row per layer, number and setting. claim, number: see
    crate_interp/audits/claims.py. frame, eps, basis, tokens: the setting; "" or NaN for a number
    that has none. tokens: "all", "patches" (without CLS), or on how many evenly spaced tokens the
    number was measured, such as "4 of 50"; all columns of a row are over the same tokens. value,
    low, high: the mean over samples and its 95 % interval (bootstrap-t), which is NaN if all
    samples have the same value; for a number of weights all three are its value. null, excess,
    excess_low, excess_high: the number's null, and the value minus the null with its interval,
    paired by sample. gain: the value minus the value with a new random output map, or dictionary,
    in place of the layer's; the gain's interval is over draws (Student's t), and each group of
    eight draws has to show what a verdict says. Random networks also
    have an excess over shuffled updates, because averages are smooth, but they have no gain.
    untrained, difference: the mean of the untrained twins, and the value of this network minus that
    of a new random network, with an interval over networks. shuffled, shuffled_low, shuffled_high:
    the mean of networks with the weights of this one, shuffled within each tensor, and the interval
    of one more such network (with this network's own error). ceiling, share: a bound on the value
    (`measures.least_rate` for a rate, which may be out of reach), and the share of it that the
    layer reached, which is then a lower bound (negative for the wrong direction).
    construction: the value of an ideal layer on these tokens; by_construction: whether that value
    misses the bounds too. verdict: "kept" if the value's interval lies within the bounds and the
    intervals of excess and gain lie on the better side of 0, or if the value is within the bounds
    and within 1 % of the ceiling; "broken" if the value's interval lies outside the bounds or the
    excess's interval lies on the worse side of 0; otherwise "undecided"; "not applicable" if the
    claim cannot be tested on the layer. If the null itself is random weights, the gain replaces the
    excess, since many samples of one draw say nothing about other draws. p: the verdict's p,
    adjusted over the layers of a setting by Holm's method; it is at most 0.05 for "kept" and
    "broken". reason: why the verdict is not "kept", if the value does not show why.

    `claims()` has a row per claim and layer. Its verdict covers all settings in which the claim
    must hold: all frames, and every eps for the change of R^c, but only the main eps for other
    numbers. "depends": kept in some settings and broken in others; the column `on` names them. "by
    construction": wherever the claim is not kept, an ideal layer misses a bound too.

    Stored tables: `numbers` (a row per sample, layer, setting and `of`, which is "layer" or the
    name of a null or limit), `weights`, `heads` (the cosine of each head's output map and U_k^T),
    and `untrained` and `untrained_weights` (the same of the twins, by seed). `table("nulls")` has
    every null, every ceiling and the paper's own operators, with standard errors.
    """

    KIND = "audit"
    MAIN = "cells"
    INTERVALS = True
    STORED = {
        "numbers": by("sample", "layer"),
        "weights": first,
        "heads": first,
        "untrained": by("seed", "sample", "layer"),
        "untrained_weights": first,
    }
    DERIVED = {
        "cells": cells,
        "claims": judged,
        "overview": overview,
        "nulls": nulls,
        "layers": _beside,
    }

    def claims(self) -> pd.DataFrame:
        """Returns a row per claim and layer: claim, layer, verdict, on, reason."""
        return self.table("claims")

    def layers(self) -> pd.DataFrame:
        """Returns the numbers that no claim needs, a row per layer and setting.

        The numbers are means over samples. BESIDE in crate_interp/audits/claims.py explains each.
        """
        return self.table("layers")

    def text(self) -> str:
        """Returns a table as text: a row per claim, a mark per layer, and the claim's first number.

        + kept, - broken, ~ depends on the setting, c missed by an ideal layer too, ? undecided.
        wanted: the bounds of the number; to be kept, it must also be better than its nulls. The
        numbers are at the main eps: the lowest and the highest over layers and frames.
        """
        rows: Any = self._table("overview")
        header = ["claim", "layers", "wanted", "value", "untrained"]
        lines = [[str(row[name]) for name in header] for row in rows.to_dict("records")]
        return as_text(header, lines)

    def finding(self) -> str:
        """Returns the finding in one sentence: how far attention lowers R^c as read, then more."""
        return headline(self)

    def _repr_html_(self) -> str:
        return notebook_view(self._words(), f"<pre>{in_html(self.text())}</pre>")
