"""Pages that compare: two networks, and one network with and without a head or a node."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crate_interp.circuits.attention_reasons_result import AttentionReason, piece_name
from crate_interp.circuits.circuit import head_name
from crate_interp.circuits.code_swaps_result import Concentration
from crate_interp.circuits.head_ablation import HeadAblation
from crate_interp.comparisons.result import (
    Comparison,
    is_like_untrained,
    largest,
    place,
    signed,
    span,
    steady,
    verdict,
)
from crate_interp.core.safe_text import cell
from crate_interp.probes import heading, statistic
from crate_interp.results.statistic import MINUS, Row, sign_of
from crate_interp.stats.intervals import LEVEL
from crate_interp.stats.verdicts import NOT_APPLICABLE, UNDECIDED
from crate_interp.viz.circuit_figures import why_figure
from crate_interp.viz.compared_curves import compare, concentration
from crate_interp.viz.heatmaps import SIGNED, head_ablation
from crate_interp.viz.page import check_page, data_uri, heat_map, inline_svg, write_page

_HERO = 3  # how many statistics have figures at the top of the page


def compare_page(result: Comparison, out: str | Path) -> Path:
    """Writes compare.html, differences.csv and the result (Comparison.save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    meta, table = result.meta, result.table()
    most, lead = largest(result, _HERO), steady(result)
    names = [*(lead or ())[:1], *(f"{row['probe']}.{row['statistic']}" for row in most)]
    every: Any = table.groupby(table["probe"] + "." + table["statistic"], sort=False)
    by_statistic: dict[str, pd.DataFrame] = dict(list(every))
    layers = sorted({int(layer) for layer in table["layer"]})
    models = {meta["config"][side].get("model_name") or "" for side in "ab"}
    models = "".join(f" ({one})" for one in sorted(models) if one not in meta["model"])
    signs: dict[str, list[Row]] = {}
    for name, rows in by_statistic.items():
        probe = heading(meta, name.partition(".")[0])
        signs.setdefault(probe, []).append(_row(statistic(meta, name).title, rows, layers))
    return write_page(
        result,
        out,
        "compare.html",
        f"how do the two differ{models}?",
        {"differences.csv": table.map(cell).to_csv(index=False)},
        said=result.sentences(),
        numbers={
            statistic(meta, name).title: rows.drop(columns=["probe", "statistic"])
            for name, rows in by_statistic.items()
        },
        largest=most,
        statistic=partial(statistic, meta),
        place=place,
        hero=[_figure(name, result) for name in dict.fromkeys(names or list(by_statistic)[:_HERO])],
        layers=["out" if layer == meta["a"]["n_layers"] else layer for layer in layers],
        signs=signs,
    )


def _figure(name: str, result: Comparison) -> dict[str, str]:
    """Returns the figure of a statistic on both sides and of their difference."""
    record = statistic(result.meta, name)
    title, alt = record.title, f"{record.title} of a and b, and the difference a - b, by layer"
    svg = inline_svg(compare(result, name, title=""), alt, salt=name)
    return dict(title=title, way=record.direction, name=name, caption=record.how, svg=svg)


def _row(title: str, table: pd.DataFrame, layers: list[int]) -> Row:
    """Returns a row of signs: plus if a is higher, minus if a is lower, else a question mark.

    A sign has its numbers as words, and a ring if untrained networks may differ as much.
    """
    signs = {layer: sign_of(NOT_APPLICABLE, f"layer {layer}: not compared") for layer in layers}
    for row in table.to_dict("records"):
        word, ends = verdict(row), _ends(row, "low", "high")
        words = f"{place(row)}: a {MINUS} b is {signed(row['difference'])}{ends}"
        if not math.isnan(row["untrained"]):
            ends = _ends(row, "excess_low", "excess_high")
            words += f", untrained {signed(row['untrained'])}"
            words += f", beyond untrained {signed(row['excess'])}{ends}"
        words += {NOT_APPLICABLE: ": without an interval", UNDECIDED: ": can't tell"}.get(word, "")
        signs[int(row["layer"])] = sign_of(word, words, is_like_untrained(row))
    ranges = [span(table[key].to_numpy(float)) for key in ("difference", "untrained", "excess")]
    return Row(title, list(signs.values()), [words for words in ranges if words])


def _ends(row: dict[str, Any], low: str, high: str) -> str:
    return "" if math.isnan(row[low]) else f" ({signed(row[low])} to {signed(row[high])})"


def ablation_page(result: HeadAblation, out: str | Path, *, explorer: str | None = None) -> Path:
    """Writes ablation.html, heads.png and the result (save) into a folder.

    Returns the path of the page.

    Args:
        result: What `ci.ablate_heads` returns.
        out: The folder.
        explorer: The name of a page of `ci.viz.explore` in the same folder; a click on a head opens
            it there.

    Raises:
        ValueError: If the folder cannot be written, or another process is writing it, and for an
            `explorer` that is not the name of a page.
    """
    check_page("explorer", explorer)
    table: Any = result.heads().sort_values("drop", key=np.abs, ascending=False, kind="stable")
    return write_page(
        result,
        out,
        "ablation.html",
        "what each head does for the answers",
        {"heads.png": head_ablation(result)},
        said=result.sentences(),
        numbers={"Every head": table},
        explorer=explorer,
        guess=result.guessing(),
        map=_map(result, explorer),
    )


def _map(result: HeadAblation, explorer: str | None) -> list[list[dict[str, Any]]]:
    """Returns a cell for each layer and head: its drop, and a link to the head in the explorer."""
    table: Any = result.heads().set_index(["layer", "head"])
    drops = table["drop"].unstack().to_numpy()
    most = max(float(np.abs(drops).max()), 1e-30)

    def cell(layer: int, head: int) -> dict[str, Any]:
        row = table.loc[layer, head]
        ends = result.interval_words(row["low"], row["high"])
        guessed = not row.get("exact", True)
        about = "\u2248" if guessed else ""
        return {
            "text": f"{about}{row['drop']:+.2g}",
            "ends": "" if guessed else f"{row['low']:+.2g} to {row['high']:+.2g}",
            "note": f"L{layer}H{head}: {row['drop']:+.3g} ({'first order' if guessed else ends})",
            "link": f"{explorer}#layer={layer}&head={head}" if explorer else "",
            "mark": "" if guessed or row["p"] <= LEVEL else "faint",
        }

    return heat_map(SIGNED(0.5 + 0.5 * drops / most), cell)


def concentration_page(result: Concentration, out: str | Path) -> Path:
    """Writes concentration.html, concentration.png and the result (save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    return write_page(
        result,
        out,
        "concentration.html",
        "how few nodes of the code carry an answer?",
        {"concentration.png": concentration(result)},
        said=result.sentences(),
        numbers={
            "Shares of the gap": result.table("shares"),
            "Native axes against other axes": result.table("contrasts"),
        },
        curves=inline_svg(concentration(result, title=""), result.finding(), salt="curves"),
    )


def why_page(reason: AttentionReason, out: str | Path) -> Path:
    """Writes why.html, why.png and the result (save) into a folder, and returns the page's path.

    The page shows the two tokens, their atoms with the largest parts of the score, and what is left
    of the attention without them. Raises ValueError as `concentration_page` does.
    """
    pieces: Any = reason.table("pieces").sort_values("part", key=np.abs, ascending=False)
    picture: Any = reason.table("picture")
    meta = reason.meta
    boxes: list[dict[str, Any]] = []
    if len(picture):
        rows, columns = map(int, picture.iloc[0][["rows", "columns"]])
        patches = [place - (meta["special"] or 0) for place in meta["places"]]
        boxes = [
            {"side": side, "x": patch % columns / columns, "y": patch // columns / rows,
             "width": 1 / columns, "height": 1 / rows}
            for side, patch in zip(("query", "key"), patches, strict=True)
            if 0 <= patch < rows * columns and "representative" not in meta[side]
        ]  # fmt: skip
    return write_page(
        reason,
        out,
        "why.html",
        f"why does {head_name(meta['layer'], meta['head'])} look there?",
        {"why.png": why_figure(reason)},
        said=reason.sentences(),
        numbers={name: reason.table(name).head(200) for name in ("pairs", "pieces", "effects")},
        sides={side: pieces[pieces["side"] == side].head(8) for side in ("query", "key")},
        most=float(pieces["part"].abs().max()) or 1.0,
        piece_name=piece_name,
        boxes=boxes,
        picture=data_uri(picture["webp"].iloc[0], "webp") if len(picture) else "",
        pairs=reason.table().query("query_atom >= 0 and key_atom >= 0").head(10),
        curves=inline_svg(why_figure(reason, title=""), reason.finding(), salt="why"),
    )  # fmt: skip
