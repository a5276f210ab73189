"""AuditResult: each layer against each claim, beside nulls, ceilings and untrained networks."""

import html
from typing import Any

import pandas as pd

from crate_interp.audits.claim_summary import headline, judged, overview
from crate_interp.audits.claims import BESIDE
from crate_interp.audits.verdicts import cells, nulls
from crate_interp.results.result import Result, as_text, by, first


def _beside(result: Result) -> pd.DataFrame:
    numbers: Any = result.table("numbers")
    rows = numbers[numbers["of"] == "layer"] if len(numbers) else numbers
    shown = [name for name in BESIDE if name in rows]
    means = rows.groupby(["layer", "frame", "eps", "basis", "tokens"])[shown].mean()
    return means.dropna(how="all").reset_index()


class AuditResult(Result):
    """What an audit measured.

    `table()` has a row per layer, number and setting. claim, number: see
    crate_interp/audits/claims.py. frame, eps, basis, tokens: the setting; "" and NaN where a number
    has none. value, low, high: the mean over samples and its 95 % interval (bootstrap-t); of
    weights the value itself. null, excess, excess_low, excess_high: the number's null and how far
    the value lies from it, paired by sample. gain: how far the value lies from that of a new random
    output map, or dictionary, in the layer's place; its interval is over draws (Student's t). On
    random networks an excess over shuffled updates is there too, because averages are smooth; a
    gain is not. untrained, difference: the mean of the untrained twins, and this network minus a
    new random one, with its interval over networks. ceiling, share: the best that is possible, and
    which share of it the layer reached; negative where it went the other way. construction: what an
    ideal layer reaches on these tokens; by_construction: whether that misses the bounds too.
    verdict: "kept" if the value's interval lies within the bounds and those of the excess and of
    the gain on the better side of 0, or within the bounds and within 1 % of the ceiling; "broken"
    if the value's interval lies outside the bounds or that of the excess on the worse side of 0;
    else "undecided"; "not applicable" if `reason` says why. Where the null itself is random
    weights, the gain takes the place of the excess: many samples of one draw say nothing of another
    draw. p: of the verdict, adjusted over the layers of a setting by Holm's method; it is at most
    0.05 for "kept" and "broken".

    `claims()` has a row per claim and layer. Its verdict is over the settings that the claim must
    hold in: all frames, and every eps for R^c, else the asked one. "depends": kept in some and
    broken in others, and the column `on` says in which. "by construction": every setting that is
    not kept has a bound that an ideal layer misses too.

    Stored tables: `numbers` (a row per sample, layer, setting and what was measured there: the
    layer, its nulls, its limits), `weights`, `heads` (the cosine of each head's output map and
    U_k^T), and `untrained`, `untrained_weights` with a seed. `table("nulls")` has every null, every
    ceiling and the paper's own operators, with intervals.
    """

    KIND = "audit"
    META = {"settings": dict, "reasons": list, "untrained": int}
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
        """Returns the numbers measured beside the claims, a row per layer and setting.

        They are means over samples. crate_interp/audits/claims.py says what each number is.
        """
        return self.table("layers")

    def text(self) -> str:
        """Returns a table as text: claims down, a mark for each layer, and what stands beside.

        + kept, - broken, ~ depends on the setting, c by construction, ? undecided. The numbers are
        at the asked eps, the lowest and the highest over layers and frames.
        """
        rows: Any = self._table("overview")
        header = ["claim", "layers", "value", "excess", "share", "untrained"]
        shown = ["claim", "layers", "value", "excess", "of the best", "untrained"]
        lines = [[str(row[name]) for name in header] for row in rows.to_dict("records")]
        return as_text(shown, lines)

    def headline(self) -> str:
        """Returns the finding in one sentence."""
        return headline(self)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._words())}</p><pre>{html.escape(self.text())}</pre>"
