"""AuditResult: layers against claims, nulls and untrained networks, and the cards of its page."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from crate_interp.audits.claim_summary import (
    BY_CONSTRUCTION,
    DEPENDS,
    MARKS,
    bounds_of,
    change,
    findings,
    judged,
    layer_words,
    main_rows,
    overview,
)
from crate_interp.audits.claims import BESIDE, CLAIMS, NUMBERS, Claim
from crate_interp.audits.verdicts import BROKEN, KEPT, NOT_APPLICABLE, UNDECIDED, cells, nulls
from crate_interp.core.safe_text import in_html, notebook_view
from crate_interp.results.result import Result, as_text, by, first
from crate_interp.results.statistic import MINUS, Row, Sign, low_to_high

_KINDS = {KEPT: "good", BROKEN: "bad"}
_COUNTED = {
    BY_CONSTRUCTION: "by construction: an ideal layer misses the bound too",
    DEPENDS: "depend on the setting",
    UNDECIDED: "undecided",
}
# change -> its arrow, and its meaning
CHANGES = {
    1: ("\N{BLACK UP-POINTING TRIANGLE}", "nearer to the claim than with random weights"),
    -1: ("\N{BLACK DOWN-POINTING TRIANGLE}", "farther from it than with random weights"),
}
_MEANINGS = {
    DEPENDS: "depends on the setting",
    BY_CONSTRUCTION: _COUNTED[BY_CONSTRUCTION],
}


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
        "untrained": by("weights", "seed", "sample", "layer"),
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
        return " ".join(findings(self))

    def _repr_html_(self) -> str:
        return notebook_view(self._words(), f"<pre>{in_html(self.text())}</pre>")


@dataclass(frozen=True)
class Card:
    """The verdict on a claim in a layer, and its reasons.

    change: 1 if the claim's first number is shown to be nearer to the claim than with random
    weights, -1 if it is shown to be farther, 0 if neither is shown, None if that is unknown.
    numbers: the cells of each number at the main eps, as tables, if the claim applies.
    """

    id: str
    claim: Claim
    layer: int
    verdict: str
    mark: str
    words: str
    change: int | None
    numbers: dict[str, Any]


def cards(result: Result) -> list[Card]:
    """Returns a card for each verdict, claim by claim and layer by layer."""
    main: Any = main_rows(result, "cells")
    rows: Any = result.table("claims").itertuples(index=False)
    found: list[Card] = []
    for row in rows:
        claim, applies = CLAIMS[row.claim], row.verdict != NOT_APPLICABLE
        here = main[main["layer"] == row.layer]
        numbers = {name: here[here["number"] == name] for name in claim.numbers if applies}
        way = change(numbers[next(iter(numbers))]) if applies else None
        words = ". ".join(text for text in (row.on, row.reason) if text)
        name, mark = f"{row.claim}-{row.layer}", _shown(MARKS[row.verdict])
        found.append(Card(name, claim, row.layer, row.verdict, mark, words, way, numbers))
    return found


def _shown(mark: str) -> str:
    return {"-": MINUS, "": "."}.get(mark, mark)


def marks() -> list[tuple[str, str, str]]:
    """Returns each mark, its meaning, and its kind: "good", "bad" or ""."""
    return [
        (_shown(mark), _MEANINGS.get(word, word), _KINDS.get(word, ""))
        for word, mark in MARKS.items()
    ]


def against_random(found: list[Card]) -> list[str]:
    """Returns how often claims are nearer, or farther, than with random weights; then where."""
    known = [card for card in found if card.change is not None]
    if not known:
        return ["At least two untrained networks are needed to tell what random weights give."]
    nearer, farther = (sum(card.change == way for card in known) for way in (1, -1))
    count = sum(card.verdict != NOT_APPLICABLE for card in found)
    said = [
        f"Beside random weights, {nearer} of {count} cells are shown to be nearer to their claim, "
        f"and {farther} farther from it; the rest is not told apart."
    ]
    where = ((how, _where(known, way)) for how, way in (("Nearer", 1), ("Farther", -1)))
    return said + [f"{how}: {words}." for how, words in where if words]


def _where(found: list[Card], way: int) -> str:
    """Returns the claims that have changed this way, with their layers, the most layers first."""
    by_claim: dict[str, list[int]] = {}
    for card in found:
        if card.change == way:
            by_claim.setdefault(card.claim.title, []).append(card.layer)
    ordered = sorted(by_claim.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{claim}: {layer_words(layers)}" for claim, layers in ordered)


def counted_verdicts(found: list[Card]) -> str:
    """Returns how many verdicts of each kind there are, as a text."""
    words = [card.verdict for card in found if card.verdict != NOT_APPLICABLE]
    if not words:
        return "No claim applies."
    claims = len({card.claim.title for card in found if card.verdict != NOT_APPLICABLE})
    text = f"{words.count(KEPT)} of {len(words)} verdicts (on {claims} claims) are kept, "
    text += f"{words.count(BROKEN)} broken"
    text += "".join(
        f"; {words.count(word)} {what}" for word, what in _COUNTED.items() if word in words
    )
    return f"{text}."


def strip(result: Result, found: list[Card]) -> tuple[list[Row], list[Row]]:
    """Returns the map of signs: a row per claim, a sign per layer; clicking a sign opens its card.

    The second list has the claims that an ideal layer misses too, in every layer. Further columns
    give the bound of the claim's first number, and the number's lowest and highest value for this
    network and for networks with random weights.
    """
    main = main_rows(result, "cells")
    rows: tuple[list[Row], list[Row]] = ([], [])
    for claim in CLAIMS.values():
        first = next(iter(claim.numbers))
        own = main[(main["number"] == first) & (main["verdict"] != NOT_APPLICABLE)]
        mine = [card for card in found if card.claim is claim]
        words = [bounds_of(NUMBERS[first], short=True)]
        words += [low_to_high(own[column]) for column in ("value", "untrained", "shuffled")]
        if mine:
            ideal = all(card.verdict == BY_CONSTRUCTION for card in mine)
            signs = []
            for card in mine:
                arrow, meaning = CHANGES.get(card.change or 0, ("", ""))
                said = f"{claim.title}, layer {card.layer}: {card.verdict}"
                said += f", {meaning}" if meaning else ""
                kind = _KINDS.get(card.verdict, "")
                signs.append(Sign(card.mark, said, kind, opens=card.id, arrow=arrow))
            rows[ideal].append(Row(claim.title, signs, words))
    return rows
