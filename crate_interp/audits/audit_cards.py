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
_MEANINGS = {
    claim_summary.DEPENDS: "depends on the setting",
    claim_summary.BY_CONSTRUCTION: _COUNTED[claim_summary.BY_CONSTRUCTION],
}


@dataclass(frozen=True)
class Card:
    """The verdict on a claim in a layer, and its reasons.

    same: whether the means of the untrained networks lie on the same side of every bound as this
    network's values; None without untrained networks. numbers: the cells of each number at the main
    eps, as tables, if the claim applies.
    """

    id: str
    claim: Claim
    layer: int
    verdict: str
    mark: str
    words: str
    same: bool | None
    numbers: dict[str, Any]


def cards(result: Result) -> list[Card]:
    """Returns a card for each verdict, claim by claim and layer by layer."""
    cells, main = result.table("cells"), claim_summary.main_rows(result, "cells")
    judged = cells[claim_summary.is_judged(cells, result.meta["settings"]["eps"])]
    by_place = dict(iter(judged.groupby(["claim", "layer"])))
    rows: Any = result.table("claims").itertuples(index=False)
    return [_card(row, by_place[row.claim, row.layer], main) for row in rows]


def _card(row: Any, judged: Any, main: Any) -> Card:
    claim, applies = CLAIMS[row.claim], row.verdict != NOT_APPLICABLE
    main = main[main["layer"] == row.layer]
    return Card(
        id=f"{row.claim}-{row.layer}",
        claim=claim,
        layer=row.layer,
        verdict=row.verdict,
        mark=_shown(claim_summary.MARKS[row.verdict]),
        words=". ".join(text for text in (row.on, row.reason) if text),
        same=_same_untrained(judged) if applies else None,
        numbers={name: main[main["number"] == name] for name in claim.numbers if applies},
    )


def _same_untrained(rows: Any) -> bool | None:
    """Tells whether value and untrained mean are on the same side of the bounds in every row.

    Returns None if there is no untrained network.
    """
    known = rows[rows["value"].notna() & rows["untrained"].notna()]
    names = known["number"]
    sides = [
        [_inside(name, value) for name, value in zip(names, known[column], strict=True)]
        for column in ("value", "untrained")
    ]
    return sides[0] == sides[1] if len(known) else None


def _inside(name: str, value: float) -> bool:
    low, high = NUMBERS[name].bounds
    return low <= value <= high


def _shown(mark: str) -> str:
    return {"-": MINUS, "": "."}.get(mark, mark)


def marks() -> list[tuple[str, str, str]]:
    """Returns each mark, its meaning, and its kind: "good", "bad" or ""."""
    return [
        (_shown(mark), _MEANINGS.get(word, word), _KINDS.get(word, ""))
        for word, mark in claim_summary.MARKS.items()
    ]


def counted_verdicts(found: list[Card]) -> str:
    """Returns how many verdicts of each kind there are, as a text.

    It also says in how many of them untrained networks lie on the same side of each bound.
    """
    words = [card.verdict for card in found if card.verdict != NOT_APPLICABLE]
    if not words:
        return "No claim applies."
    claims = len({card.claim.title for card in found if card.verdict != NOT_APPLICABLE})
    text = f"{words.count(KEPT)} of {len(words)} verdicts (on {claims} claims) are kept, "
    text += f"{words.count(BROKEN)} broken"
    text += "".join(
        f"; {words.count(word)} {what}" for word, what in _COUNTED.items() if word in words
    )
    known = [card.same for card in found if card.same is not None]
    return f"{text}." + (
        f" Untrained networks lie on the same side of each bound in {sum(known)} of them."
        if known
        else ""
    )


def strip(result: Result, found: list[Card]) -> list[Row]:
    """Returns the map of signs: a row per claim, a sign per layer; clicking a sign opens its card.

    Further columns give the bound of the claim's first number, and the number's lowest and highest
    value for this network and for the untrained networks.
    """
    main = claim_summary.main_rows(result, "cells")
    rows = []
    for claim in CLAIMS.values():
        first = next(iter(claim.numbers))
        own = main[(main["number"] == first) & (main["verdict"] != NOT_APPLICABLE)]
        signs = [_sign(card) for card in found if card.claim is claim]
        words = [claim_summary.bounds_of(NUMBERS[first], short=True)]
        words += [low_to_high(own[column]) for column in ("value", "untrained")]
        rows += [Row(claim.title, signs, words)] if signs else []
    return rows


def _sign(card: Card) -> Sign:
    same = ", untrained the same" if card.same else ""
    words = f"{card.claim.title}, layer {card.layer}: {card.verdict}{same}"
    return Sign(card.mark, words, _KINDS.get(card.verdict, ""), bool(card.same), card.id)
