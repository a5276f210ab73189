"""The few numbers per layer with which the report and the command line begin."""

from collections.abc import Sequence

from crate_interp.core.safe_text import plain
from crate_interp.probes.built_in import statistic
from crate_interp.results.result import counted, model_name
from crate_interp.sweeps.layer_curves import baseline, curve, names
from crate_interp.sweeps.result import SweepResult


def summary(
    result: SweepResult, untrained: Sequence[SweepResult]
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows, a row per layer.

    Each cell is the model's mean, with the untrained mean in brackets.
    """
    columns = _columns(result)
    rows: dict[int, list[str]] = {}
    for place, (name, _) in enumerate(columns):
        for layer, cell in _cells(result, untrained, name).items():
            rows.setdefault(layer, [""] * len(columns))[place] = cell
    header = ["layer", *(column for _, column in columns)]
    return header, [[str(layer), *cells] for layer, cells in sorted(rows.items())]


def _columns(result: SweepResult) -> list[tuple[str, str]]:
    """Returns the statistics of the summary, and the headings of their columns.

    If no statistic has its own column, they are the first six, under their names.
    """
    known = {name: statistic(result.meta, name).column for name in names(result)}
    columns: dict[str, str] = {}
    for name, column in known.items():
        if column:  # two probes of the same kind share a heading
            columns[name if column in columns else column] = name
    return [(name, column) for column, name in columns.items()] or [
        (name, name) for name in list(known)[:6]
    ]


def _cells(result: SweepResult, untrained: Sequence[SweepResult], name: str) -> dict[int, str]:
    """Returns the mean of a statistic in each layer, with the untrained mean in brackets."""
    drawn, random = curve(result, name), baseline(untrained, name)
    cells = [f"{mean:.4g}" for mean in drawn.mean]
    if random is not None:
        means = random.mean(axis=0)
        cells = [f"{cell} ({mean:.4g})" for cell, mean in zip(cells, means, strict=True)]
    return dict(zip(drawn.layers.astype(int).tolist(), cells, strict=True))


def heading(result: SweepResult, untrained: Sequence[SweepResult], data: str) -> str:
    """Returns a line that says what was measured, on which data, and what the brackets hold."""
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
    for name, column in _columns(result):
        record = statistic(result.meta, name)
        over = " Mean over heads." if curve(result, name).heads is not None else ""
        unit = f", {record.unit}" if record.unit else ""
        lines.append(f"{column}: {name}{unit}. {record.how}{over}")
    return "\n".join(lines) + "\n"


def numbers(
    result: SweepResult, untrained: Sequence[SweepResult]
) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of every statistic, a column per layer.

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
