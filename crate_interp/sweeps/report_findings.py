"""The findings of a sweep in a report: its first sentences, and each layer's verdict.

Numbers become changes with intervals, changes become signs, and signs become words.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from crate_interp.probes.built_in import statistic
from crate_interp.results.statistic import Row, low_to_high, sign_of
from crate_interp.stats.contrasts import against_networks
from crate_interp.stats.intervals import signs as interval_signs
from crate_interp.sweeps.layer_curves import baseline, curve, names
from crate_interp.sweeps.moments import errors
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_findings import (
    OFFICIAL,
    Change,
    along_layers,
    at_attention,
    few_words,
    own_at_attention,
    path,
    turns,
)

# statistic -> (expectation for a trained network, its sign: 1 above untrained, -1 below)
_BESIDE_UNTRAINED = {
    OFFICIAL: ("Authors' R^c is lower than untrained", -1),
    "sparsity.zero_fraction": ("More zeros than untrained", 1),
    "alignment.head_overlap": ("Heads overlap less than untrained", -1),
    "attention.support_cls": ("CLS looks at fewer tokens than untrained", -1),
    "attention.entropy": ("Heads look at fewer tokens than untrained", -1),
}
_STEADY = 0.05  # a rate stays if its range is less than this share of it
# _INSTEAD is shown in place of _CLS if there is no CLS token
_CLS, _INSTEAD = "attention.support_cls", "attention.entropy"


def finding(result: SweepResult, twins: Sequence[SweepResult]) -> str:
    """Returns the first sentences of a report, one about each rate that is called R^c.

    The two rates differ in the lengths of tokens: the authors scale codes to unit length, and go
    from layer to layer; the other rate is of the stream as it is, before and after one attention.
    """
    step, along = at_attention(result), along_layers(result)
    said: list[str] = []
    own = own_at_attention(result)
    if own is not None:
        moved = _moving(*own, [_own_change(twin) for twin in twins])
        said.append(f"With lengths as they are, attention {moved}")
    if along is not None:
        said.append(_official(along, [along_layers(twin) for twin in twins]))
    if step is not None:
        words = _moving(f"R^c of {_what(result)}", step, [at_attention(twin) for twin in twins])
        said.append(
            f"With lengths as they are, attention {words}" if said else f"Attention {words}"
        )
    return " ".join(said) or _plain(result, twins)


def read_through_norm(result: SweepResult) -> str:
    """Returns a sentence on the frame that a report does not measure, or "" without R^c."""
    if at_attention(result) is None:
        return ""
    return (
        "Attention reads LN(Z), not the stream as it is: there R^c may move the other way, which "
        "the audit measures."
    )


def _official(along: Change, twins: list[Change | None]) -> str:
    words = f"With every code scaled to unit length, as the authors count, R^c {path(along)}"
    known = [twin for twin in twins if twin is not None]
    if known:
        means = np.mean([(twin.before[0], *twin.after) for twin in known], axis=0)
        words += f" ({stays_or_turns(means.tolist(), along.layers.tolist())})"
    return f"{words}."


def stays_or_turns(values: Sequence[float], later: Sequence[int]) -> str:
    """Returns how a rate of untrained networks goes, such as "untrained copies stay near 245"."""
    middle = (max(values) + min(values)) / 2
    if max(values) - min(values) < _STEADY * abs(middle):
        return f"untrained copies stay near {middle:.3g}"
    return f"in untrained copies it {turns(values, later)}"


def _moving(what: str, step: Change, twins: list[Change | None]) -> str:
    """Returns in how many layers attention is shown to raise or lower a rate, and by how much."""
    words = f"{_moved(step.signs, what)}{few_words(step)}, by {_changes(step.change)}"
    if _untrained_signs(twins) is not None:
        changes = np.mean([twin.change for twin in twins if twin is not None], axis=0)
        words += f" (untrained {_changes(changes)})"
    return f"{words}."


def _what(result: SweepResult) -> str:
    """Returns what a report's rate is measured on: "the stream", or "LN(Z)"."""
    probe = result.meta["probes"].get("compression", {"settings": {}})
    return "LN(Z)" if probe["settings"].get("norm") else "the stream"


def _moved(signs: Sequence[int], what: str) -> str:
    """Returns words such as "raises R^c in 4 of 6 layers and lowers it in 1"."""
    counts = {"raises": sum(sign > 0 for sign in signs), "lowers": sum(sign < 0 for sign in signs)}
    first, second = sorted(counts, key=lambda word: -counts[word])
    if not counts[first]:
        return f"is shown to change {what} in no layer"
    words = f"{first} {what} in {counts[first]} of {len(signs)} layers"
    return words + (f" and {second} it in {counts[second]}" if counts[second] else "")


def _changes(change: np.ndarray) -> str:
    """Returns the lowest and highest change over layers, such as "+0.2 to +8.5 %"."""
    return f"{low_to_high(change, _per_cent)}\u00a0%"


def _per_cent(share: float) -> str:
    """Returns a change in per cent with its sign; a change that rounds to 0 has no sign."""
    words = f"{100 * share:+.1f}"
    return words[1:] if float(words) == 0 else words


def _plain(result: SweepResult, twins: Sequence[SweepResult]) -> str:
    """Returns the first statistic's values in the first and last layer, if there are no rates."""
    name = names(result)[0]
    return f"{statistic(result.meta, name).title}: {ends(result, twins, name)}."


def beginning(known: Sequence[str]) -> list[str]:
    """Returns the statistics with which a report begins, with at most one on attention."""
    chosen = [name for name in _BESIDE_UNTRAINED if name in known]
    return [name for name in chosen if name != _INSTEAD or _CLS not in known]


def ends(result: SweepResult, twins: Sequence[SweepResult], name: str) -> str:
    """Returns in words the values of a statistic in the first and last layer.

    The unit and the values of untrained networks are included.
    """
    drawn, random = curve(result, name), baseline(twins, name)
    unit = statistic(result.meta, name).unit
    first, last = drawn.layers[0], drawn.layers[-1]
    where = f"in layer {last:g}" if last < result.meta["n_layers"] else "after the last layer"
    words = f"{drawn.mean[0]:.4g} in layer {first:g}, {drawn.mean[-1]:.4g} {where}"
    if random is not None:
        untrained = random.mean(axis=0)
        words += f"; untrained {untrained[0]:.4g} and {untrained[-1]:.4g}"
    return words + (f" ({unit})" if unit else "")


def strip(
    result: SweepResult, twins: Sequence[SweepResult], shuffled: Sequence[SweepResult] = ()
) -> list[Row]:
    """Returns the rows of the strip: what the theory expects, and which layers agree with it.

    twins, shuffled: the two kinds of networks with random weights. A number is above or below
    untrained networks only if it is shown to lie on that side of both kinds.
    """
    rows: list[Row] = []
    own = own_at_attention(result)
    objective = "" if own is None else f"{own[0][0].upper()}{own[0][1:]} falls at attention"
    for words, measured in (
        (objective, _own_change),
        (f"R^c of {_what(result)} falls at attention", at_attention),
        ("Authors' R^c is lower than a layer before", along_layers),
    ):
        change = measured(result)
        if change is not None:
            kinds = [[measured(one) for one in kind] for kind in (twins, shuffled)]
            rows.append(_falls(words, result, change, kinds))
    known = beginning(names(result)) if twins else []
    return rows + [_beside_untrained(result, twins, shuffled, name) for name in known]


def _own_change(result: SweepResult) -> Change | None:
    own = own_at_attention(result)
    return None if own is None else own[1]


def _falls(
    words: str, result: SweepResult, change: Change, kinds: Sequence[list[Change | None]]
) -> Row:
    """Returns a row: whether a rate is shown to fall in each layer, and with random weights."""
    signs = dict(zip(change.layers.tolist(), change.signs, strict=True))
    said = {1: "rises", -1: "falls", 0: "its interval includes 0", None: "nothing to compare with"}
    numbers, untrained = [_changes(change.change)], dict.fromkeys(signs, 0)
    for twins in kinds:
        for layer, sign in zip(signs, _untrained_signs(twins) or [0] * len(signs), strict=True):
            untrained[layer] = sign if sign == signs[layer] else untrained[layer]
        known = [twin.change for twin in twins if twin is not None]
        numbers.append(_changes(np.mean(known, axis=0)) if known else "")
    return _row(words, result, signs, said, -1, numbers, untrained)


def _untrained_signs(twins: list[Change | None]) -> list[int] | None:
    """Returns one sign per layer: 1 if the means of all seeds rise, -1 if all fall, else 0."""
    known = [np.sign(twin.change) for twin in twins if twin is not None]
    if not known:
        return None
    return [int(ways[0]) if len(set(ways)) == 1 else 0 for ways in np.stack(known, axis=1)]


def _beside_untrained(
    result: SweepResult, twins: Sequence[SweepResult], shuffled: Sequence[SweepResult], name: str
) -> Row:
    """Returns a row: whether each layer's mean differs from those with random weights."""
    words, better = _BESIDE_UNTRAINED[name]
    drawn = curve(result, name)
    kinds = [baseline(twins, name), baseline(shuffled, name)]
    known = [random for random in kinds if random is not None]
    found = np.stack([_beyond_untrained(result, name, random) for random in known])
    ways = np.where((found == found[0]).all(axis=0), found[0], 0)
    signs = dict(zip(drawn.layers.astype(int).tolist(), ways.tolist(), strict=True))
    said = {1: "above untrained", -1: "below untrained", 0: "not distinguishable from untrained"}
    means = [drawn.mean, *(None if random is None else random.mean(axis=0) for random in kinds)]
    numbers = ["" if mean is None else low_to_high(mean, "{:.3g}".format) for mean in means]
    return _row(words, result, signs, {**said, None: "not measured"}, better, numbers)


def _beyond_untrained(
    result: SweepResult, statistic: str, untrained: Float[np.ndarray, "seed layer"]
) -> Int[np.ndarray, "layer"]:
    """Returns one sign per layer: how the layer's mean compares with untrained networks.

    1: the mean is shown to be above the mean of one further untrained network. -1: it is shown to
    be below that mean. 0: neither is shown. untrained: the means of the untrained networks.
    """
    table: Any = result.layers()
    weights = result.table("weights")
    rows = table[table["probe"] + "." + table["statistic"] == statistic]
    mean, (error, n) = rows["mean"].to_numpy(float), errors(result, rows)
    if statistic in set(weights["probe"] + "." + weights["statistic"]):
        error = np.zeros(len(mean))
    return interval_signs(*against_networks(mean, error, untrained, n).ends)


def _row(
    title: str,
    result: SweepResult,
    signs: Mapping[int, int],
    said: Mapping[int | None, str],
    better: int,
    numbers: list[str],
    untrained: Mapping[int, int] | None = None,
) -> Row:
    """Returns a row of the strip.

    signs: layer -> 1 if its number is shown to rise or to lie above untrained networks, -1 if it
    is shown to fall or to lie below untrained networks, else 0. said: the words for each sign;
    None is the key for a layer without a sign. better: the sign that the theory expects. untrained:
    layer -> the sign with random weights; a layer with the same sign gets a ring.
    """
    cells = []
    for layer in range(result.meta["n_layers"]):
        sign, other = signs.get(layer), (untrained or {}).get(layer, 0)
        same = f", untrained {said[other]}" if other else ""
        way = None if sign is None else better * sign
        ringed = bool(sign) and other == sign
        cells.append(sign_of(way, f"layer {layer}: {said[sign]}{same}", ringed))
    return Row(title, cells, numbers)
