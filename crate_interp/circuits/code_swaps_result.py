"""Concentration: how much of the difference of two answers a few nodes of a code carry."""

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from crate_interp.results.result import Result, by, first
from crate_interp.stats.contrasts import Difference, Spread, against_networks, contrast, paired
from crate_interp.stats.intervals import holm, linearised_ratio
from crate_interp.stats.verdicts import BROKEN, KEPT, NOT_APPLICABLE, UNDECIDED, of_difference

NATIVE, PCA, ROTATED = "native", "pca", "rotated"
OTHERS = (PCA, ROTATED)


# values per pair by basis, each with the mean as its share; and the mean in each random rotation
Shares = tuple[dict[str, Float[np.ndarray, "_pair row"]], Float[np.ndarray, "_rotation row"]]


def _shares_of(result: Result, pairs: pd.DataFrame, swaps: pd.DataFrame, carried: bool) -> Shares:
    """Returns what nodes move of the gaps of one network, or carry."""
    wide: Any = swaps.pivot(index="sample", columns=["basis", "layer", "k"], values="moved")
    gaps = pairs.set_index("sample").loc[wide.index]
    whole = (gaps["gap"] - gaps["donor_gap"]).to_numpy(float)[:, None]
    below, names = np.abs(whole), list(wide.columns.unique("basis"))
    above = {name: np.sign(whole) * wide[name].to_numpy(float) for name in names}
    if carried:  # what is left of the gap counts, on this side of the donor's answer or beyond
        above = {name: below - np.abs(below - moved) for name, moved in above.items()}
    drawn = [above[name] for name in names if name.startswith(ROTATED)]
    above[ROTATED] = np.mean(drawn, axis=0)
    values = {
        name: result.by_group(linearised_ratio(above[name], below), wide.index)
        for name in (NATIVE, *OTHERS)
    }
    return values, np.stack([linearised_ratio(one, below).mean(axis=0) for one in drawn])


def _measured(result: Result) -> tuple[Shares, Shares, list[Shares], pd.DataFrame]:
    """Returns what the model moves and carries, what each copy moves, and layer and k of rows."""
    own: Any = result.table("pairs"), result.table("swaps")
    pairs, swaps = result.table("untrained_pairs"), result.table("untrained_swaps")
    twins = [
        _shares_of(result, pairs[pairs["seed"] == seed], swaps[swaps["seed"] == seed], False)  # pyright: ignore
        for seed in sorted(set(swaps["seed"]))
    ]
    places = own[1][own[1]["basis"] == NATIVE][["layer", "k"]].drop_duplicates()
    places = places.sort_values(["layer", "k"], ignore_index=True)
    moved, carried = (_shares_of(result, own[0], own[1], one) for one in (False, True))
    return moved, carried, twins, places


def _native_less(shares: Shares, basis: str, logs: bool = False) -> Difference:
    """Returns the native mean minus that in another basis, over pairs and rotations.

    logs: of the logarithms of means, by the delta method; NaN if a mean is not above 0.
    """
    values, rotations = shares
    parts = [values[NATIVE], values[basis]]
    if logs:
        means = [np.where(part.mean(axis=0) > 0, part.mean(axis=0), np.nan) for part in parts]
        pairs = zip(parts, means, strict=True)
        parts = [np.log(mean) + (part - part.mean(axis=0)) / mean for part, mean in pairs]
        rotations = np.log(np.where(rotations > 0, rotations, np.nan))
    difference = parts[0] - parts[1]
    spreads = [Spread(difference, 1 / len(difference))]
    if basis == ROTATED:
        spreads.append(Spread(rotations, 1 / len(rotations)))
    return contrast(difference.mean(axis=0), spreads)


def _shares(result: Result) -> pd.DataFrame:
    (own, _), (carried, _), twins, places = _measured(result)
    rows, n = [], result.table("swaps")["sample"].nunique()
    for basis, values in own.items():
        found, near = paired(values), paired(carried[basis])
        random = [twin[basis].mean(axis=0) for twin, _ in twins]
        untrained = np.mean(random, axis=0) if random else np.full(len(places), np.nan)
        columns = {"carried": near.value, "carried_low": near.low, "carried_high": near.high}
        columns |= {"share": found.value, "low": found.low, "high": found.high}
        here = places.assign(basis=basis)[["layer", "basis", "k"]]
        rows.append(here.assign(**columns, n=n, untrained=untrained))
    return pd.concat(rows).sort_values(["layer", "k"], kind="stable", ignore_index=True)


def _contrasts(result: Result) -> pd.DataFrame:
    (own, carried, twins, places), rows = _measured(result), []
    for basis in OTHERS:
        found, times = _native_less(carried, basis), _native_less(own, basis, logs=True)
        random = np.array([_native_less(twin, basis, logs=True).value for twin in twins])
        random = random.reshape(len(twins), len(places))
        learned = against_networks(times.value, times.error, random, float(len(own[0][basis])))
        untrained = random.mean(axis=0) if twins else np.full(len(places), np.nan)
        columns = {"difference": found.value, "low": found.low, "high": found.high}
        columns |= {"p": holm(found.p), "ratio": np.exp(times.value)}
        columns |= {"untrained": np.exp(untrained), "learned": np.exp(learned.value)}
        ends = {"learned_low": np.exp(learned.low), "learned_high": np.exp(learned.high)}
        here = places.assign(versus=basis)[["layer", "versus", "k"]]
        rows.append(here.assign(**columns, **ends, learned_p=holm(learned.p)))
    return pd.concat(rows).sort_values(["layer", "k"], kind="stable", ignore_index=True)


_OF_PAIRS = {"pairs": by("sample"), "swaps": by("sample")}


class Concentration(Result):
    """How much of the difference of two answers a few nodes of each layer's code carry.

    `table()` has a row per layer, basis ("native", "pca", "rotated") and k: carried and share, each
    with its 95 % interval over pairs (carried_low, carried_high, low, high), n (pairs) and
    untrained, the mean share of the untrained copies. `ci.circuits.concentration` defines carried
    and share. `table("contrasts")` has a row per layer, other basis (versus) and k. difference:
    what native axes carry minus what the other axes carry, over the same pairs. low, high, p: its
    95 % interval and p over pairs and, for rotated axes, over rotations; p is adjusted over all
    layers and k (Holm). ratio: the native share divided by the other share. untrained: this ratio
    in the untrained copies (geometric mean). learned: ratio / untrained, with learned_low,
    learned_high and learned_p over pairs and copies; above 1, training has concentrated what moves
    the gap. Copies are compared by this ratio of shares, because their answers hardly differ: in
    every basis the best nodes move the gap several times as far as the whole donor does, so no
    basis carries it.

    Stored tables: `pairs` (sample, donor, answer, donor_answer, gap, donor_gap), `swaps` (sample,
    layer, basis, k, moved: gap - gap of the swapped run), both also for the untrained copies
    (`untrained_pairs`, `untrained_swaps`), and `points` (layer, tokens, width, pca_tokens).
    """

    KIND = "concentration"
    MAIN = "shares"
    OF_A_NETWORK = _OF_PAIRS | {"points": first}
    STORED = OF_A_NETWORK | {f"untrained_{name}": rule for name, rule in _OF_PAIRS.items()}
    DERIVED = {"shares": _shares, "contrasts": _contrasts}
    ALONE = (
        "donors and principal axes come from all samples: run ci.circuits.concentration on all "
        "samples at once."
    )
    INTERVALS = True

    @property
    def middle(self) -> int:
        """Returns the middle of the numbers of swapped nodes; the headline is about this number."""
        counts = self.meta["settings"]["k"]
        return int(counts[(len(counts) - 1) // 2])

    def text(self) -> str:
        """Returns a row per layer and k: what bases carry, and native against rotated axes."""
        rows = ["layer", "k"]
        shares: Any = self._table("shares").pivot(index=rows, columns="basis", values="carried")
        table: Any = self._table("contrasts")
        against = table[table["versus"] == ROTATED].drop(columns="versus").set_index(rows)
        both = pd.concat([shares[[NATIVE, PCA, ROTATED]], against], axis=1).reset_index()
        return both.to_string(index=False, float_format="{:.3g}".format)

    def legend(self) -> str:
        """Returns the meaning of the columns of both tables."""
        tokens, settings = self._table("points")["pca_tokens"].max(), self.meta["settings"]
        return (
            "share: how much of the gap of logits between the two answers of a pair moves if k "
            "nodes (token, coordinate) take the donor's values, a ratio of sums over n pairs. "
            "carried: 1 minus the share of the gap that is left, short of the donor or beyond; 1 "
            "is best.\n"
            "basis: native are the axes of the code itself, pca the principal axes of the layer's "
            f"tokens (fitted on {tokens:,} tokens), rotated the mean of {settings['rotations']} "
            "random rotations. untrained: the mean share of networks with random weights.\n"
            "difference: what native axes carry minus what versus carries, on the same pairs. low "
            "to high: 95 % intervals over pairs and, for rotated axes, rotations. p: of no "
            "difference, adjusted for all layers and k (Holm). ratio: the share of native axes "
            "over the share of versus. untrained: this ratio in networks with random weights. "
            "learned: ratio / untrained, with an interval and p over pairs and networks."
        )

    def sentences(self) -> list[str]:
        """Returns what a few nodes carry, what random axes do, and what training changed."""
        shares, table = self.table("shares"), self.table("contrasts")
        shares, table = shares[shares["k"] == self.middle], table[table["k"] == self.middle]
        carried: Any = shares.groupby("basis")["carried"].agg(["min", "max"]) * 100
        own, random, principal = (
            "{:.0f}\u00a0% to {:.0f}\u00a0%".format(*carried.loc[basis])
            for basis in (NATIVE, ROTATED, PCA)
        )

        def verdicts(versus: str, column: str, p: str) -> Counter[str]:
            rows: Any = table[table["versus"] == versus]
            values = rows[column] - (column == "learned")  # a ratio
            return Counter(of_difference(*pair) for pair in zip(values, rows[p], strict=True))

        def in_words(counts: Counter[str]) -> str:
            ways = {KEPT: "less", BROKEN: "more", UNDECIDED: "we can't tell"}
            parts = [f"{way} in {counts[word]}" for word, way in ways.items() if counts[word]]
            return f"{', '.join(parts)} of {counts.total()} layers" if parts else "not tested"

        axes, lead = verdicts(PCA, "difference", "p"), "may too"
        if axes[KEPT] != axes[BROKEN]:
            way = "more" if axes[BROKEN] > axes[KEPT] else "less"
            lead = f"{way} in {max(axes[BROKEN], axes[KEPT])}"
        points, learned = self._table("points"), verdicts(ROTATED, "learned", "learned_p")
        trained = "Whether training has concentrated the gap is not tested."
        if learned[NOT_APPLICABLE] < learned.total():
            trained = f"Training has concentrated the gap in {learned[KEPT]} of {learned.total()} "
            trained += f"layers, compared with {self.meta['untrained']} untrained networks."
        size = (points["tokens"] * points["width"]).max()
        return [
            f"Swapping {self.middle} of {size:,} code entries "
            f"moves the answer {own} towards the donor's; principal axes {lead}.",
            f"Random axes move it {random}: {in_words(verdicts(ROTATED, 'difference', 'p'))}. "
            f"Principal axes move it {principal}: {in_words(axes)}.",
            f"Measured on {self.counted_samples()} in {self.meta['model'] or 'the model'}.",
            trained,
        ]

    def _notebook_table(self) -> pd.DataFrame:
        table: Any = self._table("shares")
        return table[table["k"] == self.middle]
