"""Concentration: how much of the difference of two answers a few nodes of a code carry."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from crate_interp.results.result import Result, by, first
from crate_interp.results.sample_ranges import counted
from crate_interp.stats.contrasts import Difference, Spread, against_networks, contrast, paired
from crate_interp.stats.intervals import LEVEL, holm, linearised_ratio

NATIVE, PCA, ROTATED = "native", "pca", "rotated"
OTHERS = (PCA, ROTATED)


@dataclass(frozen=True)
class _Shares:
    """What nodes move of the gaps of one network, or carry, as values per pair with this mean.

    places: the layers and k of the rows. of: the values by basis. rotations: the mean in each
    random rotation.
    """

    places: pd.DataFrame
    of: dict[str, Float[np.ndarray, "pair row"]]
    rotations: Float[np.ndarray, "rotation row"]

    def more_than(self, basis: str) -> Difference:
        """Returns the native mean minus that in another basis, over pairs and rotations."""
        return self._against(basis, self.of[NATIVE] - self.of[basis], self.rotations)

    def times(self, basis: str) -> Difference:
        """Returns the logarithm of the native mean over that in another; NaN if one is below 0."""
        parts = []
        for values in (self.of[NATIVE], self.of[basis]):  # delta method
            mean = values.mean(axis=0)
            parts.append(_log(mean) + (values - mean) / np.where(mean > 0, mean, np.nan))
        return self._against(basis, parts[0] - parts[1], _log(self.rotations))

    def _against(self, basis: str, values: np.ndarray, rotations: np.ndarray) -> Difference:
        spreads = [Spread(values, 1 / len(values))]
        if basis == ROTATED:
            spreads.append(Spread(rotations, 1 / len(rotations)))
        return contrast(values.mean(axis=0), spreads)


def _log(values: np.ndarray) -> np.ndarray:
    return np.log(np.where(values > 0, values, np.nan))


def _shares_of(result: Result, pairs: pd.DataFrame, swaps: pd.DataFrame, carried: bool) -> _Shares:
    wide: Any = swaps.pivot(index="sample", columns=["basis", "layer", "k"], values="moved")
    gaps = pairs.set_index("sample").loc[wide.index]
    whole = (gaps["gap"] - gaps["donor_gap"]).to_numpy(float)[:, None]
    below, names = np.abs(whole), list(wide.columns.unique("basis"))
    above = {name: np.sign(whole) * wide[name].to_numpy(float) for name in names}
    if carried:  # what is left of the gap counts, on this side of the donor's answer or beyond
        above = {name: below - np.abs(below - moved) for name, moved in above.items()}
    drawn = [name for name in names if name.startswith(ROTATED)]
    above[ROTATED] = np.mean([above[name] for name in drawn], axis=0)
    values = {
        name: result.by_group(linearised_ratio(above[name], below), wide.index)
        for name in (NATIVE, *OTHERS)
    }
    means = [linearised_ratio(above[name], below).mean(axis=0) for name in drawn]
    places = pd.DataFrame(wide[NATIVE].columns.tolist(), columns=["layer", "k"])
    return _Shares(places, values, np.stack(means))


def _measured(result: Result) -> tuple[_Shares, _Shares, list[_Shares]]:
    """Returns what the model moves and carries, and what each untrained twin moves."""
    own = result.table("pairs"), result.table("swaps")
    pairs, swaps = result.table("untrained_pairs"), result.table("untrained_swaps")
    twins = [
        _shares_of(result, pairs[pairs["seed"] == seed], swaps[swaps["seed"] == seed], False)  # pyright: ignore
        for seed in sorted(set(swaps["seed"]))
    ]
    return _shares_of(result, *own, False), _shares_of(result, *own, True), twins


def _shares(result: Result) -> pd.DataFrame:
    (own, carried, twins), rows = _measured(result), []
    n = result.table("swaps")["sample"].nunique()
    for basis, values in own.of.items():
        found, near = paired(values), paired(carried.of[basis])
        random = [twin.of[basis].mean(axis=0) for twin in twins]
        untrained = np.mean(random, axis=0) if random else np.full(len(own.places), np.nan)
        columns = {"carried": near.value, "carried_low": near.low, "carried_high": near.high}
        columns |= {"share": found.value, "low": found.low, "high": found.high}
        places = own.places.assign(basis=basis)[["layer", "basis", "k"]]
        rows.append(places.assign(**columns, n=n, untrained=untrained))
    table: Any = pd.concat(rows)
    return table.sort_values(["layer", "k"], kind="stable", ignore_index=True)


def _contrasts(result: Result) -> pd.DataFrame:
    (own, carried, twins), rows = _measured(result), []
    for basis in OTHERS:
        found, times = carried.more_than(basis), own.times(basis)
        random = np.array([twin.times(basis).value for twin in twins])
        random = random.reshape(len(twins), len(own.places))
        learned = against_networks(times.value, times.error, random, float(len(own.of[basis])))
        untrained = random.mean(axis=0) if twins else np.full(len(own.places), np.nan)
        places = own.places.assign(versus=basis)[["layer", "versus", "k"]]
        columns = {"difference": found.value, "low": found.low, "high": found.high}
        columns |= {"p": holm(found.p), "ratio": np.exp(times.value)}
        columns |= {"untrained": np.exp(untrained), "learned": np.exp(learned.value)}
        ends = {"learned_low": np.exp(learned.low), "learned_high": np.exp(learned.high)}
        rows.append(places.assign(**columns, **ends, learned_p=holm(learned.p)))
    table: Any = pd.concat(rows)
    return table.sort_values(["layer", "k"], kind="stable", ignore_index=True)


_OF_PAIRS = {"pairs": by("sample"), "swaps": by("sample")}


class Concentration(Result):
    """How much of the difference of two answers a few nodes of each layer's code carry.

    `table()` has a row per layer, basis ("native", "pca", "rotated") and k: carried and share, each
    with its 95 % interval over pairs (carried_low, carried_high, low, high), n (pairs) and
    untrained, the mean share of the untrained twins. `ci.circuits.concentration` says what both
    are. `table("contrasts")` has a row per layer, other basis (versus) and k. difference: what
    native axes carry minus what the other ones carry, of the same pairs. low, high, p: its 95 %
    interval and p over pairs and, for rotated axes, over rotations; p is adjusted over all layers
    and k (Holm). ratio: the native share over the other one. untrained: this ratio in the twins
    (geometric mean). learned: ratio / untrained, with learned_low, learned_high and learned_p over
    pairs and twins; above 1 training has concentrated what moves the gap. Twins are compared by the
    ratio of shares, because their answers hardly differ: the best nodes move the gap several times
    as far as the whole donor does, in all bases, so that none carries it.

    Stored tables: `pairs` (sample, donor, answer, donor_answer, gap, donor_gap), `swaps` (sample,
    layer, basis, k, moved: gap - gap of the swapped run), both of the twins too (`untrained_pairs`,
    `untrained_swaps`), and `points` (layer, tokens, width, pca_tokens).
    """

    KIND = "concentration"
    MAIN = "shares"
    OF_A_NETWORK = _OF_PAIRS | {"points": first}
    STORED = OF_A_NETWORK | {f"untrained_{name}": rule for name, rule in _OF_PAIRS.items()}
    DERIVED = {"shares": _shares, "contrasts": _contrasts}
    ALONE = (
        "donors and principal axes are those of all samples: run ci.circuits.concentration on all "
        "samples at once."
    )
    INTERVALS = True

    @property
    def middle(self) -> int:
        """Returns the middle one of the numbers of swapped nodes, of which the headline speaks."""
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
        points, settings = self._table("points"), self.meta["settings"]
        tokens = " or ".join(f"{n:,}" for n in sorted(set(points["pca_tokens"])))
        return (
            "share: how much of the gap of logits between the two answers of a pair moves if k "
            "nodes (token, coordinate) take the donor's values, a ratio of sums over n pairs; "
            "1 is all of it. carried: 1 less the distance that is left, so that moving a pair "
            "beyond the donor's answer counts as much as stopping before it; 1 is best.\n"
            "basis: native are the axes of the code itself, pca the principal axes of the layer's "
            f"tokens (fitted on {tokens} tokens), rotated the mean of {settings['rotations']} "
            "random rotations. untrained: the mean share of networks with random weights; where "
            "their answers hardly differ, it is far above 1.\n"
            "difference: carried, native - versus, of the same pairs. low to high: 95 % intervals "
            "over pairs and, for rotated axes, rotations. p: of no difference, adjusted for all "
            "layers and k (Holm). ratio: of shares, native / versus. untrained: this ratio in "
            "networks with random weights. learned: ratio / untrained, with an interval and p over "
            "pairs and networks."
        )

    def finding(self) -> str:
        """Returns what a few nodes carry, beside rotations, principal axes and twins."""
        shares: Any = self._table("shares")
        here = shares[shares["k"] == self.middle]
        sizes: Any = self._table("points")
        nodes = int((sizes["tokens"] * sizes["width"]).max())
        spans = {}
        for basis in (NATIVE, ROTATED):
            own = here[here["basis"] == basis]["carried"]
            spans[basis] = f"{own.min():.2f} to {own.max():.2f}"
        layers = counted(len(sizes), "layers")
        more, less = self._apart(ROTATED)
        above, below = self._apart(PCA)
        return (
            f"In {self.meta['model'] or 'the model'}, on {self.counted_samples()}, swapping "
            f"{self.middle} of {nodes:,} (token, coordinate) nodes for a donor's carries "
            f"{spans[NATIVE]} of the gap between two answers, depending on the layer; as many "
            f"randomly rotated axes, the null, carry {spans[ROTATED]}. To overshoot the gap counts "
            f"as to fall short of it. Of {layers}, native axes carry more than random rotations in "
            f"{more} and less in {less}, more than principal axes in {above} and less in {below} "
            f"(p of {LEVEL} or less, adjusted). {self._learned()}"
        )

    def _at_middle(self, basis: str) -> Any:
        """Returns the contrasts with a basis, for the middle number of nodes."""
        table: Any = self._table("contrasts")
        return table[(table["versus"] == basis) & (table["k"] == self.middle)]

    def _apart(self, basis: str) -> tuple[int, int]:
        """Returns in how many layers native axes are shown to carry more, and less."""
        rows = self._at_middle(basis)
        shown = rows[rows["p"] <= LEVEL]["difference"]
        return int((shown > 0).sum()), int((shown < 0).sum())

    def _learned(self) -> str:
        """Returns a sentence on the ratio to rotations beside that of untrained twins."""
        count, rows = self.meta["untrained"], self._at_middle(ROTATED)
        if count < 2:
            return "It takes two untrained networks to tell whether random weights give this too."
        shown = rows[rows["learned_p"] <= LEVEL]["learned"]
        means = [np.exp(np.log(rows[name]).mean()) for name in ("ratio", "untrained")]
        return (
            f"They move the gap {means[0]:.2f} times as far as rotations on average, and "
            f"{means[1]:.2f} times in {count} untrained networks; this is shown to be higher than "
            f"there in {int((shown > 1).sum())} layers and lower in {int((shown < 1).sum())}."
        )

    def _shown(self) -> pd.DataFrame:
        table: Any = self._table("shares")
        return table[table["k"] == self.middle]
