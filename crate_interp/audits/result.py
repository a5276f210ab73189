"""AuditResult: how layers compare with claims, random baselines and untrained networks."""

from typing import Any

import numpy as np
import pandas as pd

from crate_interp.audits import objectives, setting
from crate_interp.audits.claims import BESIDE, CLAIMS, JOBS, LEGEND, NULLS, NUMBERS, Claim, Number
from crate_interp.audits.verdicts import cells, nulls
from crate_interp.config.families import FAMILIES
from crate_interp.core.safe_text import in_html, notebook_view
from crate_interp.probes.layer_reading import FRAMES
from crate_interp.results.result import Result, as_text, by, first
from crate_interp.results.statistic import low_to_high
from crate_interp.stats import verdicts

_SOME = " of "  # in the tokens of a cell: "32 of 197"
_STILL = 1e-6  # a relative change below this counts as none


def judged(result: Result) -> pd.DataFrame:
    """Returns a row for each claim and layer, with its verdict: `AuditResult.claims()`."""
    table: Any = result.table("cells")
    # some numbers count at every eps, others at the main eps
    every = table["number"].map(lambda name: NUMBERS[name].every_eps)
    rows = table[every | table["eps"].isna() | (table["eps"] == result.meta["settings"]["eps"])]
    found: list[tuple] = []
    for (name, layer), group in rows.groupby(["claim", "layer"], sort=False):
        claim, applies = CLAIMS[str(name)], group[group["verdict"] != verdicts.NOT_APPLICABLE]
        missed = applies[applies["verdict"] != verdicts.KEPT]
        by_number = [own["verdict"] for _, own in applies.groupby("number", sort=False)]
        verdict = verdicts.together(by_number, bool(missed["by_construction"].all()))
        reasons = _reasons(group)
        if verdict == verdicts.BY_CONSTRUCTION:
            reasons = [
                f"an ideal layer misses the bound too ({NUMBERS[part].title}: {low_to_high(ideal)})"
                for part, ideal in missed.groupby("number", sort=False)["construction"]
            ]
        places = {part: _on(applies[applies["number"] == part], claim) for part in claim.numbers}
        on = [
            words if len(claim.numbers) == 1 else f"{NUMBERS[part].title}: {words}"
            for part, words in places.items()
            if words
        ]
        found.append((name, layer, verdict, "; ".join(on), "; ".join(reasons)))
    order = list(CLAIMS)
    found.sort(key=lambda row: (order.index(row[0]), row[1]))
    return pd.DataFrame(found, columns=["claim", "layer", "verdict", "on", "reason"])


def _reasons(group: pd.DataFrame) -> list[str]:
    """Returns why cells are not kept; a reason names its frames and eps unless it holds in all."""
    given: Any = group[group["reason"] != ""]
    found = []
    for reason, rows in given.groupby("reason", sort=False):
        frames = [name for name in dict.fromkeys(rows["frame"]) if name]
        whole = set(frames) == {name for name in group["frame"] if name}
        where = [] if whole or not frames else [", ".join(frames)]
        eps = sorted(set(rows["eps"].dropna()))
        if eps and set(eps) != set(group["eps"].dropna()):
            where.append(f"eps {', '.join(f'{one:g}' for one in eps)}")
        found.append(f"{' at '.join(where)}: {reason}" if where else str(reason))
    return found


def _on(rows: Any, claim: Claim) -> str:
    """Returns where a number holds: "stream, read: falls; unit: falls (eps 1), rises (eps 10)"."""
    verbs = {verdicts.KEPT: claim.held, verdicts.BROKEN: claim.missed}
    verbs[verdicts.UNDECIDED] = verdicts.UNDECIDED
    said: dict[str, list[str]] = {}
    for frame in [name for name in (*FRAMES, "") if name in set(rows["frame"])]:
        where: dict[str, list[str]] = {}
        for row in rows[rows["frame"] == frame].to_dict("records"):
            unknown = np.isnan(row["low"])
            low, high = (row["value" if unknown else end] for end in ("low", "high"))
            word = verbs[verdicts.of_interval(low, high, NUMBERS[row["number"]].bounds)]
            if claim.still and abs(row["value"]) < _STILL:
                word = claim.still
            place = f"{row['eps']:g}"
            place += " with orthonormal U" if row["basis"] == "orthonormal" else ""
            place += " without CLS" if row["tokens"] == "patches" else ""
            where.setdefault(word, []).append(place)
        by_eps = [f"{word} (eps {', '.join(places)})" for word, places in where.items()]
        words = next(iter(where)) if len(where) == 1 else ", ".join(by_eps)
        said.setdefault(words, []).append(frame)
    return "; ".join(
        f"{', '.join(frames)}: {words}" if frames != [""] else words
        for words, frames in said.items()
    )


def main_rows(result: Result, name: str) -> Any:
    """Returns the rows of a table at the main eps, with U as stored and all tokens, for a page."""
    table = result.table(name)
    at = table["eps"].isna() | table["eps"].isin([setting.NO_EPS, result.meta["settings"]["eps"]])
    tokens = table["tokens"].isin(["", "all"]) | table["tokens"].str.contains(_SOME)
    return table[at & table["basis"].isin(["", "stored"]) & tokens]


def overview(result: Result) -> pd.DataFrame:
    """Returns a row per claim: layers by verdict, and the range of the claim's first number.

    The column `layers` has a sign for each layer, see `stats.verdicts.SHOWN`.
    """
    claims, main = result.table("claims"), main_rows(result, "cells")
    rows: list[dict[str, Any]] = []
    for name, claim in CLAIMS.items():
        words = claims[claims["claim"] == name]["verdict"].tolist()
        leading = next(iter(claim.numbers))
        some = main[(main["number"] == leading) & (main["verdict"] != verdicts.NOT_APPLICABLE)]
        counts = {word: words.count(word) for word in verdicts.SHOWN}
        layers = "".join(verdicts.SHOWN[word].sign or "." for word in words)
        forms = dict.fromkeys(("value", "excess", "share", "untrained"), NUMBERS[leading].form)
        forms["share"] = "{:.2g}"
        spans = {column: low_to_high(some[column], form.format) for column, form in forms.items()}
        start = {"claim": claim.short, "name": name, "layers": layers}
        wanted = {"wanted": bounds_of(claim.numbers[leading], short=True)}
        rows.append(start | counts | wanted | spans)
    return pd.DataFrame(rows)


def answers_by_layer(result: Result) -> pd.DataFrame:
    """Returns a row per layer and job, of attention or of the sparse step: its answer in words.

    value: the relative change, on the tokens as the layer reads them. rival: the baseline of the
    verdict that is hardest to beat; chance: the change with it. shuffled: the change in networks
    of shuffled weights, which no verdict counts.
    """
    claims, main = result.table("claims"), main_rows(result, "cells")
    jobs = main[main["frame"].isin(["", "read"]) & main["number"].isin(["compresses", "descends"])]
    jobs = jobs[["claim", "layer", "number", "value", "null", "gain", "shuffled"]]
    rows: Any = claims[claims["verdict"] != verdicts.NOT_APPLICABLE].merge(jobs)
    found = []
    for row in rows.to_dict("records"):
        number = NUMBERS[row["number"]]
        known = (row["null"], number.null), (row["value"] - row["gain"], number.draws)
        row["chance"], of = min((one for one in known if one[0] == one[0]), default=(np.nan, ""))
        row |= {"answer": verdicts.SHOWN[row["verdict"]].answer, "rival": of and NULLS[of].words}
        for name in ("value", "chance", "shuffled"):
            words = "" if np.isnan(row[name]) else number.form.format(row[name])
            row[name] = "0%" if words in ("+0%", "-0%") else words
        found.append(row)
    columns = ["layer", "claim", "answer", "value", "rival", "chance", "shuffled"]
    return pd.DataFrame(found, columns=columns).sort_values(["layer", "claim"], kind="stable")


def legend(result: Result) -> str:
    """Returns the meaning of signs, columns and rows of `AuditResult.text()`, as lines of text."""
    lines = [
        LEGEND.format(eps=result.meta["settings"]["eps"]),
        tokens_of(result),
        "",
        "The rows, their names in `claims()` and `table()`, and their numbers:",
    ]
    for name, claim in CLAIMS.items():
        lines.append(f"{claim.short} ({name}): {claim.says}")
        for part in claim.numbers:
            number = NUMBERS[part]
            lines.append(f"  {part}: {number.formula}; {bounds_of(number, short=True)}")
    return "\n".join(lines)


def tokens_of(result: Result) -> str:
    """Returns on which tokens the numbers of the sparse step were measured, as a text."""
    tokens: Any = result.table("cells")["tokens"]
    some = ", ".join(sorted({*tokens[tokens.str.contains(_SOME)]}))
    solved = (
        " Numbers that need the solution of the lasso, and numbers compared with them, are "
        f"measured on {some} tokens of each sample, evenly spaced."
    )
    return f"The sparse step is measured on all tokens of each sample.{solved if some else ''}"


def bounds_of(number: Number, short: bool = False) -> str:
    """Returns a text such as "at most 0.1, lower is better"; a bound of 1e-6 is written as 0."""
    low, high = number.low, number.high
    if low is not None and high is not None and abs(low) > 1e-5:
        return f"{low:g} to {high:g}"
    least = "" if low is None else f"at least {low:g}" if abs(low) > 1e-5 else "above 0"
    most = (
        "" if high is None else f"at most {high:g}" if abs(high) > 1e-5 or not high else "below 0"
    )
    words = ", ".join(part for part in (least, most) if part)
    way = {-1: ", lower is better", 1: ", higher is better"}.get(number.better, "")
    return words if short else words + way


def change(rows: pd.DataFrame) -> int | None:
    """Returns whether a number is shown to be nearer to its bounds than with random weights.

    rows: the number's cells in one layer; if there are several frames, "read" counts. Random
    weights are those of untrained copies, and the network's weights in random order. The number
    must be shown to differ from both. 1 is nearer, -1 farther, 0 neither, None unknown.
    """
    read = rows[rows["frame"] == "read"]
    row: Any = (read if len(read) else rows).iloc[0]
    number, value = NUMBERS[row["number"]], row["value"]
    ways = []
    for kind, shown in (
        ("untrained", row["difference_low"] > 0 or row["difference_high"] < 0),
        ("shuffled", value < row["shuffled_low"] or value > row["shuffled_high"]),
    ):
        if not np.isnan(row[kind]):
            nearer = _distance(number, row[kind]) - _distance(number, value)
            ways.append(int(shown) * int(np.sign(nearer)))
    if not ways or np.isnan(row["difference_low"]):
        return None
    return ways[0] if len(set(ways)) == 1 else 0


def _distance(number: Number, value: float) -> float:
    """Returns how far a value is from its bounds; past a one-sided bound it keeps falling."""
    if number.better:
        return -number.better * value
    low, high = number.bounds
    return max(low - value, value - high, 0.0)


def _beside(result: Result) -> pd.DataFrame:
    numbers: Any = result.table("numbers")
    rows = numbers[numbers["of"] == "layer"] if len(numbers) else numbers
    shown = [name for name in BESIDE if name in rows]
    means = rows.groupby(["layer", "frame", "eps", "basis", "tokens"])[shown].mean()
    return means.dropna(how="all").reset_index()


class AuditResult(Result):
    """The result of an audit.

    `table()` has a row per layer, number and setting. claim, number: see
    crate_interp/audits/claims.toml. frame, eps, basis, tokens: the setting; "" or NaN for a number
    that has none. tokens: "all", "patches" (without CLS), or on how many evenly spaced tokens the
    number was measured, such as "4 of 50"; all columns of a row are over the same tokens. value,
    low, high: the mean over samples and its 95 % interval (bootstrap-t), which is NaN if all
    samples have the same value; for a number of weights all three are its value. null: the number's
    random baseline. excess, excess_low, excess_high: the value minus this baseline, with an
    interval, paired by sample. gain: the value minus the value with a random output map, or
    dictionary, in place of the layer's. The gain's interval is over draws (Student's t), and each
    group of eight draws has to agree with the verdict. Random networks also have an excess over
    shuffled updates, because averages are smooth, but they have no gain. untrained, difference: the
    mean of the untrained copies, and this network's value minus that of a new random network, with
    an interval over networks. shuffled, shuffled_low, shuffled_high: the mean of networks with this
    network's weights shuffled within each tensor, and the interval of one more such network (with
    this network's own error). ceiling: a limit that no update of this length passes, and that may
    be out of reach (`measures.least_rate` for a rate). share: the share of the limit that the layer
    reached, so the true share may be higher (negative for the wrong direction). construction: the
    value of an ideal layer on these tokens; by_construction: whether that value misses the bounds
    too. verdict: "kept" if the value's interval lies within the bounds and the intervals of excess
    and gain lie on the better side of 0, or if the value is within the bounds and within 1 % of the
    ceiling; "broken" if the value's interval lies outside the bounds or the excess's interval lies
    on the worse side of 0; otherwise "undecided"; "not applicable" if the claim cannot be tested on
    the layer. If the baseline itself is random weights, the gain replaces the excess, since many
    samples of one draw say nothing about other draws. p: the verdict's p, adjusted over the layers
    of a setting by Holm's method; it is at most 0.05 for "kept" and "broken". reason: why the
    verdict is not "kept", if the value does not show why.

    `claims()` has a row per claim and layer. Its verdict covers all settings in which the claim
    must hold: all scalings, and every eps for the change of R^c, but only the main eps for other
    numbers. "depends": kept in some settings and broken in others; the column `on` names them. "by
    construction": wherever the claim is not kept, an ideal layer misses a bound too.

    Stored tables: `numbers` (a row per sample, layer, setting and `of`, which is "layer" or the
    name of a null or limit), `weights`, `heads` (the cosine of each head's output map and U_k^T),
    and `untrained` and `untrained_weights` (the same for the untrained copies, by seed).
    `table("nulls")` has every baseline, every upper limit and the paper's own operators, with
    standard errors.
    """

    KIND = "audit"
    MAIN = "cells"
    INTERVALS = True
    STORED = {
        "numbers": by("sample", "layer"),
        "weights": first,
        "heads": first,
        "untrained": by("weights", "seed", "sample", "layer"),
        "untrained_weights": first,
    }
    DERIVED = {"cells": cells, "claims": judged, "overview": overview, "nulls": nulls}
    DERIVED |= {"layers": _beside}

    def claims(self) -> pd.DataFrame:
        """Returns a row per claim and layer: claim, layer, verdict, on, reason."""
        return self.table("claims")

    def layers(self) -> pd.DataFrame:
        """Returns the numbers that no claim needs, a row per layer and setting.

        The numbers are means over samples; [beside] in crate_interp/audits/claims.toml explains
        each.
        """
        return self.table("layers")

    def text(self) -> str:
        """Returns two tables as text: a row per layer, in words, and a row per claim.

        A claim has a mark per layer, and its first number.

        + yes, - no, ~ depends on the scaling, ? can't tell, c can't tell, because an ideal layer
        misses the bound too. wanted: the bounds of the number; a kept number must also beat its
        baselines. The numbers are the lowest and the highest over layers and scalings, at the main
        eps.
        """
        header = ["claim", "layers", "wanted", "value", "untrained"]
        lines = self._table("overview")[header].astype(str).to_numpy().tolist()
        jobs: Any = answers_by_layer(self)
        chance = (", chance " + jobs["chance"]).where(jobs["chance"] != "", "")
        words = jobs["answer"] + ": " + jobs["value"] + chance
        wide = jobs.assign(words=words).pivot(index="layer", columns="claim", values="words")
        titles = [f"{CLAIMS[name].short}?" for name in wide]
        rows = wide.fillna("").reset_index().astype(str).to_numpy().tolist()
        by_layer = as_text(["layer", *titles], rows)
        return f"{JOBS}\n{by_layer}\n\n{as_text(header, lines)}"

    def sentences(self) -> list[str]:
        """Returns the answer, in how many layers attention lowers its objective, and one doubt."""
        claims: Any = self.table("claims")
        counts = claims[claims["claim"] == "compresses"]["verdict"].value_counts()
        layers, model = self.meta["n_layers"], self.meta["model"] or "this model"
        if counts.get(verdicts.NOT_APPLICABLE, 0) == layers:
            which = "about attention" if claims["verdict"].nunique() > 1 else "of the papers"
            return [f"No claim {which} applies to the layers of {model}."]
        facts: Any = FAMILIES.get(self.meta["config"]["family"], {})
        goal = objectives.KINDS.get(facts.get("attention"), objectives.KINDS["mssa"]).objective
        ways = {verdicts.DEPENDS: "it beats chance in some", verdicts.UNDECIDED: "we can't tell"}
        ways[verdicts.BY_CONSTRUCTION] = "an ideal layer fails too"
        others = [f" In {counts[word]} {way}." for word, way in ways.items() if word in counts]
        kept = counts.get(verdicts.KEPT, 0)
        lead = f"{kept or 'None'} of {layers} layers lower{'s'[kept > 1 :]} {goal} (token cost) by "
        lead += "attention in all settings."
        answer = lead + "".join(others)
        rows = main_rows(self, "cells")
        rows = rows[(rows["number"] == "compresses") & (rows["frame"] == "read")]
        falls, beyond = (rows["high"] < 0).sum(), (rows["verdict"] == verdicts.KEPT).sum()
        doubt = (
            f"On the tokens as layers read them, {goal} falls in {falls} of {layers} layers "
            f"({self.counted_samples()}), and in {beyond} by more than with shuffled updates and "
            "random output maps."
        )
        if not rows["gain"].notna().any():
            doubt = "No random output maps were measured here, so no layer is compared with them."
        return [answer, doubt]

    def _repr_html_(self) -> str:
        return notebook_view(self._words(), f"<pre>{in_html(self.text())}</pre>")
