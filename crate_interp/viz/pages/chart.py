"""A small chart by layer as SVG, for the many charts on a page.

Its colours and fonts are those of the page, so that it is legible in a light and a dark scheme and
at any width. Trained is a solid line, untrained a dashed one, chance a dotted one. The figures of
crate_interp/viz/figures/by_layer.py are for papers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

WIDTH, HEIGHT = 300, 184
_TOP, _BOTTOM, _LETTER = 10, 22, 6.6  # room above and below a chart; the width of a digit
_APART = 13  # least distance between the numbers at the ends of lines

Height = Callable[[float], float]
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
    low, high, ticks, words = ticks_of(every[np.isfinite(every)].tolist())
    left = max(34.0, 8 + _LETTER * max(map(len, words)))  # at least room for the word "layer"
    ends = [line for line in shown if line.kind != "head" and not line.kind.endswith("-untrained")]
    labels = [_short(_last(line.values)) for line in ends]
    right = 12 + _LETTER * max(map(len, labels), default=0)
    span = max(float(layers[-1] - layers[0]), 1.0)

    def x(layer: float) -> float:
        return round(left + 6 + (layer - layers[0]) / span * (WIDTH - left - right - 6), 1)

    def y(value: float) -> float:
        share = (float(value) - low) / (high - low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _BOTTOM - _TOP), 1)

    places = [x(float(layer)) for layer in layers]
    return {
        "alt": alt,
        "size": (WIDTH, HEIGHT),
        "frame": (left, x(float(layers[-1]))),
        "rows": [(y(tick), word) for tick, word in zip(ticks, words, strict=True)],
        "columns": [(x(layer), f"{layer:g}") for layer in _some(layers)],
        "bands": [(line.kind, _band(line, places, y)) for line in shown if line.low is not None],
        "lines": [(line.kind, list(_pieces(line.values, places, y))) for line in shown],
        "dots": [(places[at], y(v)) for at, v in _known(_first(shown, "trained"))],
        "ends": _spread(
            [
                (line.kind, y(_last(line.values)), label)
                for line, label in zip(ends, labels, strict=True)
            ]
        ),
    }


def ticks_of(values: Sequence[float]) -> tuple[float, float, list[float], list[str]]:
    """Returns the low and high end of an axis, its ticks, and the ticks' numbers as texts.

    The ends are a little beyond the values.
    """
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        room = 0.05 * abs(low) or 1.0
        low, high = low - room, high + room
    else:
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    ticks = _ticks(low, high)
    return low, high, ticks, _worded(ticks)


def _ticks(low: float, high: float) -> list[float]:
    """Returns two to five round numbers between the ends of an axis."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * place for place in range(first, last + 1)]


def _worded(ticks: Sequence[float]) -> list[str]:
    """Returns the numbers at the ticks as texts, with enough digits to distinguish them."""
    for digits in range(1, 12):
        words = [f"{0.0 if abs(tick) < 1e-300 else tick:.{digits}g}" for tick in ticks]
        exact = all(
            math.isclose(float(word), tick, rel_tol=1e-9, abs_tol=1e-9 * abs(ticks[-1] - ticks[0]))
            for word, tick in zip(words, ticks, strict=True)
        )
        if exact:
            return [f"{float(word):g}" if "e" in word else word for word in words]
    return [f"{tick:.4g}" for tick in ticks]


def _some(layers: np.ndarray) -> list[float]:
    """Returns the layers to number: all if they are few, else every second, fourth and so on."""
    step = next((step for step in (1, 2, 4, 8) if len(layers) <= 8 * step), 16)
    return [float(layer) for layer in layers[::step]]


def _known(line: Line | None) -> Iterator[tuple[int, float]]:
    values = () if line is None else line.values
    return ((at, float(value)) for at, value in enumerate(values) if math.isfinite(value))


def _first(lines: Sequence[Line], kind: str) -> Line | None:
    return next((line for line in lines if line.kind == kind), None)


def _last(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)][-1])


def _short(value: float) -> str:
    """Returns a number with three digits, or all digits of a large one."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _pieces(values: np.ndarray, places: Sequence[float], y: Height) -> Iterator[str]:
    """Yields the points of a line, piece by piece: the line breaks where values are missing."""
    piece: list[str] = []
    for place, value in zip(places, values, strict=True):
        if math.isfinite(value):
            piece.append(f"{place},{y(float(value))}")
        elif piece:
            yield " ".join(piece)
            piece = []
    if piece:
        yield " ".join(piece)


def _band(line: Line, places: Sequence[float], y: Height) -> str:
    assert line.low is not None and line.high is not None
    there = np.flatnonzero(np.isfinite(line.low) & np.isfinite(line.high))
    upper, lower = (
        [f"{places[at]},{y(float(side[at]))}" for at in there.tolist()]
        for side in (line.high, line.low)
    )
    return " ".join(upper + lower[::-1])


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
    least, most, ticks, words = ticks_of(known)
    start, stop = _LABELS, _DRAWN - _EDGE

    def x(value: float) -> float:
        share = (value - least) / (most - least)
        return round(start + max(0.0, min(1.0, share)) * (stop - start), 1)

    drawn: list[dict[str, object]] = []
    for place, row in enumerate(rows):
        there = math.isfinite(row.value)
        spread = [end if math.isfinite(end) else row.value for end in (row.low, row.high)]
        drawn.append(
            {
                "label": row.label,
                "y": place * _ROW + 14,
                "at": x(row.value) if there else None,
                "ends": [x(end) for end in spread] if there else None,
                "untrained": x(row.untrained) if math.isfinite(row.untrained) else None,
            }
        )
    bottom = len(rows) * _ROW + 6
    return {
        "alt": alt,
        "size": (_DRAWN, bottom + 18),
        "bottom": bottom,
        "inside": (start if low is None else x(low), stop if high is None else x(high)),
        "edges": [x(bound) for bound in (low, high) if bound is not None],
        "rows": drawn,
        "ticks": [(x(tick), word) for tick, word in zip(ticks, words, strict=True)],
    }
