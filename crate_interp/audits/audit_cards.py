"""The texts of an audit's page: counted verdicts, a card for each verdict, and the map of signs."""

from dataclasses import dataclass
from typing import Any

from crate_interp.audits import claim_summary
from crate_interp.audits.claims import CLAIMS, NUMBERS, Claim
from crate_interp.audits.verdicts import BROKEN, KEPT, NOT_APPLICABLE, UNDECIDED
from crate_interp.results.result import Result
from crate_interp.results.verdict_strip import MINUS, Row, Sign, low_to_high

_KINDS = {KEPT: "good", BROKEN: "bad"}
_COUNTED = {
    claim_summary.BY_CONSTRUCTION: "by construction: an ideal layer misses the bound too",
    claim_summary.DEPENDS: "depend on the setting",
    UNDECIDED: "undecided",
}
# change -> its arrow, and its meaning
CHANGES = {
    1: ("\N{BLACK UP-POINTING TRIANGLE}", "nearer to the claim than with random weights"),
    -1: ("\N{BLACK DOWN-POINTING TRIANGLE}", "farther from it than with random weights"),
}
_MEANINGS = {
    claim_summary.DEPENDS: "depends on the setting",
    claim_summary.BY_CONSTRUCTION: _COUNTED[claim_summary.BY_CONSTRUCTION],
}


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
    main = claim_summary.main_rows(result, "cells")
    rows: Any = result.table("claims").itertuples(index=False)
    return [_card(row, main) for row in rows]


def _card(row: Any, main: Any) -> Card:
    claim, applies = CLAIMS[row.claim], row.verdict != NOT_APPLICABLE
    main = main[main["layer"] == row.layer]
    numbers = {name: main[main["number"] == name] for name in claim.numbers if applies}
    return Card(
        id=f"{row.claim}-{row.layer}",
        claim=claim,
        layer=row.layer,
        verdict=row.verdict,
        mark=_shown(claim_summary.MARKS[row.verdict]),
        words=". ".join(text for text in (row.on, row.reason) if text),
        change=claim_summary.change(numbers[next(iter(numbers))]) if applies else None,
        numbers=numbers,
    )


def _shown(mark: str) -> str:
    return {"-": MINUS, "": "."}.get(mark, mark)


def marks() -> list[tuple[str, str, str]]:
    """Returns each mark, its meaning, and its kind: "good", "bad" or ""."""
    return [
        (_shown(mark), _MEANINGS.get(word, word), _KINDS.get(word, ""))
        for word, mark in claim_summary.MARKS.items()
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
    return "; ".join(f"{claim}: {claim_summary.layer_words(layers)}" for claim, layers in ordered)


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
    main = claim_summary.main_rows(result, "cells")
    rows: tuple[list[Row], list[Row]] = ([], [])
    for claim in CLAIMS.values():
        first = next(iter(claim.numbers))
        own = main[(main["number"] == first) & (main["verdict"] != NOT_APPLICABLE)]
        mine = [card for card in found if card.claim is claim]
        words = [claim_summary.bounds_of(NUMBERS[first], short=True)]
        words += [low_to_high(own[column]) for column in ("value", "untrained", "shuffled")]
        if mine:
            ideal = all(card.verdict == claim_summary.BY_CONSTRUCTION for card in mine)
            rows[ideal].append(Row(claim.title, [_sign(card) for card in mine], words))
    return rows


def _sign(card: Card) -> Sign:
    change = CHANGES.get(card.change or 0, ("", ""))
    words = f"{card.claim.title}, layer {card.layer}: {card.verdict}{change[1] and ', '}{change[1]}"
    return Sign(card.mark, words, _KINDS.get(card.verdict, ""), opens=card.id, arrow=change[0])
