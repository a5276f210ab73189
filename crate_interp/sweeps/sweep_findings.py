"""The findings of a sweep in words and numbers: how the two rates called R^c change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped

from crate_interp.config.families import FAMILIES
from crate_interp.results.result import Result
from crate_interp.results.sample_ranges import counted
from crate_interp.stats.contrasts import mean_error
from crate_interp.stats.intervals import interval_words, signs, student_interval
from crate_interp.sweeps.moments import errors

_BEFORE, _AFTER = "compression.subspace_rate_pre", "compression.subspace_rate_mid"
OFFICIAL = "compression.official_rate"
# before and after attention, what the attention of ToST and of CBT was derived to lower
_OWN = {
    "the bound of the stream that TSSA was derived to lower": (
        "membership.bound_pre", "membership.bound_mid",
    ),
    "the rate of the stream that CBSA was derived to lower": (
        "representatives.rate_pre", "representatives.rate_mid",
    ),
}  # fmt: skip
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
        """Returns one sign per layer, 0 if no change is shown.

        1: the number is shown to rise. -1: it is shown to fall.
        """
        return signs(self.low, self.high).tolist()


def at_attention(result: Result) -> Change | None:
    """Returns how R^c changes at the attention of each layer.

    Both rates, before and after attention, use the subspaces of the layer. Returns None unless both
    rates are known.
    """
    return _between(result, _BEFORE, _AFTER)


def own_at_attention(result: Result) -> tuple[str, Change] | None:
    """Returns the objective of an attention that is not R^c, in words, and how it changes there.

    Returns None for MSSA, and unless both rates are known.
    """
    for words, (before, after) in _OWN.items():
        change = _between(result, before, after)
        if change is not None:
            return words, change
    return None


def _between(result: Result, first: str, second: str) -> Change | None:
    before, after = _wide(result, first), _wide(result, second)
    if before is None or after is None:
        return None
    layers = [layer for layer in before if layer in after]
    return _change(result, layers, before[layers], after[layers].to_numpy(float))


def along_layers(result: Result) -> Change | None:
    """Returns how the authors' rate changes from each layer to the next; None if it is unknown.

    A layer's entry compares its rate with that of the layer before; the first layer has no entry.
    """
    rates = _wide(result, OFFICIAL)
    if rates is None or rates.shape[1] < 2:
        return None
    later = rates.columns[1:]
    return _change(result, list(later), rates[rates.columns[:-1]], rates[later].to_numpy(float))


def headline(result: Result) -> str:
    """Returns what was measured, and how both rates that are called R^c change."""
    meta = result.meta
    number = counted(len(meta["statistics"]), "statistics")
    count = f"{number} of {meta['model'] or 'a model'} on {result.counted_samples()}"
    said: list[str] = []
    step, along, own = at_attention(result), along_layers(result), own_at_attention(result)
    if own is not None:
        objective, change = own
        falls = change.signs.count(-1)
        said.append(
            f"{objective} is shown to be lower after attention than before in {falls} of "
            f"{len(change.layers)} layers{few_words(change)}"
        )
    if step is not None:
        rises, falls = (step.signs.count(sign) for sign in (1, -1))
        word, many = ("higher", rises) if rises > falls else ("lower", falls)
        after = "MSSA" if is_mssa(result) else "attention"
        said.append(
            f"R^c of {stream(result)} is shown to be {word} after {after} than before in {many} of "
            f"{len(step.layers)} layers{few_words(step)}"
        )
    if along is not None:
        said.append(
            f"another rate, the authors' R^c of normalised tokens, {path(along)} (codes scaled to "
            "unit length)"
        )
    words = f"{count}{': ' if said else ''}{'; '.join(said)}."
    return f"{words} {instead_of_u(result)}".rstrip()


def is_mssa(result: Result) -> bool:
    """Tells whether the attention of the network is MSSA, that of CRATE and AoT."""
    family = FAMILIES.get(result.meta["config"].get("family", ""))
    return family is not None and family["attention"] == "mssa"


def few_words(change: Change) -> str:
    """Returns a remark in brackets if no layer has an interval, else ""."""
    none = np.isnan(change.low).all()
    return f" ({interval_words(np.nan, np.nan, of=change.of)})" if none else ""


def sharpest(result: Result, statistic: str) -> pd.DataFrame:
    """Returns the rows of `heads()` for a statistic of attention, lowest mean first.

    low, high: the 95 % interval of the mean by Student's t; NaN for a single sample. own: the share
    of CLS's attention that goes to itself; NaN for other statistics.
    """
    table: Any = result.table("heads")
    table = table[table["probe"] == "attention"]
    rows = table[table["statistic"] == statistic].sort_values("mean", kind="stable")
    of_itself = table[table["statistic"] == ("self_cls" if statistic == "entropy_cls" else None)]
    own = of_itself[["layer", "head", "mean"]].rename(columns={"mean": "own"})
    rows = rows.merge(own, on=["layer", "head"], how="left")
    low, high = mean_ends(result, rows)
    return rows.assign(low=low, high=high)


def mean_ends(result: Result, rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of the 95 % interval of each row of `layers()` or `heads()`, by Student's t.

    The ends are NaN for a single sample, and for statistics of the weights.
    """
    error, n = errors(result, rows)
    return student_interval(rows["mean"].to_numpy(float), error, n)


def even(result: Result, statistic: str) -> Float[np.ndarray, "layer"] | None:
    """Returns, by layer, the value of a statistic of attention if all keys get equal shares.

    Returns None if the statistic is not in `OF_EVEN`, or if the entropy of even attention was not
    measured.
    """
    table: Any = result.table("layers")
    uniform = table[(table["probe"] == "attention") & (table["statistic"] == "entropy_uniform")]
    if statistic not in OF_EVEN or not len(uniform):
        return None
    keys = np.exp(uniform["mean"].to_numpy(float))
    return OF_EVEN[statistic](keys, result.meta["config"].get("special_tokens", 1))


# the value for even attention, given the number of keys and of tokens before the patches
OF_EVEN: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "attention.entropy": lambda keys, _: np.log(keys),
    "attention.entropy_cls": lambda keys, _: np.log(keys),
    "attention.entropy_patches": lambda keys, special: np.log(keys - special),
    "attention.support_cls": lambda keys, _: keys,
}


def instead_of_u(result: Result) -> str:
    """Returns a sentence on what was measured in place of U in a black box, or ""."""
    config = result.meta["config"]
    role = config.get("subspaces")
    probes = result.meta.get("probes", {}).values()
    if role is None or not any("subspaces" in probe["settings"] for probe in probes):
        return ""
    shared = role != "query" and config["value_heads"] != config["n_heads"]
    whose = "group of heads" if shared else "head"
    return (
        f"U_k is the {role} map of each {whose}: a choice, because this network ties none of its "
        "maps."
    )


def stream(result: Result) -> str:
    """Returns what R^c is measured on, such as "Z at eps 0.1"."""
    settings = result.meta["probes"]["compression"]["settings"]
    return f"{'LN(Z)' if settings.get('norm') else 'Z'} at eps {settings.get('eps')}"


def path(along: Change) -> str:
    """Returns how a rate goes from the first to the last layer, and its extreme in between.

    An example is "falls from 221 nats per token in layer 0 to 166.5 in layer 5", or "goes from 224
    nats per token in layer 0 to 226 in layer 5, with its lowest, 127, in layer 1".
    """
    return turns([along.before[0], *along.after], along.layers.tolist(), "nats per token")


def turns(values: Sequence[float], later: Sequence[int], unit: str = "") -> str:
    """Returns in words how values change from the first to the last layer; see `path`.

    later: the numbers of all layers but the first. unit: the text after the first value. If it is
    "", the layers of the first and the last value are left out too.
    """
    layers = [later[0] - 1, *later]
    words = f"{values[0]:.4g} to {values[-1]:.4g}"
    if unit:
        first = f"{values[0]:.4g} {unit} in layer {layers[0]}"
        words = f"{first} to {values[-1]:.4g} in layer {layers[-1]}"
    outside = _outside(values)
    if outside is None:
        if f"{values[0]:.4g}" == f"{values[-1]:.4g}":
            return f"stays, from {words}"
        return f"{'falls' if values[-1] < values[0] else 'rises'} from {words}"
    kind = "lowest" if values[outside] < values[0] else "highest"
    return f"goes from {words}, with its {kind}, {values[outside]:.4g}, in layer {layers[outside]}"


def _outside(values: Sequence[float]) -> int | None:
    """Returns the index of the value furthest outside the range from the first to the last value.

    Returns None if no value is far outside. If one is, the values have not simply fallen or risen
    from layer to layer.
    """
    low, high = sorted((values[0], values[-1]))
    beyond = [max(low - value, value - high) for value in values]
    most = max(range(len(values)), key=beyond.__getitem__)
    return most if beyond[most] > _BACK * (high - low) else None


def _wide(result: Result, name: str) -> Any:
    """Returns a statistic as a table of samples and layers, without layers that lack it.

    Returns None if every layer lacks it.
    """
    samples = result.table("samples")
    if name not in samples:
        return None
    wide = samples.pivot(index="sample", columns="layer", values=name)
    wide = wide.dropna(axis=1, how="all")
    return wide if wide.size else None


def _change(
    result: Result, layers: Sequence[int], first: pd.DataFrame, after: Float[np.ndarray, "n layer"]
) -> Change:
    before = first.to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):  # a stream of zeros has no rate
        share = np.where(before != 0, after / before - 1, np.nan)
    was, now, mean = (
        pd.DataFrame(table).mean().to_numpy(float) for table in (before, after, share)
    )
    ends = student_interval(mean, *mean_error(result.by_group(share, first.index)))
    return Change(np.asarray(layers), was, now, mean, *ends, result.few)
