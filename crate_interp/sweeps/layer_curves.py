"""The numbers by layer that figures draw and summaries print: curves, intervals, baselines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.probes.built_in import statistic
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
    pairs = [
        (probe, statistic)
        for table in (result.table("layers"), result.table("heads"))
        for probe, statistic in table[["probe", "statistic"]].drop_duplicates().to_numpy().tolist()
    ]
    order = list(result.meta["statistics"])
    return sorted((f"{probe}.{statistic}" for probe, statistic in pairs), key=order.index)


def curve(result: "SweepResult", statistic: str) -> Curve:
    """Returns the curve of "probe.statistic".

    A statistic per head is averaged over heads in each sample; the mean and its interval are over
    these averages.
    Raises ValueError, with the nearest names, if the result lacks the statistic.
    """
    rows = _rows(result.layers(), statistic)
    if len(rows):
        layers, mean = np.asarray(rows[["layer", "mean"]], dtype=float).T
        heads = _rows(result.heads(), statistic)
        wide = _wide(heads, "mean") if len(heads) else None
        return Curve(layers, mean, *result.mean_ends(rows), int(rows["n"].max()), wide)
    known = names(result)
    hint = checks.did_you_mean(statistic, known, f"It has {', '.join(known)}.")
    raise ValueError(f"the result has no statistic {statistic!r}. {hint}")


def _rows(table: Any, statistic: str) -> Any:
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
        raise ValueError(
            "untrained is one result, but must be a list of results, one for each seed. Give "
            "[result]."
        )
    means = [curve(result, statistic).mean for result in untrained]
    if len({len(mean) for mean in means}) > 1:
        raise ValueError(
            "the untrained results have different numbers of layers: "
            f"{[len(mean) for mean in means]}."
        )
    return np.stack(means)


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
    uniform = _rows(result.table("layers"), "attention.entropy_uniform")
    if statistic not in _OF_EVEN or not len(uniform):
        return None
    keys = np.exp(uniform["mean"].to_numpy(float))
    return _OF_EVEN[statistic](keys, result.meta["config"].get("special_tokens", 1))


def head_interval(
    result: "SweepResult", statistic: str
) -> tuple[Float[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]] | None:
    """Returns the ends of each head's 95 % interval, or None for a statistic of the weights."""
    rows = _rows(result.heads(), statistic)
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
    rows: dict[int, list[str]] = {}
    for place, (name, _) in enumerate(shown):
        for layer, cell in _cells(result, untrained, name).items():
            rows.setdefault(layer, [""] * len(shown))[place] = cell
    header = ["layer", *(column for _, column in shown)]
    return header, [[str(layer), *cells] for layer, cells in sorted(rows.items())]


def columns(result: "SweepResult") -> list[tuple[str, str]]:
    """Returns the statistics of the summary, and the headings of their columns.

    If no statistic has a heading, these are the first six statistics, under their own names.
    """
    known = {name: statistic(result.meta, name).column for name in names(result)}
    columns: dict[str, str] = {}
    for name, column in known.items():
        if column:  # a second statistic with this heading is shown under its own name
            columns[name if column in columns else column] = name
    return [(name, column) for column, name in columns.items()] or [
        (name, name) for name in list(known)[:6]
    ]


def _cells(result: "SweepResult", untrained: Sequence["SweepResult"], name: str) -> dict[int, str]:
    """Returns the mean of a statistic in each layer, with the untrained mean in brackets."""
    drawn, random = curve(result, name), baseline(untrained, name)
    cells = [f"{mean:.4g}" for mean in drawn.mean]
    if random is not None:
        means = random.mean(axis=0)
        cells = [f"{cell} ({mean:.4g})" for cell, mean in zip(cells, means, strict=True)]
    return dict(zip(drawn.layers.astype(int).tolist(), cells, strict=True))


def heading(result: "SweepResult", untrained: Sequence["SweepResult"], data: str) -> str:
    """Returns a line that says what was measured, on which data, and what the brackets hold."""
    words = f"{model_name(result.meta)}, {result.counted_samples()}"
    words += f" of {plain(data)}: means" if data else ": means"
    if untrained:
        seen = max(twin.meta["n_samples"] for twin in untrained)
        words += (
            f"; in brackets, the mean of untrained copies (seeds: {len(untrained)}, {seen} seen)"
        )
    return f"{words}."


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
    cells = {name: _cells(result, untrained, name) for name in names(result)}
    layers = sorted({layer for own in cells.values() for layer in own})
    rows = []
    for name, own in cells.items():
        record = statistic(result.meta, name)
        rows.append([record.title, record.unit, *(own.get(layer, "") for layer in layers)])
    last = result.meta["n_layers"]
    columns = [f"layer {layer}" if layer != last else f"output of {last - 1}" for layer in layers]
    return ["", "unit", *columns], rows
