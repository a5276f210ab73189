"""The page of a comparison: the difference in each statistic, next to untrained networks."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from crate_interp.comparisons.result import (
    Comparison,
    largest,
    list_of_largest,
    place,
    sentences,
    sign,
    signed,
    span,
)
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import cell
from crate_interp.probes.built_in import heading, statistic
from crate_interp.results.grouped_samples import counted
from crate_interp.results.verdict_strip import MINUS, Row, Sign, sign_of
from crate_interp.stats.significance import LEVEL
from crate_interp.viz.figures.compared_curves import Compared, compared
from crate_interp.viz.pages.chart import Line, chart
from crate_interp.viz.pages.page import fingerprints, render

_HERO = 3  # how many statistics have curves at the top of the page


def compare_page(result: Comparison, out: str | Path) -> Path:
    """Writes compare.html, differences.csv and the result (Comparison.save) into a folder.

    Returns the path of the page. Raises ValueError if the folder cannot be written, or another
    process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        write_text(stage / "differences.csv", result.table().map(cell).to_csv(index=False))
        write_text(stage / "compare.html", _page(result))
    return Path(out) / "compare.html"


def _page(result: Comparison) -> str:
    every = {name: compared(result, name) for name in result.meta["statistics"]}
    chosen = [f"{row['probe']}.{row['statistic']}" for row in largest(result, _HERO)]
    layers = sorted({int(layer) for one in every.values() for layer in one.layers})
    twins = [len(result.meta[side]["untrained"]) for side in "ab"]
    sections, depth = _sections(result, every, layers), int(result.meta["a"]["n_layers"])
    finding, *beside = sentences(result)

    def named(name: str) -> str:
        return statistic(result.meta, name).title

    return render(
        "compare.html",
        title=result.meta["model"],
        meta=result.meta,
        single=result.single,
        finding=finding,
        beside=" ".join(beside),
        largest=list_of_largest(result, named, _HERO),
        caution=result.caution(),
        names=[result.meta[side]["name"] for side in "ab"],
        networks=[_networks(result, side) for side in "ab"],
        hero=[_panel(name, every[name], result) for name in chosen or list(every)[:_HERO]],
        strips=[(one["heading"], one["rows"]) for one in sections],
        layers=["out" if layer == depth else layer for layer in layers],
        twins=min(twins),
        sections=sections,
        sources=_sources(result),
        settings=_settings(result),
    )


def _networks(result: Comparison, side: str) -> str:
    about = result.meta[side]
    words = counted(len(about["networks"]), "networks")
    random = f", {len(about['untrained'])} untrained" if about["untrained"] else ""
    return f"{words} of {counted(about['n_layers'], 'layers')}{random}"


def _panel(name: str, drawn: Compared, result: Comparison) -> dict[str, str]:
    """Returns two charts with the words around them: of both sides, and of their difference."""
    rows = drawn.rows
    lines = [
        Line(f"{kind}-untrained", rows[f"untrained_{side}"].astype(float))
        for side, kind in (("a", "first"), ("b", "second"))
    ]
    for side, kind in (("b", "second"), ("a", "first")):
        low, high = drawn.bands[side]
        band = (None, None) if np.isnan(low).all() else (low, high)
        lines.append(Line(kind, rows[side].astype(float), *band))
    ends = dict.fromkeys((0, len(drawn.layers) - 1))
    numbers = "; ".join(
        f"{place({key: rows[key][at] for key in ('layer', 'layer_b')})}: {rows['a'][at]:.4g} and "
        f"{rows['b'][at]:.4g}"
        for at in ends
    )
    known = not np.isnan(rows["low"]).all()
    band = (rows["low"].astype(float), rows["high"].astype(float)) if known else (None, None)
    gap = [
        Line("chance", np.zeros(len(drawn.layers))),
        Line("gap-untrained", rows["untrained"].astype(float)),
        Line("gap", rows["difference"].astype(float), *band),
    ]
    record = statistic(result.meta, name)
    words, unit = record.title, record.unit
    return {
        "title": words,
        "way": record.direction,
        "curves": render("chart.svg", **chart(drawn.layers, lines, f"{words}: {numbers}.")),
        "gap": render("chart.svg", **chart(drawn.layers, gap, f"{words}: the difference a - b.")),
        "numbers": f"{numbers}{f' ({unit})' if unit else ''}",
        "name": name,
    }


def _sections(
    result: Comparison, every: dict[str, Compared], layers: list[int]
) -> list[dict[str, Any]]:
    """Returns a section for each probe: for each statistic, a row of signs and a table."""
    sections: dict[str, dict[str, Any]] = {}
    for name, drawn in every.items():
        probe = name.partition(".")[0]
        words = heading(result.meta, probe)
        new = {"id": f"section-{len(sections)}", "heading": words, "rows": [], "tables": []}
        own = sections.setdefault(probe, new)
        record = statistic(result.meta, name)
        own["rows"].append(_row(record.title, drawn, layers))
        about = ["mean over heads"] * (name in result.meta["heads_averaged"])
        about += ["of the weights"] * (name in result.meta["of_weights"])
        words = ", ".join([*filter(None, [record.unit]), *about])
        own["tables"].append((record.title, words, _table(drawn)))
    return list(sections.values())


def _row(title: str, drawn: Compared, layers: list[int]) -> Row:
    at = {int(layer): place for place, layer in enumerate(drawn.layers)}
    signs = [
        _sign({key: values[at[layer]] for key, values in drawn.rows.items()})
        if layer in at
        else sign_of(None, f"layer {layer}: not compared")
        for layer in layers
    ]
    ranges = [span(drawn.rows[key].astype(float)) for key in ("difference", "untrained", "excess")]
    return Row(title, signs, [words for words in ranges if words])


def _sign(row: dict[str, Any]) -> Sign:
    """Returns the sign of one layer: plus if a is higher, minus if a is lower, else undecided.

    The sign has its numbers as words. It has a ring if untrained networks may differ as much.
    """
    way = sign(row)
    words = f"{place(row)}: a {MINUS} b is {signed(row['difference'])}{_ends(row, 'low', 'high')}"
    if not math.isnan(row["untrained"]):
        ends = _ends(row, "excess_low", "excess_high")
        words += f", untrained {signed(row['untrained'])}"
        words += f", beyond untrained {signed(row['excess'])}{ends}"
    if not way:
        return sign_of(way, f"{words}: {'without an interval' if way is None else 'undecided'}")
    return sign_of(way, words, bool(row["excess_p"] > LEVEL))  # False for NaN


def _ends(row: dict[str, Any], low: str, high: str) -> str:
    return "" if math.isnan(row[low]) else f" ({signed(row[low])} to {signed(row[high])})"


def _table(drawn: Compared) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of a statistic's table, with a row for each layer."""
    header = ["layer", "a", "b", f"a {MINUS} b", "95 % interval", "p", "holds", "untrained"]
    header += ["beyond untrained", "95 % interval", "p"]
    rows = []
    for at in range(len(drawn.layers)):
        row = {key: values[at] for key, values in drawn.rows.items()}
        gap, beyond = (
            _ends(row, f"{kind}low", f"{kind}high").strip(" ()") or "-" for kind in ("", "excess_")
        )
        holds = "-" if math.isnan(row["p"]) else "yes" if row["holds"] else "no"
        means = [_number(row[key], "") for key in "ab"]
        cells = [*means, _number(row["difference"]), gap, _p(row["p"]), holds]
        cells += [_number(row["untrained"]), _number(row["excess"]), beyond, _p(row["excess_p"])]
        rows.append([place(row).partition(" ")[2], *cells])
    return header, rows


def _number(value: float, plus: str = "+") -> str:
    return "-" if math.isnan(value) else "0" if value == 0 else f"{value:{plus}.4g}"


def _p(value: float) -> str:
    return "-" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _settings(result: Comparison) -> list[tuple[str, str]]:
    """Returns the settings of each probe, and the differences between the sides."""
    pairs = [
        (probe, ", ".join(f"{key} = {value}" for key, value in facts["settings"].items()) or "none")
        for probe, facts in result.meta["probes"].items()
    ]
    pairs += [(f"{name}, differing", words) for name, words in result.meta["noted"].items()]
    depths = [result.meta[side]["n_layers"] for side in "ab"]
    if depths[0] != depths[1]:
        words = ", ".join(f"{own} with {other}" for own, other in result.meta["layers"])
        pairs.append(("layers, a with b", words))
    return pairs


def _sources(result: Comparison) -> list[tuple[str, str]]:
    meta = result.meta
    pairs = []
    for side in "ab":
        about = meta[side]
        pairs.append((f"{side}: {about['name']}", ", ".join(about["networks"])))
        pairs.append((f"{side}, untrained", ", ".join(about["untrained"]) or "none"))
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        pairs.append((f"{side}, versions", versions))
    pairs += [("data", fingerprints(meta)), ("dtype, device", f"{meta['dtype']}, {meta['device']}")]
    return [*pairs, *([("seconds", f"{meta['seconds']:g}")] if "seconds" in meta else [])]
