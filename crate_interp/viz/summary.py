"""The few numbers per layer that the command line prints and the report begins with."""

import math
from collections.abc import Sequence
from typing import Any

from crate_interp.results import ENOUGH, counted
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.text import as_text
from crate_interp.viz.curves import baseline, curve, names
from crate_interp.viz.page import model_name
from crate_interp.viz.titles import title
from crate_interp.words import plain

_FIRST = (
    ("compression.subspace_rate_pre", "R^c before"),
    ("compression.subspace_rate_mid", "R^c after"),
    ("compression.official_rate", "official R^c"),
    ("sparsity.zero_fraction", "zeros"),
    ("alignment.orthonormality", "U defect"),
    ("attention.support_cls", "CLS support"),
)


def summary(
    result: SweepResult, untrained: Sequence[SweepResult]
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows, a row per layer.

    Each cell is the model's mean, with the untrained mean in brackets.
    """
    chosen = _chosen(result)
    header = ["layer", *(title for _, title in chosen)]
    rows: dict[int, list[str]] = {}
    for column, (name, _) in enumerate(chosen):
        drawn, random = curve(result, name), baseline(untrained, name)
        for place, layer in enumerate(drawn.layers.astype(int).tolist()):
            cell = f"{drawn.mean[place]:.4g}"
            cell += "" if random is None else f" ({random.mean(axis=0)[place]:.4g})"
            rows.setdefault(layer, [""] * len(chosen))[column] = cell
    return header, [[str(layer), *cells] for layer, cells in sorted(rows.items())]


def _chosen(result: SweepResult) -> list[tuple[str, str]]:
    """Returns the statistics of the summary, and what their columns are called."""
    known = names(result)
    return [(name, short) for name, short in _FIRST if name in known] or [
        (name, name) for name in known[:6]
    ]


def heading(result: SweepResult, untrained: Sequence[SweepResult], data: str) -> str:
    """Returns a line that says what was measured, on what, and what stands in brackets."""
    meta = result.meta
    what = f"{model_name(meta)}, {counted(meta['n_samples'], meta['unit'])}"
    what += f" of {plain(data)}" if data else ""
    if not untrained:
        return f"{what}: means over them."
    seen = max(twin.meta["n_samples"] for twin in untrained)
    few = f" over the first {seen}" if seen < meta["n_samples"] else ""
    seeds = f"{len(untrained)} seed{'s' * (len(untrained) > 1)}"
    return f"{what}: means over them, in brackets untrained, mean of {seeds}{few}."


def legend(result: SweepResult) -> str:
    """Returns a line for each column of the summary: its statistic, unit and how to read it."""
    lines = []
    for name, short in _chosen(result):
        unit, _, _, how = result.meta["statistics"][name]
        lines.append(f"{short}: {name}{f', {unit}' if unit else ''}. {how}")
    return "\n".join(lines) + "\n"


def numbers(
    result: SweepResult, untrained: Sequence[SweepResult]
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of every statistic, a column per layer.

    Each cell is the model's mean, with the untrained mean in brackets.
    """
    known = {name: (curve(result, name), baseline(untrained, name)) for name in names(result)}
    columns = sorted({int(layer) for drawn, _ in known.values() for layer in drawn.layers})
    rows: list[list[str]] = []
    for name, (drawn, random) in known.items():
        cells = dict.fromkeys(columns, "")
        for place, layer in enumerate(drawn.layers.astype(int).tolist()):
            cells[layer] = f"{drawn.mean[place]:.4g}"
            cells[layer] += "" if random is None else f" ({random.mean(axis=0)[place]:.4g})"
        unit = result.meta["statistics"][name][0]
        rows.append([title(name), unit, *cells.values()])
    last = result.meta["n_layers"]
    names_ = [f"layer {layer}" if layer != last else f"output of {last - 1}" for layer in columns]
    return ["", "unit", *names_], rows


CONTROLLED = (
    "compression.subspace_rate_mid",
    "compression.reduction_mid",
    "compression.official_rate",
)


KINDS = {
    "random weights": "one untrained network, seed 0. What is the same there is not learned.",
    "random subspaces": "random U_k with the singular values of the model's, drawn anew for each "
    "sample. If the model is no better, its subspaces compress its tokens no better than random "
    "ones. It may also be better because its subspaces hold less of the tokens: see the share of a "
    "token in each head's subspace.",
    "permuted heads": "each head's result is written by the next head's output map. If that is no "
    "worse, it does not matter through which map a result is written.",
    "tight frame": "a stream of the same energy, spread evenly over as many directions as it can "
    "have, so R is the highest. It has no structure; tokens that fill few directions (see the "
    "probe ranks) have a lower R, and so a lower R - R^c, too.",
}
IN_BRACKETS = (
    "In brackets: in how many samples the model is better, that is, has less R^c, or more R - R^c."
)


def controls_table(result: SweepResult, name: str) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows for "probe.statistic": the model and every control, a row per layer.

    Before controls of the same samples stands the model on these samples. There are no rows if no
    control applies to the statistic.
    """
    probe, _, statistic = name.partition(".")
    table: Any = result.controls()
    rows = table[(table["probe"] == probe) & (table["statistic"] == statistic)]
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
    if not hasattr(row, "lower"):  # a result that was saved earlier does not say in how many
        return f"{row.control_mean:.4g}"
    better = row.n - row.lower if row.statistic.startswith("reduction") else row.lower
    return f"{row.control_mean:.4g} ({better}/{row.n})"


def few_controlled(result: SweepResult) -> str:
    """Returns a caution where so few samples were controlled that all may agree by chance."""
    counts: Any = result.controls()["n"]
    least = int(counts.min())
    if least >= ENOUGH:
        return ""
    times = 2 ** (least - 1)
    return (
        f"With {least} of them, all or none are better by chance once in {times:,}: "
        "`crate-interp sweep` with `--controls 256` prints those of more."
    )


def controls_text(result: SweepResult) -> str:
    """Returns the controls of the first measure that has any, as lines of text, or ""."""
    for name in CONTROLLED:
        header, rows = controls_table(result, name)
        if rows:
            bound = rate_reduction_bound(result)
            of_each = "\n".join(f"{kind}: {KINDS[kind]}" for kind in header if kind in KINDS)
            return (
                f"\nNegative controls: {name} over {controlled(result)}, beside the model on the "
                f"same {result.meta['unit']}. {IN_BRACKETS} {few_controlled(result)}\n"
                f"{as_text(header, rows)}\n\n{of_each}\n"
                f"d/2 ln K = {bound:.4g} nats per token is the most that R - R^c can be for "
                "complete orthonormal subspaces; other subspaces may exceed it.\n"
            )
    return ""


def controlled(result: SweepResult) -> str:
    """Returns how many samples the controls have seen, in words."""
    counts: Any = result.controls()["n"]
    most, least, unit = counts.max(), counts.min(), result.meta["unit"]
    words = f"the first {most} {unit}"
    if least == most:
        return words
    return f"{words} (random weights; the others on {least} of them, evenly spread)"


def rate_reduction_bound(result: SweepResult) -> float:
    """Returns d/2 ln K in nats per token, the most of R - R^c for complete orthonormal U."""
    config = result.meta["config"]
    grouped = config.get("subspaces", "query") != "query"  # there is one U_k for a group of heads
    heads = config["value_heads"] if grouped else config["n_heads"]
    return config["d_model"] / 2 * math.log(heads)
