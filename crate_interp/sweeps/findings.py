"""What a sweep found: how the two rates called R^c change, as numbers, signs and sentences."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped

from crate_interp.probes import statistic
from crate_interp.results.result import Result
from crate_interp.results.sample_ranges import counted
from crate_interp.results.statistic import Row, low_to_high, sign_of
from crate_interp.stats.contrasts import against_networks, mean_error
from crate_interp.stats.intervals import interval_words, signs, student_interval
from crate_interp.stats.verdicts import BROKEN, KEPT, NOT_APPLICABLE, UNDECIDED
from crate_interp.sweeps.layer_curves import TABLES, baseline, curve, names, rows_of
from crate_interp.sweeps.moments import errors

if TYPE_CHECKING:
    from crate_interp.sweeps.layer_curves import Results
    from crate_interp.sweeps.result import SweepResult

OFFICIAL = "compression.official_rate"
_RATES: dict[str, list[str]] = TABLES["rates"]
_BESIDE_UNTRAINED: dict[str, tuple[str, int]] = TABLES["beside_untrained"]
_BACK = 0.05  # a rate still falls (rises) if it turns back by at most this share of its range


@dataclass(frozen=True)
class Change:
    """How a number changes, layer by layer: its means, and the relative change by sample.

    before, after: the means. change: the mean over samples of after / before - 1, as in an audit.
    low, high: the 95 % interval of change by Student's t; NaN for a single sample.
    """

    layers: Shaped[np.ndarray, "layer"]
    before: Float[np.ndarray, "layer"]
    after: Float[np.ndarray, "layer"]
    change: Float[np.ndarray, "layer"]
    low: Float[np.ndarray, "layer"]
    high: Float[np.ndarray, "layer"]
    of: str = "samples"  # what there are too few of, if there is no interval

    @property
    def signs(self) -> list[int]:
        """Returns a sign per layer: 1 shown to rise, -1 shown to fall, 0 neither."""
        return signs(self.low, self.high).tolist()


def at_attention(result: Result, rate: str = "R^c") -> Change | None:
    """Returns how a rate changes at the attention of each layer; None if it was not measured."""
    before, after = (_by_layer(result, name) for name in _RATES[rate])
    if before is None or after is None:
        return None
    layers = [layer for layer in before if layer in after]
    return _change(result, layers, before[layers], after[layers].to_numpy(float))


def along_layers(result: Result) -> Change | None:
    """Returns how the authors' rate changes from each layer to the next; None if it is unknown.

    A layer's entry compares its rate with that of the layer before; the first layer has no entry.
    """
    rates = _by_layer(result, OFFICIAL)
    if rates is None or rates.shape[1] < 2:
        return None
    later = rates.columns[1:]
    return _change(result, list(later), rates[rates.columns[:-1]], rates[later].to_numpy(float))


def _by_layer(result: Result, name: str) -> Any:
    """Returns a statistic as a table [sample, layer] of the layers that have it; None if none."""
    samples = result.table("samples")
    if name not in samples:
        return None
    wide = samples.pivot(index="sample", columns="layer", values=name).dropna(axis=1, how="all")
    return wide if wide.size else None


def _change(
    result: Result, layers: Sequence[int], first: pd.DataFrame, after: Float[np.ndarray, "n layer"]
) -> Change:
    before = first.to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):  # a stream of zeros has no rate
        share = np.where(before != 0, after / before - 1, np.nan)
    was, now, mean = (pd.DataFrame(one).mean().to_numpy(float) for one in (before, after, share))
    ends = student_interval(mean, *mean_error(result.by_group(share, first.index)))
    return Change(np.asarray(layers), was, now, mean, *ends, result.few)


def headline(result: "SweepResult") -> str:
    """Returns how R^c changes, with one doubt, and what was measured: the table has the numbers."""
    meta = result.meta
    number = counted(len(meta["statistics"]), "statistics")
    words = f"{number} of {meta['model'] or 'a model'} on {result.counted_samples()}."
    return " ".join([*_changes_in_words(result, ())[:2], words, instead_of_u(result)]).strip()


def sentences(result: "SweepResult", twins: "Results", read: int | None = None) -> list[str]:
    """Returns the first sentences of a report: each rate, and its untrained copies beside it.

    read: in how many layers an audit saw R^c of LN(Z), which attention reads, fall.
    """
    name = names(result)[0]
    without_rates = f"{statistic(result.meta, name).title}: {ends(result, twins, name)}."
    return _changes_in_words(result, twins, read) or [without_rates]


def _changes_in_words(result: "SweepResult", twins: "Results", read: Any = None) -> list[str]:
    """Returns a sentence about each rate; the rates differ in the lengths of the tokens."""
    said = []
    for rate in _RATES:
        change = at_attention(result, rate)
        if change is None:
            continue
        rises, falls = (change.signs.count(sign) for sign in (1, -1))
        name, what, more = rate, rate, ""
        if rate == "R^c":
            name = f"R^c of {_frame(result)} at eps {_settings(result).get('eps')}"
            what = f"a token's cost (R^c of {_frame(result)})"
            more = "" if read is None else f"; rescaled as read, it falls in {read or 'none'}"
        beside = [twin.change for twin in (at_attention(one, rate) for one in twins) if twin]
        untrained = f"; untrained copies {_per_cents(np.mean(beside, axis=0))}" if beside else ""
        few = interval_words(np.nan, np.nan, of=change.of)
        layers = len(change.signs)
        moved = f"lowers {what} in {falls} and raises it in {rises} of {layers} layers"
        if layers in (rises, falls):
            moved = f"{'raises' if rises else 'lowers'} {what} in all {layers} layers"
        more = more or "; the theory expects a fall" * (rises == layers)
        said.append(f"Attention {moved}{more}.")
        if rate == "R^c" and read is None and not _settings(result).get("norm"):
            said.append("Attention reads LN(Z), where R^c may fall: an audit measures it.")
        said.append(
            f"{name} changes by {_per_cents(change.change)}{untrained}"
            f"{f': {few}' if np.isnan(change.low).all() else ''}."
        )
    along = along_layers(result)
    if along is not None:
        known, untrained = [twin for twin in map(along_layers, twins) if twin], ""
        if known:
            first = np.mean([twin.before[0] for twin in known])
            last = np.mean([twin.after[-1] for twin in known])
            untrained = f" (untrained copies: {first:.4g} to {last:.4g})"
        said.append(
            "With every code at unit length, as in the authors' plots, R^c "
            f"{path([along.before[0], *along.after], int(along.layers[0]) - 1)}{untrained}."
        )
    return said


def path(values: Sequence[float], first: int) -> str:
    """Returns how a rate goes from layer to layer, such as "falls from 9 in layer 0 to 7 in ...".

    An extreme in between is named if the rate turns back by more than 5 % of its range. first: the
    number of the first layer.
    """
    start, end = values[0], values[-1]
    where = f"from {start:.4g} nats per token in layer {first}"
    where += f" to {end:.4g} in layer {first + len(values) - 1}"
    low, high = sorted((start, end))
    beyond = [max(low - value, value - high) for value in values]
    far = int(np.argmax(beyond))
    if beyond[far] > _BACK * (high - low):
        kind = "lowest" if values[far] < start else "highest"
        return f"goes {where}, with its {kind} value, {values[far]:.4g}, in layer {first + far}"
    return f"{'falls' if end < start else 'rises' if end > start else 'stays,'} {where}"


def _settings(result: "SweepResult") -> dict[str, Any]:
    return result.meta["probes"].get("compression", {"settings": {}})["settings"]


def _frame(result: "SweepResult") -> str:
    return "LN(Z)" if _settings(result).get("norm") else "the stream"


def _per_cents(change: np.ndarray) -> str:
    """Returns the lowest and highest change over layers, such as "+0.2 to +8.5 %"."""
    return f"{low_to_high(np.round(100 * change, 1) + 0.0, '{:+.1f}'.format)}\u00a0%"


def instead_of_u(result: "SweepResult") -> str:
    """Returns a sentence on what was measured in place of U in a black box, or ""."""
    config = result.meta["config"]
    role, probes = config.get("subspaces"), result.meta.get("probes", {}).values()
    if role is None or not any("subspaces" in probe["settings"] for probe in probes):
        return ""
    shared = role != "query" and config["value_heads"] != config["n_heads"]
    each = "group of heads" if shared else "head"
    return f"We chose the {role} map of each {each} as U_k, because this network ties no maps."


def beginning(names: Sequence[str]) -> list[str]:
    """Returns the statistics with which a report begins, with at most one on attention."""
    chosen = [name for name in _BESIDE_UNTRAINED if name in names]
    return [n for n in chosen if n != "attention.entropy" or "attention.support_cls" not in names]


def ends(result: "SweepResult", twins: "Results", name: str) -> str:
    """Returns a statistic's values in the first and last layer, and those of untrained copies."""
    drawn, random = curve(result, name), baseline(twins, name)
    first, last, unit = drawn.layers[0], drawn.layers[-1], statistic(result.meta, name).unit
    where = f"in layer {last:g}" if last < result.meta["n_layers"] else "after the last layer"
    words = f"{drawn.mean[0]:.4g} in layer {first:g}, {drawn.mean[-1]:.4g} {where}"
    if random is not None:
        untrained = random.mean(axis=0)
        words += f"; untrained {untrained[0]:.4g} and {untrained[-1]:.4g}"
    return words + (f" ({unit})" if unit else "")


def strip(result: "SweepResult", twins: "Results", shuffled: "Results" = ()) -> list[Row]:
    """Returns the rows of the strip: what the theory expects, and which layers agree with it.

    twins, shuffled: untrained copies, and networks with weights in random order. A number counts as
    above or below untrained networks only if this is shown for both kinds.
    """
    measures: dict[str, Callable[[SweepResult], Change | None]] = {}
    for rate in _RATES:
        what = f"R^c of {_frame(result)}" if rate == "R^c" else rate
        measures[f"{what} falls at attention"] = partial(at_attention, rate=rate)
    measures["Authors' R^c is lower than in the layer before"] = along_layers
    rows = []
    for words, measure in measures.items():
        change = measure(result)
        if change is not None:
            kinds = [[one for one in map(measure, kind) if one] for kind in (twins, shuffled)]
            rows.append(_falls(words, result, change, kinds))
    known = beginning(names(result)) if twins else []
    return rows + [_beside_untrained(result, (twins, shuffled), name) for name in known]


def _falls(words: str, result: "SweepResult", change: Change, kinds: list[list[Change]]) -> Row:
    """Returns a row: whether a rate is shown to fall in each layer, and with random weights.

    A layer gets a ring if all networks of a kind change the same way.
    """
    layers = dict(zip(change.layers.tolist(), change.signs, strict=True))
    said = {1: "rises", -1: "falls", 0: "its interval includes 0", None: "nothing to compare with"}
    numbers, alike = [_per_cents(change.change)], dict.fromkeys(layers, "")
    for name, networks in zip(("untrained", "with shuffled weights"), kinds, strict=True):
        if not networks:
            numbers.append("")
            continue
        ways = np.sign([one.change for one in networks])
        for place, (layer, sign) in enumerate(layers.items()):
            if sign and (ways[:, place] == sign).all():
                alike[layer] += f", {name} too"
        numbers.append(_per_cents(np.mean([one.change for one in networks], axis=0)))
    return _row(words, result, layers, said, -1, numbers, alike)


def _beside_untrained(result: "SweepResult", kinds: "Sequence[Results]", name: str) -> Row:
    """Returns a row: whether each layer's mean differs from those with random weights."""
    words, better = _BESIDE_UNTRAINED[name]
    drawn, random = curve(result, name), [baseline(kind, name) for kind in kinds]
    error, n = errors(result, rows_of(result.layers(), name))
    if len(rows_of(result.table("weights"), name)):
        error = np.zeros(len(drawn.mean))
    # 1 or -1 for a layer whose mean is shown above or below one more network, else 0
    tests = [against_networks(drawn.mean, error, one, n) for one in random if one is not None]
    found = np.stack([signs(*test.ends) for test in tests])
    ways = np.where((found == found[0]).all(axis=0), found[0], 0)
    layers = dict(zip(drawn.layers.astype(int).tolist(), ways.tolist(), strict=True))
    said = {1: "above random weights", -1: "below random weights", 0: "between them, or can't tell"}
    means = [drawn.mean, *(None if one is None else one.mean(axis=0) for one in random)]
    numbers = ["" if mean is None else low_to_high(mean, "{:.3g}".format) for mean in means]
    return _row(words, result, layers, {**said, None: "not measured"}, better, numbers, {})


def _row(
    title: str,
    result: "SweepResult",
    ways: Mapping[int, int],
    said: Mapping[int | None, str],
    better: int,
    numbers: list[str],
    alike: Mapping[int, str],
) -> Row:
    """Returns a row of the strip.

    ways: layer -> 1 for shown to be higher, -1 lower, 0 neither. said: the words for each; None is
    the key for a layer without a number. better: the sign that the theory expects. alike: layer ->
    which random weights go the same way, in words; such a layer gets a ring.
    """
    cells, verdict_of = [], {1: KEPT, -1: BROKEN, 0: UNDECIDED}
    for layer in range(result.meta["n_layers"]):
        way, same = ways.get(layer), alike.get(layer, "")
        verdict = NOT_APPLICABLE if way is None else verdict_of[better * way]
        cells.append(sign_of(verdict, f"layer {layer}: {said[way]}{same}", bool(same)))
    return Row(title, cells, numbers)
