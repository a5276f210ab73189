"""A small chart by layer as SVG, for the many charts on a page.

Its colours and fonts are those of the page, so that it is legible in a light and a dark scheme and
at any width. Trained is a solid line, untrained a dashed one, chance a dotted one. The figures of
crate_interp/viz/figures/by_layer.py are for papers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from jaxtyping import Float

WIDTH, HEIGHT = 300, 184
_TOP, _BOTTOM, _LETTER = 10, 22, 6.6  # room above and below a chart; the width of a digit
_APART = 13  # least distance between the numbers at the ends of lines

Place = Callable[[float], float]
_DRAWN, _ROW, _LABELS, _EDGE = 320, 20, 78, 10  # intervals: width, row height, left and right room


@dataclass(frozen=True)
class Line:
    """A line of a chart, one value for each layer.

    kind: "trained", "untrained", "chance" or "head"; a "head" is thin and has no number at its end.
    Charts of a comparison have the kinds "first", "second" and "gap". The lines of their untrained
    networks, such as "first-untrained", have no numbers either. low, high: the ends of the band
    around the line, None without a band.
    """

    kind: str
    values: Float[np.ndarray, "layer"]
    low: Float[np.ndarray, "layer"] | None = None
    high: Float[np.ndarray, "layer"] | None = None


def chart(layers: Float[np.ndarray, "layer"], lines: Sequence[Line], alt: str) -> dict[str, object]:
    """Returns the data for the template chart.svg: lines with end numbers, bands and ticks.

    alt: what the chart shows, in words. Values that are NaN leave a gap.
    """
    shown = [line for line in lines if np.isfinite(line.values).any()]
    parts = [part for line in shown for part in (line.values, line.low, line.high)]
    every = np.concatenate([part for part in parts if part is not None] or [np.zeros(1)])
    low, high, ticks = ticks_of(every[np.isfinite(every)].tolist())
    left = max(34.0, 8 + _LETTER * max(len(word) for _, word in ticks))  # or the word "layer"
    ends = [
        (line.kind, float(line.values[np.isfinite(line.values)][-1]))
        for line in shown
        if line.kind != "head" and not line.kind.endswith("-untrained")
    ]
    right = 12 + _LETTER * max((len(_short(value)) for _, value in ends), default=0)
    span = max(float(layers[-1] - layers[0]), 1.0)

    def x(layer: float) -> float:
        return round(left + 6 + (layer - layers[0]) / span * (WIDTH - left - right - 6), 1)

    def y(value: float) -> float:
        share = (float(value) - low) / (high - low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _BOTTOM - _TOP), 1)

    every_nth = next((step for step in (1, 2, 4, 8) if len(layers) <= 8 * step), 16)
    return {
        "alt": alt,
        "size": (WIDTH, HEIGHT),
        "frame": (left, x(float(layers[-1]))),
        "rows": [(y(tick), word) for tick, word in ticks],
        "columns": [(x(layer), f"{layer:g}") for layer in layers[::every_nth].tolist()],
        "bands": [(line.kind, _band(line, layers, x, y)) for line in shown if line.low is not None],
        "lines": [(line.kind, list(_pieces(line.values, layers, x, y))) for line in shown],
        "dots": [
            (x(layer), y(value))
            for line in shown
            for layer, value in zip(layers.tolist(), line.values.tolist(), strict=True)
            if line.kind == "trained" and math.isfinite(value)
        ],
        "ends": _spread([(kind, y(value), _short(value)) for kind, value in ends]),
    }


def ticks_of(values: Sequence[float]) -> tuple[float, float, list[tuple[float, str]]]:
    """Returns the ends of an axis, a little beyond the values, and two to five round ticks.

    A tick is a number and its text.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = 0.05 * (high - low)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        room = 0.05 * abs(low) or 1.0
    low, high = low - room, high + room
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [step * place for place in range(first, last + 1)]
    return low, high, list(zip(ticks, _worded(ticks), strict=True))


def _worded(ticks: Sequence[float]) -> list[str]:
    """Returns the numbers at the ticks as texts, with enough digits to distinguish them."""
    for digits in range(1, 12):
        words = [f"{0.0 if abs(tick) < 1e-300 else tick:.{digits}g}" for tick in ticks]
        error = np.abs(np.array(words, dtype=float) - ticks)
        if (error <= 1e-9 * np.maximum(np.abs(ticks), ticks[-1] - ticks[0])).all():
            return [f"{float(word):g}" if "e" in word else word for word in words]
    return [f"{tick:.4g}" for tick in ticks]


def _short(value: float) -> str:
    """Returns a number with three digits, or all digits of a large one."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _pieces(values: np.ndarray, layers: np.ndarray, x: Place, y: Place) -> Iterator[str]:
    """Yields the points of a line, piece by piece: the line breaks where values are missing."""
    places = zip(layers.tolist(), values.tolist(), strict=True)
    for known, part in groupby(places, lambda place: math.isfinite(place[1])):
        if known:
            yield " ".join(f"{x(layer)},{y(value)}" for layer, value in part)


def _band(line: Line, layers: np.ndarray, x: Place, y: Place) -> str:
    """Returns the outline of a band: its upper ends, then its lower ends backwards."""
    low, high = np.asarray(line.low), np.asarray(line.high)
    there = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
    outline = [*((at, high) for at in there), *((at, low) for at in there[::-1])]
    points: Any = ((layers[at], side[at]) for at, side in outline)
    return " ".join(f"{x(layer)},{y(value)}" for layer, value in points)


def _spread(ends: list[tuple[str, float, str]]) -> list[tuple[str, float, str]]:
    """Returns the numbers at the ends of lines, moved apart if they would overlap."""
    placed: list[tuple[str, float, str]] = []
    for kind, height, label in sorted(ends, key=lambda end: end[1]):
        above = placed[-1][1] + _APART if placed else _TOP
        placed.append((kind, max(height, above), label))
    over = max(0.0, placed[-1][1] - (HEIGHT - _BOTTOM)) if placed else 0.0
    return [(kind, round(height - over + 4, 1), label) for kind, height, label in placed]


@dataclass(frozen=True)
class Interval:
    """A value with its interval. untrained: the value of untrained networks, NaN if unknown."""

    label: str
    value: float
    low: float
    high: float
    untrained: float = math.nan


def intervals(
    rows: Sequence[Interval], low: float | None, high: float | None, alt: str
) -> dict[str, object]:
    """Returns the data for the template intervals.svg, which shades the axis between the bounds.

    low, high: the bounds; None means no bound on this side. A row without a value stays empty.
    """
    ends = [low, high, *(x for row in rows for x in (row.value, row.low, row.high, row.untrained))]
    known = [x for x in ends if x is not None and math.isfinite(x)] or [0.0, 1.0]
    least, most, ticks = ticks_of(known)
    start, stop = _LABELS, _DRAWN - _EDGE

    def x(value: float) -> float | None:
        share = (value - least) / (most - least)
        place = round(start + max(0.0, min(1.0, share)) * (stop - start), 1)
        return place if math.isfinite(value) else None

    drawn = [
        {
            "label": row.label,
            "y": place * _ROW + 14,
            "at": x(row.value),
            "ends": [x(end if math.isfinite(end) else row.value) for end in (row.low, row.high)],
            "untrained": x(row.untrained),
        }
        for place, row in enumerate(rows)
    ]
    bottom = len(rows) * _ROW + 6
    return {
        "alt": alt,
        "size": (_DRAWN, bottom + 18),
        "bottom": bottom,
        "inside": (start if low is None else x(low), stop if high is None else x(high)),
        "edges": [x(bound) for bound in (low, high) if bound is not None],
        "rows": drawn,
        "ticks": [(x(tick), word) for tick, word in ticks],
    }
