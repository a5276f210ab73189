"""The page of a comparison: the difference in each statistic, next to untrained networks."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from crate_interp.comparisons import result as comparisons
from crate_interp.comparisons.result import Comparison, place, sign, signed, span
from crate_interp.core.files import write_text
from crate_interp.core.safe_text import cell
from crate_interp.probes.built_in import heading, statistic
from crate_interp.results.statistic import MINUS, Row, Sign, sign_of
from crate_interp.stats.intervals import LEVEL
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
    meta = result.meta
    every = {name: compared(result, name) for name in meta["statistics"]}
    largest = [f"{row['probe']}.{row['statistic']}" for row in comparisons.largest(result, _HERO)]
    layers = sorted({int(layer) for one in every.values() for layer in one.layers})
    finding, *beside = comparisons.sentences(result)

    def named(name: str) -> str:
        return statistic(meta, name).title

    return render(
        "compare.html",
        title=meta["model"],
        meta=meta,
        result=result,
        finding=finding,
        beside=" ".join(beside),
        largest=comparisons.list_of_largest(result, named, _HERO),
        hero=[_panel(name, every[name], result) for name in largest or list(every)[:_HERO]],
        layers=["out" if layer == meta["a"]["n_layers"] else layer for layer in layers],
        twins=min(len(meta[side]["untrained"]) for side in "ab"),
        sections=_sections(result, every, layers),
        sources=_sources(meta),
        settings=_settings(meta),
    )


def _panel(name: str, drawn: Compared, result: Comparison) -> dict[str, str]:
    """Returns two charts with the words around them: of both sides, and of their difference."""
    rows = drawn.rows
    numbers = "; ".join(
        f"{place({key: rows[key][at] for key in ('layer', 'layer_b')})}: {rows['a'][at]:.4g} and "
        f"{rows['b'][at]:.4g}"
        for at in dict.fromkeys((0, len(drawn.layers) - 1))
    )
    lines = [_line("first-untrained", rows["untrained_a"])]
    lines += [_line("second-untrained", rows["untrained_b"])]
    lines += [_line("second", rows["b"], *drawn.bands["b"])]
    lines += [_line("first", rows["a"], *drawn.bands["a"])]
    gap = [_line("chance", np.zeros(len(drawn.layers)))]
    gap += [_line("gap-untrained", rows["untrained"])]
    gap += [_line("gap", rows["difference"], rows["low"], rows["high"])]
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


def _line(kind: str, values: Any, low: Any = None, high: Any = None) -> Line:
    """Returns a line of a chart; its band is left out if nothing varies."""
    if low is None or np.isnan(low.astype(float)).all():
        return Line(kind, values.astype(float))
    return Line(kind, *(each.astype(float) for each in (values, low, high)))


def _sections(
    result: Comparison, every: dict[str, Compared], layers: list[int]
) -> list[dict[str, Any]]:
    """Returns a section for each probe: for each statistic, a row of signs and a table."""
    sections: dict[str, dict[str, Any]] = {}
    for name, drawn in every.items():
        probe = name.partition(".")[0]
        words = heading(result.meta, probe)
        new = {"id": f"section-{len(sections)}", "heading": words, "rows": [], "tables": []}
        section = sections.setdefault(probe, new)
        record = statistic(result.meta, name)
        section["rows"].append(_row(record.title, drawn, layers))
        about = [record.unit, "mean over heads" * (name in result.meta["heads_averaged"])]
        about += ["of the weights" * (name in result.meta["of_weights"])]
        words = ", ".join(filter(None, about))
        section["tables"].append((record.title, words, _table(drawn)))
    return list(sections.values())


def _row(title: str, drawn: Compared, layers: list[int]) -> Row:
    rows = {int(row["layer"]): row for row in _records(drawn)}
    signs = [
        _sign(rows[at]) if at in rows else sign_of(None, f"layer {at}: not compared")
        for at in layers
    ]
    ranges = [span(drawn.rows[key].astype(float)) for key in ("difference", "untrained", "excess")]
    return Row(title, signs, [words for words in ranges if words])


def _records(drawn: Compared) -> list[dict[str, Any]]:
    names = list(drawn.rows)
    return [dict(zip(names, row, strict=True)) for row in zip(*drawn.rows.values(), strict=True)]


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
    for row in _records(drawn):
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


def _settings(meta: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the settings of each probe, and the differences between the sides."""
    pairs = [
        (probe, ", ".join(f"{key} = {value}" for key, value in facts["settings"].items()) or "none")
        for probe, facts in meta["probes"].items()
    ]
    pairs += [(f"{name}, differing", words) for name, words in meta["noted"].items()]
    if meta["a"]["n_layers"] != meta["b"]["n_layers"]:
        words = ", ".join(f"{own} with {other}" for own, other in meta["layers"])
        pairs.append(("layers, a with b", words))
    return pairs


def _sources(meta: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for side in "ab":
        about = meta[side]
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        pairs.append((f"{side}: {about['name']}", ", ".join(about["networks"])))
        pairs.append((f"{side}, untrained", ", ".join(about["untrained"]) or "none"))
        pairs.append((f"{side}, versions", versions))
    pairs += [("data", fingerprints(meta)), ("dtype, device", f"{meta['dtype']}, {meta['device']}")]
    return [*pairs, *([("seconds", f"{meta['seconds']:g}")] if "seconds" in meta else [])]
