"""The page of an audit: the finding, a verdict for each claim and layer, and all numbers."""

from pathlib import Path
from typing import Any

from crate_interp.audits.claims import BESIDE, CLAIMS, LIMITS, NULLS, NUMBERS
from crate_interp.audits.result import (
    AuditResult,
    answers_by_layer,
    bounds_of,
    change,
    legend,
    main_rows,
    tokens_of,
)
from crate_interp.probes.layer_reading import FRAMES
from crate_interp.results.statistic import Row, Sign, low_to_high
from crate_interp.stats.verdicts import BY_CONSTRUCTION, NOT_APPLICABLE, SHOWN
from crate_interp.viz.compared_curves import audited_number
from crate_interp.viz.page import inline_svg, sources, write_page

# the columns of a number on its card, and in the tables of the page
_ON_CARD = ["frame", "value", "low", "high", "untrained", "verdict"]
_SHOWN = [
    "number", "layer", "frame", "eps", "basis", "tokens", "value", "low", "high", "null", "excess",
    "untrained", "gain", "ceiling", "share", "construction", "verdict",
]  # fmt: skip
# change -> its arrow, and its meaning
_CHANGES = {
    1: ("\N{BLACK UP-POINTING TRIANGLE}", "nearer to the claim than with random weights"),
    -1: ("\N{BLACK DOWN-POINTING TRIANGLE}", "farther from the claim than with random weights"),
}


def audit_page(result: AuditResult, out: str | Path) -> Path:
    """Writes audit.html, audit.txt and the result (AuditResult.save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    rows, ideal, cards = _claims(result)
    table, heads = result.table(), result.table("heads")
    nulls, beside = main_rows(result, "nulls"), main_rows(result, "layers")
    limited: Any = result.table("nulls").query("of == 'ceiling'")["n"]
    numbers = {
        claim.title: table.loc[
            (table["claim"] == name) & (table["verdict"] != NOT_APPLICABLE), _SHOWN
        ]
        for name, claim in CLAIMS.items()
    }
    numbers["Random baselines, upper limits and the papers' own operators"] = nulls
    numbers |= {"Numbers besides the claims": beside, "The output map of each head": heads}
    reasons = {
        (f"{NUMBERS[name].title}, not applicable", reason): None
        for layer in result.meta["reasons"]
        for name, reason in layer.items()
    }
    return write_page(
        result,
        out,
        "audit.html",
        "does each layer do its job?",
        {"audit.txt": f"{result.text()}\n\n{legend(result)}\n"},
        said=result.sentences(),
        answers=answers_by_layer(result).to_dict("records"),
        strips=(rows, ideal),
        cards=cards,
        answers_shown={name: word.answer or name for name, word in SHOWN.items()},
        changes=_CHANGES,
        groups=_groups(result),
        frames={name: frame.sides for name, frame in FRAMES.items()},
        few=int(limited.min()) if len(limited) else int(result.meta["n_samples"]),
        tokens=tokens_of(result),
        nulls={name: null.says for name, null in NULLS.items()} | LIMITS,
        meanings={name: words for name, words in BESIDE.items() if name in beside},
        numbers=numbers,
        sources=[*sources(result.meta), *reasons],
    )


def _claims(result: AuditResult) -> tuple[list[Row], list[Row], list[dict[str, Any]]]:
    """Returns the map of signs, a row per claim, and a card for each sign, which a click opens.

    The claims that an ideal layer misses too, in every layer, have a map of their own. Beside the
    signs stand the bound of the claim's first number, and its range here and in random networks.
    """
    every: Any = result.claims()
    main = main_rows(result, "cells")
    rows: dict[bool, list[Row]] = {False: [], True: []}
    cards = []
    for name, claim in CLAIMS.items():
        here = main[(main["claim"] == name) & (main["verdict"] != NOT_APPLICABLE)]
        first, signs, own = next(iter(claim.numbers)), [], every[every["claim"] == name]
        for row in own.to_dict("records"):
            cells, shown = here[here["layer"] == row["layer"]], SHOWN[row["verdict"]]
            ours = cells[cells["number"] == first]
            way = change(ours) if len(ours) else None
            arrow, meaning = _CHANGES.get(way or 0, ("", ""))
            place = f"{name}-{row['layer']}"
            title = f"{claim.title}, layer {row['layer']}: {shown.answer or row['verdict']}"
            said = f"{title}, {meaning}" if meaning else title
            signs.append(Sign(shown.mark, said, shown.kind, opens=place, arrow=arrow))
            numbers = [
                (NUMBERS[part], bounds_of(NUMBERS[part]), part_rows)
                for part, part_rows in cells.groupby("number", sort=False)
            ]
            card = {"id": place, "title": title, "claim": claim, "numbers": numbers}
            cards.append(row | card | {"change": way, "columns": _ON_CARD})
        some = here[here["number"] == first]
        words = [bounds_of(NUMBERS[first], short=True)]
        write = NUMBERS[first].form.format
        words += [low_to_high(some[column], write) for column in ("value", "untrained", "shuffled")]
        if signs:
            ideal = bool((own["verdict"] == BY_CONSTRUCTION).all())
            rows[ideal].append(Row(claim.title, signs, words))
    return rows[False], rows[True], cards


def _groups(result: AuditResult) -> dict[str, list[dict[str, Any]]]:
    """Returns a figure of each number by layer, by the group of its claim."""
    main: Any = main_rows(result, "cells")
    groups: dict[str, list[dict[str, Any]]] = {}
    for claim in CLAIMS.values():
        for name, number in claim.numbers.items():
            rows: Any = main[main["number"] == name]
            if rows["value"].notna().any():
                alt = f"{number.title} by layer: {low_to_high(rows['value'], number.form.format)}"
                curve = audited_number(rows, (number.low, number.high), "%" in number.form)
                svg = inline_svg(curve, alt, salt=name)
                title = claim.title if len(claim.numbers) == 1 else number.title
                caption = f"{number.formula}. {claim.says} ({claim.where})"
                figure = {"svg": svg, "title": title, "caption": caption, "way": bounds_of(number)}
                groups.setdefault(claim.group, []).append(figure)
    return groups
