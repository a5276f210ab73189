"""The numbers by layer that figures draw and summaries print: curves, intervals, baselines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.probes import statistic
from crate_interp.results.result import Result, model_name

if TYPE_CHECKING:
    from crate_interp.sweeps.result import SweepResult

# statistic of attention -> its value for even attention, given the number of keys and of tokens
# before the patches
_OF_EVEN: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "attention.entropy": lambda keys, _: np.log(keys),
    "attention.entropy_cls": lambda keys, _: np.log(keys),
    "attention.entropy_patches": lambda keys, special: np.log(keys - special),
    "attention.support_cls": lambda keys, _: keys,
}


@dataclass(frozen=True)
class Curve:
    """A statistic by layer.

    mean: over n samples. low, high: the ends of the mean's 95 % interval, NaN for a statistic of
    the weights. heads: the means of single heads, or None if the statistic is not per head.
    """

    layers: Float[np.ndarray, "layer"]
    mean: Float[np.ndarray, "layer"]
    low: Float[np.ndarray, "layer"]
    high: Float[np.ndarray, "layer"]
    n: int
    heads: Float[np.ndarray, "layer head"] | None


def names(result: "SweepResult") -> list[str]:
    """Returns all names "probe.statistic" of a result, in the order of measurement."""
    tables = (result.table(name)[["probe", "statistic"]] for name in ("layers", "heads"))
    pairs = pd.concat(tables).drop_duplicates().to_numpy().tolist()
    order = list(result.meta["statistics"])
    return sorted(map(".".join, pairs), key=order.index)


def curve(result: "SweepResult", statistic: str) -> Curve:
    """Returns the curve of "probe.statistic".

    A statistic per head is averaged over heads in each sample; the mean and its interval are over
    these averages.
    Raises ValueError, with the nearest names, if the result lacks the statistic.
    """
    rows = rows_of(result.layers(), statistic)
    if len(rows):
        layers, mean = np.asarray(rows[["layer", "mean"]], dtype=float).T
        heads = rows_of(result.heads(), statistic)
        wide = _wide(heads, "mean") if len(heads) else None
        return Curve(layers, mean, *result.mean_ends(rows), int(rows["n"].max()), wide)
    known = names(result)
    hint = checks.did_you_mean(statistic, known, f"It has {', '.join(known)}.")
    raise ValueError(f"the result has no statistic {statistic!r}. {hint}")


def rows_of(table: Any, statistic: str) -> Any:
    """Returns the rows of "probe.statistic"."""
    probe, _, name = statistic.partition(".")
    return table[(table["probe"] == probe) & (table["statistic"] == name)]


def _wide(rows: Any, values: str) -> np.ndarray:
    """Returns a column of a table of heads as `[layer, head]`."""
    return rows.pivot(index="layer", columns="head", values=values).to_numpy(dtype=float)


def baseline(
    untrained: "Sequence[SweepResult] | None", statistic: str
) -> Float[np.ndarray, "seed layer"] | None:
    """Returns the mean of a statistic by layer for each untrained twin, or None without twins.

    Raises ValueError if the twins differ in depth or lack the statistic.
    """
    if not untrained:
        return None
    if isinstance(untrained, Result):
        raise ValueError("untrained is one result. Give a list: [result].")
    return np.stack([curve(result, statistic).mean for result in untrained])


def chance(
    results: Sequence["SweepResult"], statistic: str
) -> tuple[str, Float[np.ndarray, "layer"]] | None:
    """Returns the name and the values by layer of a statistic's chance level, or None.

    Returns None if the chance level is unknown or differs between the results.
    """
    found = [_chance(result, statistic) for result in results]
    levels = [one[1] for one in found if one is not None]
    if not levels or {len(level) for level in levels} != {len(levels[0])}:
        return None
    return found[0] if len(levels) == len(found) and np.allclose(levels, levels[0]) else None


def _chance(result: "SweepResult", statistic: str) -> tuple[str, np.ndarray] | None:
    config, every = result.meta["config"], curve(result, statistic).layers
    if statistic in ("alignment.head_overlap", "alignment.energy_head"):
        p, d = config.get("d_head"), config.get("d_model")
        return ("random subspaces, p/d", np.full(len(every), p / d)) if p and d else None
    if statistic == "alignment.dictionary_shape":
        short, long = sorted((config.get("d_model") or 0, config.get("d_mlp") or 0))
        return ("a random D", np.full(len(every), (short / long) ** 0.5)) if short else None
    if statistic == "sparsity.zero_fraction":
        return "a ReLU of noise", np.full(len(every), 0.5)
    if statistic == "linear.accuracy" and "linear.chance" in names(result):
        return "the commonest class", curve(result, "linear.chance").mean
    level = even(result, statistic)
    return None if level is None else ("even attention", level)


def even(result: Result, statistic: str) -> Float[np.ndarray, "layer"] | None:
    """Returns, by layer, the value of a statistic of attention if all keys get equal shares.

    Returns None for other statistics, or if the entropy of even attention was not measured.
    """
    uniform = rows_of(result.table("layers"), "attention.entropy_uniform")
    if statistic not in _OF_EVEN or not len(uniform):
        return None
    keys = np.exp(uniform["mean"].to_numpy(float))
    return _OF_EVEN[statistic](keys, result.meta["config"].get("special_tokens", 1))


def head_interval(
    result: "SweepResult", statistic: str
) -> tuple[Float[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]] | None:
    """Returns the ends of each head's 95 % interval, or None for a statistic of the weights."""
    rows = rows_of(result.heads(), statistic)
    low, high = result.mean_ends(rows)
    rows = rows.assign(low=low, high=high)
    return None if np.isnan(low).all() else (_wide(rows, "low"), _wide(rows, "high"))


def summary(
    result: "SweepResult", untrained: Sequence["SweepResult"]
) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of the summary, one row per layer.

    Each cell is the model's mean, with the untrained mean in brackets.
    """
    shown = columns(result)
    cells = _cells(result, untrained, [name for name, _ in shown])
    header = ["layer", *(column for _, column in shown)]
    return header, [[str(layer), *row] for layer, row in cells.T.iterrows()]


def columns(result: "SweepResult") -> list[tuple[str, str]]:
    """Returns the statistics of the summary, and the headings of their columns.

    If no statistic has a heading, these are the first six statistics, under their own names.
    """
    known, shown = names(result), {}
    for name in known:
        column = statistic(result.meta, name).column
        if column:  # a second statistic with this heading is shown under its own name
            shown[name if column in shown else column] = name
    return [(name, column) for column, name in shown.items()] or [(one, one) for one in known[:6]]


def _cells(
    result: "SweepResult", untrained: Sequence["SweepResult"], names: Sequence[str]
) -> pd.DataFrame:
    """Returns the mean of each statistic in each layer, with the untrained mean in brackets."""
    cells = {}
    for name in names:
        drawn, random = curve(result, name), baseline(untrained, name)
        texts = [f"{mean:.4g}" for mean in drawn.mean]
        if random is not None:
            pairs = zip(texts, random.mean(axis=0), strict=True)
            texts = [f"{text} ({mean:.4g})" for text, mean in pairs]
        cells[name] = pd.Series(texts, drawn.layers.astype(int))
    return pd.DataFrame(cells).sort_index().fillna("").T


def heading(result: "SweepResult", untrained: Sequence["SweepResult"], data: str) -> str:
    """Returns a line that says what was measured, on which data, and what the brackets hold."""
    of = f" of {plain(data)}" if data else ""
    seen = max((twin.meta["n_samples"] for twin in untrained), default=0)
    copies = f"mean of untrained copies (seeds: {len(untrained)}, {seen} seen)"
    beside = f"; in brackets, the {copies}" if untrained else ""
    return f"{model_name(result.meta)}, {result.counted_samples()}{of}: means{beside}."


def legend(result: "SweepResult") -> str:
    """Returns a line for each column of the summary: its statistic, unit and how to read it."""
    lines = []
    for name, column in columns(result):
        record = statistic(result.meta, name)
        over = " Mean over heads." if curve(result, name).heads is not None else ""
        unit = f", {record.unit}" if record.unit else ""
        lines.append(f"{column}: {name}{unit}. {record.how}{over}")
    return "\n".join(lines) + "\n"


def numbers(
    result: "SweepResult", untrained: Sequence["SweepResult"]
) -> tuple[list[str], list[list[str]]]:
    """Returns the header and a row for every statistic, with a column per layer.

    Each cell is the model's mean, with the untrained mean in brackets.
    """
    cells = _cells(result, untrained, names(result))
    records = [statistic(result.meta, name) for name in cells.index]
    texts = zip(records, cells.to_numpy().tolist(), strict=True)
    rows = [[record.title, record.unit, *row] for record, row in texts]
    last = result.meta["n_layers"]
    columns = [f"layer {at}" if at != last else f"output of {last - 1}" for at in cells]
    return ["", "unit", *columns], rows
