"""The numbers by layer that figures draw and summaries print: curves, baselines, controls."""

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from crate_interp.core import checks, safe_text
from crate_interp.probes import statistic
from crate_interp.results.result import Cells, Result, as_text, model_name
from crate_interp.results.sample_ranges import counted

if TYPE_CHECKING:
    from crate_interp.sweeps.result import SweepResult

    Results = Sequence[SweepResult]

TABLES = tomllib.loads(Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8"))
# statistic of attention -> its value for even attention, given the number of keys and of tokens
# before the patches
_OF_EVEN: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "attention.entropy": lambda keys, _: np.log(keys),
    "attention.entropy_cls": lambda keys, _: np.log(keys),
    "attention.entropy_patches": lambda keys, special: np.log(keys - special),
    "attention.support_cls": lambda keys, _: keys,
}

_BY_NAME = "layers by name"  # the name under which a result keeps its rows of each statistic


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
    return sorted(map(".".join, pairs), key=list(result.meta["statistics"]).index)


def curve(result: "SweepResult", statistic: str) -> Curve:
    """Returns the curve of "probe.statistic".

    A statistic per head is averaged over heads in each sample; the mean and its interval are over
    these averages.
    Raises ValueError, with the nearest names, if the result lacks the statistic.
    """
    place = f"curve of {statistic}"
    if place in result._computed:  # a report asks hundreds of times
        return result._computed[place]
    rows = _by_layer(result, statistic)
    layers, mean = np.asarray(rows[["layer", "mean"]], dtype=float).T
    heads = rows_of(result.heads(), statistic)
    wide = _wide(heads, "mean") if len(heads) else None
    found = Curve(layers, mean, *result.mean_ends(rows), int(rows["n"].max()), wide)
    return result._computed.setdefault(place, found)


def _by_layer(result: "SweepResult", statistic: str) -> Any:
    """Returns the rows of a statistic by layer, or raises ValueError with the nearest names."""
    if _BY_NAME not in result._computed:
        groups: Any = result.layers().groupby(["probe", "statistic"], sort=False)
        result._computed[_BY_NAME] = {".".join(pair): rows for pair, rows in groups}
    if isinstance(statistic, str) and statistic in result._computed[_BY_NAME]:
        return result._computed[_BY_NAME][statistic]
    known = names(result)
    hint = checks.did_you_mean(str(statistic), known, f"It has {', '.join(known)}.")
    raise ValueError(f"the result has no statistic {checks.quote(statistic)}. {hint}")


def rows_of(table: Any, statistic: str) -> Any:
    """Returns the rows of "probe.statistic"."""
    probe, _, name = statistic.partition(".")
    return table[(table["probe"] == probe) & (table["statistic"] == name)]


def _wide(rows: Any, values: str) -> np.ndarray:
    """Returns a column of a table of heads as `[layer, head]`."""
    return rows.pivot(index="layer", columns="head", values=values).to_numpy(dtype=float)


def baseline(untrained: "Results | None", name: str) -> Float[np.ndarray, "seed layer"] | None:
    """Returns the mean of a statistic by layer for each untrained copy, or None.

    Raises ValueError if the copies differ in depth or lack the statistic.
    """
    if not untrained:
        return None
    if isinstance(untrained, Result):
        raise ValueError("untrained is one result. Give a list: [result].")
    return np.stack([_by_layer(one, name)["mean"].to_numpy(float) for one in untrained])


def chance(results: "Results", statistic: str) -> tuple[str, Float[np.ndarray, "layer"]] | None:
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
    """Returns the value that a statistic of attention has for equal shares of all keys, by layer.

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


def summary(result: "SweepResult", untrained: "Results") -> Cells:
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


def _cells(result: "SweepResult", untrained: "Results", names: Sequence[str]) -> pd.DataFrame:
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


def heading(result: "SweepResult", untrained: "Results", data: str) -> str:
    """Returns a line that says what was measured, on which data, and what the brackets hold."""
    of = f" of {safe_text.plain(data)}" if data else ""
    seen = max((twin.meta["n_samples"] for twin in untrained), default=0)
    copies = f"mean of {counted(len(untrained), 'untrained networks')} on the first {seen}"
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


def numbers(result: "SweepResult", untrained: "Results") -> Cells:
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


EVERY = 8  # controls within a layer are measured on 1 in 8 of the samples that have controls
_GOLDEN = (5**0.5 - 1) / 2
_TELLS = 10  # by chance, the model is better in all or none of 10 samples once in 512
CONTROLLED: dict[str, str] = TABLES["controlled"]
KINDS: dict[str, str] = TABLES["controls"]
IN_BRACKETS = "In brackets: samples in which the model is better (lower R^c, or higher R - R^c)."


def controls_table(result: Result, name: str) -> Cells:
    """Returns the header and rows for "probe.statistic": a row per layer, with model and controls.

    The columns are grouped by the number of samples. In each group, a column of the model's means
    precedes the columns of the controls, over the same samples. There are no rows if no control
    applies to the statistic.
    """
    rows = rows_of(result.table("controls"), name)
    lines = {layer: [str(layer)] for layer in sorted(set(rows["layer"]))}
    header = ["layer"]
    for n in sorted(set(rows["n"]), reverse=True):
        seen = rows[rows["n"] == n]
        kinds, unit = list(dict.fromkeys(seen["control"])), str(result.meta["unit"])
        header += [f"model, {counted(n, unit)}", *kinds]
        found = {(row.control, row.layer): row for row in seen.itertuples()}
        for layer, cells in lines.items():
            there = [found.get((kind, layer)) for kind in kinds]
            own = next((f"{row.model_mean:.4g}" for row in there if row is not None), "")
            cells += [own, *("" if row is None else _control(row) for row in there)]
    return header, list(lines.values())


def _control(row: Any) -> str:
    """Returns the mean under a control, and in how many samples the model is better."""
    # for R - R^c, better means higher; for other statistics, it means lower
    better = row.n - row.lower if row.statistic.startswith("reduction") else row.lower
    return f"{row.control_mean:.4g} ({better}/{row.n})"


def an_eighth(start: int, count: int) -> list[int]:
    """Returns which samples the controls within a layer see, as sample numbers minus `start`.

    The samples are chosen among `count` samples from number `start` on. The golden ratio selects
    samples 0, 5, 13, 18, ...: 5 of the first 32, and about an eighth of a large number. With a
    fixed step, the controls might see only one class of data whose classes alternate.
    """
    return [place for place in range(count) if (start + place) * _GOLDEN % 1 < 1 / EVERY]


def few_controlled(result: Result) -> str:
    """Returns a caution if there are too few controlled samples to rule out chance, else ""."""
    table: Any = result.table("controls")
    least, asked = int(table["n"].min()), result.meta["controls"]
    groups = result.groups_at(result.table("samples")["sample"].unique()[:asked])
    least = least if groups is None else min(least, len(set(groups)))
    if least > _TELLS:
        return ""
    return (
        f"With {least} independent samples, the model is better in all or none by chance once in "
        f"{2 ** (least - 1):,}: give more samples with controls=N (`--controls N`)."
    )


def controls_text(result: Result) -> str:
    """Returns the controls of the first measure with controls, as lines of text, or ""."""
    for name in CONTROLLED:
        header, rows = controls_table(result, name)
        if rows:
            bound = rate_reduction_bound(result)
            of_each = "\n".join(f"{kind}: {KINDS[kind]}" for kind in header if kind in KINDS)
            return (
                f"\nNegative controls: {name} over {controlled(result)}, next to the model on the "
                f"same {result.meta['unit']}. {IN_BRACKETS} {few_controlled(result)}\n"
                f"{as_text(header, rows)}\n\n{of_each}\n"
                f"d/2 ln K = {bound:.4g} nats per token is the most that R - R^c can be for "
                "complete orthonormal subspaces; other subspaces may exceed it.\n"
            )
    return ""


def controlled(result: Result) -> str:
    """Returns how many samples the controls have seen, in words."""
    counts: Any = result.table("controls")["n"]
    words = f"the first {counts.max()} {result.meta['unit']}"
    if counts.min() == counts.max():
        return words
    return f"{words} (random weights; other controls on {counts.min()} of them, evenly spread)"


def rate_reduction_bound(result: Result) -> float:
    """Returns d/2 ln K in nats per token, the largest R - R^c for complete orthonormal U."""
    config = result.meta["config"]
    grouped = config.get("subspaces", "query") != "query"  # a group of heads shares one U_k
    heads = config["value_heads"] if grouped else config["n_heads"]
    return config["d_model"] / 2 * math.log(heads)
