"""Verdicts on each property: does training bring it to CRATE, to the ViT, to both or to neither?

A network is the unit: 5 seeds of each kind, each beside the untrained network that it started from.
What training brings is trained minus untrained, seed by seed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from crate_interp.stats.contrasts import Spread, contrast
from crate_interp.stats.intervals import LEVEL, holm

Values = Sequence[float] | np.ndarray


class Property(NamedTuple):
    """A property that CRATE's design claims.

    source: "probe.statistic", or "segmentation.NAME". way: -1 if the design wants it low, else 1.
    chance: what it is without any effect, or "". subspaces: of the ViT.
    """

    name: str
    source: str
    way: int
    unit: str
    chance: str = ""
    subspaces: str = "value"


READ, OVERLAP = "compression_read.change", "alignment.head_overlap"
RATE, COSINE, MASKS = "share of R^c", "squared cosine", "Jaccard less next image's"
PROPERTIES = (
    Property("compression as read (U; values)", READ, -1, RATE, "0"),
    Property("compression as read (U; keys)", READ, -1, RATE, "0", "key"),
    Property("compression beyond shuffled updates", "compression_read.beyond", -1, RATE, "0"),
    Property("compression of the stream (U; values)", "compression_stream.change", -1, RATE, "0"),
    Property("sparsity of the code", "sparsity.hoyer", 1, "Hoyer's"),
    Property("overlap of heads (U; values)", OVERLAP, -1, COSINE, "0.25"),
    Property("overlap of heads (U; keys)", OVERLAP, -1, COSINE, "0.25", "key"),
    Property("segmentation, fixed head", "segmentation.fixed", 1, MASKS, "0"),
    Property("segmentation, best head an image", "segmentation.best", 1, MASKS, "0"),
    Property("entropy of attention", "evenness.entropy", -1, "share of even attention's", "1"),
    Property("effective rank of the output", "filled.stream", 1, "share of the largest"),
    Property("stable rank of subspaces (U; values)", "filled.subspace", 1, "share of d_head"),
)


class Interval(NamedTuple):
    """A value with its 95 % interval and two-sided p."""

    value: float
    low: float
    high: float
    p: float


class Row(NamedTuple):
    """A property with the means of both kinds, what training brings, and the verdict.

    trained, untrained: means, (CRATE, ViT). difference: trained CRATE less trained ViT.
    gains: trained less untrained, (CRATE, ViT). excess: the first gain less the second, its p
    adjusted over the properties. holds: whether that p is at most 5 %.
    """

    property: Property
    trained: tuple[float, float]
    untrained: tuple[float, float]
    difference: Interval
    gains: tuple[Interval, Interval]
    excess: Interval
    holds: bool
    verdict: str


def mean_interval(values: Values) -> Interval:
    """Returns the mean with Student's interval; a single value has none."""
    x = np.asarray(values, dtype=float)
    return _interval(x.mean(), [x])


def welch(a: Values, b: Values) -> Interval:
    """Returns the difference of two means with Welch's interval over networks."""
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    return _interval(x.mean() - y.mean(), [x, y])


def _interval(value: float, groups: Sequence[np.ndarray]) -> Interval:
    """Returns a contrast of means with its interval, by Welch's and Satterthwaite's freedom.

    Groups that do not vary are certain: the interval is the value.
    """
    spreads = [Spread(group[:, None], 1 / len(group)) for group in groups]
    found = contrast(np.array([value]), spreads)
    return Interval(*(float(one[0]) for one in (found.value, found.low, found.high, found.p)))


def values_of(table: pd.DataFrame, asked: Property, kind: str, trained: bool) -> np.ndarray:
    """Returns one number for each seed, in their order.

    table: a row per kind, subspaces, seed, trained and source, with a value.
    """
    subspaces = asked.subspaces if kind == "vit" and not asked.source.startswith("seg") else ""
    rows: Any = table[
        (table["source"] == asked.source)
        & (table["kind"] == kind)
        & (table["trained"] == trained)
        & (table["subspaces"] == subspaces)
    ]
    return rows.sort_values("seed")["value"].to_numpy(dtype=float)


def towards(interval: Interval, way: int) -> bool:
    """Returns whether a whole interval lies on the side that the design wants."""
    return (interval.low if way > 0 else -interval.high) > 0


def verdict(way: int, gains: tuple[Interval, Interval], excess: Interval, holds: bool) -> str:
    """Returns to which kind a property belongs, from what training brings to each.

    "neither": it brings it to none. Else to the kind that it is brought to, or "both"; of both,
    "more to CRATE" or "more to the ViT" if the two gains differ. "both" does not say that they are
    equal, which would need a margin. "undecided": it is brought to one alone, and the two gains are
    not told apart.
    """
    crate, vit = (towards(gain, way) for gain in gains)
    more = holds and way * excess.value > 0
    less = holds and way * excess.value < 0
    if not crate and not vit:
        return "neither"
    if crate and vit:
        return "more to CRATE" if more else "more to the ViT" if less else "both"
    if crate:
        return "CRATE" if more else "undecided"
    return "the ViT" if less else "undecided"


def judged(table: pd.DataFrame, properties: Sequence[Property] = PROPERTIES) -> list[Row]:
    """Returns a row for each property; table: as `values_of` takes it."""
    kinds, owns = ("crate", "vit"), []
    for asked in properties:
        of = {(kind, trained): values_of(table, asked, kind, trained)
              for kind in kinds for trained in (True, False)}  # fmt: skip
        owns.append((of, *(of[kind, True] - of[kind, False] for kind in kinds)))
    excesses = [welch(crate, vit) for _, crate, vit in owns]
    adjusted = holm(np.array([excess.p for excess in excesses])).tolist()
    rows = []
    for asked, (of, *gained), excess, p in zip(properties, owns, excesses, adjusted, strict=True):
        gains = (mean_interval(gained[0]), mean_interval(gained[1]))
        beyond, holds = excess._replace(p=p), bool(p <= LEVEL)
        trained, untrained = (
            (float(of["crate", state].mean()), float(of["vit", state].mean()))
            for state in (True, False)
        )
        difference = welch(of["crate", True], of["vit", True])
        whose = verdict(asked.way, gains, beyond, holds)
        rows.append(Row(asked, trained, untrained, difference, gains, beyond, holds, whose))
    return rows


BROUGHT = {
    "CRATE": "to CRATE alone",
    "more to CRATE": "to both but more to CRATE",
    "both": "to both, by gains that are not told apart",
    "more to the ViT": "to both but more to the ViT",
    "the ViT": "to the ViT alone",
    "undecided": "to one of them, by no more than to the other within the error",
    "neither": "to neither",
}


def finding(rows: Sequence[Row], seeds: int) -> str:
    """Returns the finding in two sentences: what training brings to whom, and where they stand."""
    groups = {
        whose: [row.property.name for row in rows if row.verdict == whose] for whose in BROUGHT
    }
    said = [f"{BROUGHT[whose]}: {'; '.join(names)}" for whose, names in groups.items() if names]
    ahead = [row for row in rows if towards(row.difference, row.property.way)]
    behind = [row for row in rows if towards(row.difference, -row.property.way)]
    own = [row for row in rows if row.verdict in ("CRATE", "more to CRATE")]
    return (
        f"Of {len(rows)} numbers that CRATE's design wants low or high, training {seeds} seeds of "
        f"each brings what it wants {' | '.join(said)}. "
        f"So training brings {len(own)} of {len(rows)} to CRATE more than to the ViT; as trained, "
        f"CRATE is ahead of it in {len(ahead)} and behind it in {len(behind)}."
    )
