"""Intervals and a bound, drawn one below the other, as SVG in the colours of the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from crate_interp.viz.pages.chart import ticks_of

WIDTH, _ROW, _LABELS, _EDGE = 320, 20, 78, 10


@dataclass(frozen=True)
class Interval:
    """A value with its interval, and the untrained networks' values; NaN if there are none."""

    label: str
    value: float
    low: float
    high: float
    untrained: float = math.nan


def intervals(
    rows: Sequence[Interval], low: float | None, high: float | None, alt: str
) -> dict[str, object]:
    """Returns the data for the template intervals.svg; the bounds are a shaded part of the axis.

    low, high: the bounds, None where there is none. A row without a value stays empty.
    """
    ends = [low, high, *(x for row in rows for x in (row.value, row.low, row.high, row.untrained))]
    known = [x for x in ends if x is not None and math.isfinite(x)] or [0.0, 1.0]
    least, most, ticks, words = ticks_of(known)
    start, stop = _LABELS, WIDTH - _EDGE

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
        "size": (WIDTH, bottom + 18),
        "bottom": bottom,
        "inside": (start if low is None else x(low), stop if high is None else x(high)),
        "edges": [x(bound) for bound in (low, high) if bound is not None],
        "rows": drawn,
        "ticks": [(x(tick), word) for tick, word in zip(ticks, words, strict=True)],
    }
