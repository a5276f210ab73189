"""The findings of a sweep in a report: its first sentences, and each layer's verdict.

Numbers become changes with intervals, changes become signs, and signs become words.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from crate_interp.probes.built_in import statistic
from crate_interp.results.verdict_strip import Row, low_to_high, sign_of
from crate_interp.sweeps.layer_curves import baseline, curve, names
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_findings import (
    OFFICIAL,
    Change,
    along_layers,
    at_attention,
    beyond_untrained,
    few_words,
    path,
    stream,
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
# _INSTEAD is shown in place of _CLS if there is no CLS token
_CLS, _INSTEAD = "attention.support_cls", "attention.entropy"


def finding(result: SweepResult, twins: Sequence[SweepResult]) -> list[str]:
    """Returns the first sentences of a report, one for each rate that is called R^c."""
    step, along = at_attention(result), along_layers(result)
    said: list[str] = []
    if along is not None:
        said.append(_official(along, [along_layers(twin) for twin in twins]))
    if step is not None:
        words = _stream(result, step, [at_attention(twin) for twin in twins])
        fell = along is not None and along.after[-1] < along.before[0]
        other = along is not None and "goes" not in said[0] and fell == (sum(step.signs) > 0)
        said.append(f"But {words}" if other else words[0].upper() + words[1:])
    return said or [_plain(result, twins)]


def two_rates(result: SweepResult) -> str:
    """Returns why a report has two rates called R^c, or "" if it does not have both."""
    if at_attention(result) is None or along_layers(result) is None:
        return ""
    return (
        "Two numbers are called R^c. The authors' script takes LN(Z) before each attention, and "
        "scales every token's code to length one. That R^c compares layers, and does not depend on "
        f"how long tokens are. The other number is R^c of {stream(result)} in one layer's "
        "subspaces, before and after the attention of this layer."
    )


def _official(along: Change, twins: list[Change | None]) -> str:
    words = f"The coding rate R^c, as the authors count it, {path(along)}"
    known = [twin for twin in twins if twin is not None]
    if known:
        means = [(twin.before[0], *twin.after) for twin in known]
        words += f"; untrained it {turns(np.mean(means, axis=0).tolist(), along.layers.tolist())}"
    return words + "."


def _stream(result: SweepResult, step: Change, twins: list[Change | None]) -> str:
    """Returns in how many layers attention is shown to raise or lower R^c, and by how much."""
    moved = _moved(step.signs, f"the coding rate R^c of {_what(result)}", "layers")
    words = f"attention {moved}{few_words(step)}{_by(step.change)}"
    signs = _untrained_signs(twins)
    if signs is not None:
        changes = np.mean([twin.change for twin in twins if twin is not None], axis=0)
        every = " with every seed" * (len(twins) > 1)
        words += f"; untrained it {_moved(signs, 'R^c', '')}{every}{_by(changes)}"
    return words + "."


def _what(result: SweepResult) -> str:
    """Returns what a report's rate is measured on: "the stream", or "LN(Z)"."""
    probe = result.meta["probes"].get("compression", {"settings": {}})
    return "LN(Z)" if probe["settings"].get("norm") else "the stream"


def _moved(signs: Sequence[int], what: str, unit: str) -> str:
    """Returns words such as "raises R^c in 4 of 6 layers and lowers it in 1"."""
    counts = {"raises": sum(sign > 0 for sign in signs), "lowers": sum(sign < 0 for sign in signs)}
    first, second = sorted(counts, key=lambda word: -counts[word])
    words = f"{first} {what} in {counts[first]} of {len(signs)} {unit}".rstrip()
    return words + (f" and {second} it in {counts[second]}" if counts[second] else "")


def _by(change: np.ndarray) -> str:
    """Returns the lowest and highest change over layers, such as " (+0.2 to +8.5 % by layer)"."""
    return f" ({_changes(change)} by layer)"


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


def strip(result: SweepResult, twins: Sequence[SweepResult]) -> list[Row]:
    """Returns the rows of the strip: what the theory expects, and which layers agree with it."""
    rows: list[Row] = []
    for words, measured in (
        (f"R^c of {_what(result)} falls at attention", at_attention),
        ("Authors' R^c is lower than a layer before", along_layers),
    ):
        change = measured(result)
        if change is not None:
            rows.append(_falls(words, result, change, [measured(twin) for twin in twins]))
    known = beginning(names(result)) if twins else []
    return rows + [_beside_untrained(result, twins, name) for name in known]


def _falls(words: str, result: SweepResult, change: Change, twins: list[Change | None]) -> Row:
    """Returns a row: whether a rate is shown to fall in each layer, and in untrained networks."""
    signs = dict(zip(change.layers.tolist(), change.signs, strict=True))
    random = _untrained_signs(twins) or [0] * len(signs)
    untrained = dict(zip(signs, random, strict=True))
    said = {1: "rises", -1: "falls", 0: "its interval includes 0", None: "nothing to compare with"}
    known = [twin.change for twin in twins if twin is not None]
    numbers = [_changes(change.change), _changes(np.mean(known, axis=0)) if known else ""]
    return _row(words, result, signs, said, -1, numbers, untrained)


def _untrained_signs(twins: list[Change | None]) -> list[int] | None:
    """Returns one sign per layer: 1 if the means of all seeds rise, -1 if all fall, else 0."""
    known = [np.sign(twin.change) for twin in twins if twin is not None]
    if not known:
        return None
    return [int(ways[0]) if len(set(ways)) == 1 else 0 for ways in np.stack(known, axis=1)]


def _beside_untrained(result: SweepResult, twins: Sequence[SweepResult], name: str) -> Row:
    """Returns a row: whether each layer's mean differs from that of a further untrained network."""
    words, better = _BESIDE_UNTRAINED[name]
    drawn, random = curve(result, name), baseline(twins, name)
    assert random is not None
    ways = beyond_untrained(result, name, random)
    signs = dict(zip(drawn.layers.astype(int).tolist(), ways.tolist(), strict=True))
    said = {1: "above untrained", -1: "below untrained", 0: "not distinguishable from untrained"}
    numbers = [low_to_high(each, "{:.3g}".format) for each in (drawn.mean, random.mean(axis=0))]
    return _row(words, result, signs, {**said, None: "not measured"}, better, numbers)


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
    layer -> the sign of untrained networks; a layer with the same sign gets a ring.
    """
    cells = []
    for layer in range(result.meta["n_layers"]):
        sign, other = signs.get(layer), (untrained or {}).get(layer, 0)
        same = f", untrained {said[other]}" if other else ""
        way = None if sign is None else better * sign
        ringed = bool(sign) and other == sign
        cells.append(sign_of(way, f"layer {layer}: {said[sign]}{same}", ringed))
    return Row(title, cells, numbers)
