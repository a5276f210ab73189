"""The few numbers per layer that the command line prints and the report begins with."""

from collections.abc import Sequence

from crate_interp.core.safe_text import plain
from crate_interp.results.result import counted
from crate_interp.sweeps.result import SweepResult
from crate_interp.viz.figures.curves import baseline, curve, names
from crate_interp.viz.pages.page import model_name
from crate_interp.viz.pages.statistic_titles import title

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
        over = " Mean over heads." if curve(result, name).heads is not None else ""
        lines.append(f"{short}: {name}{f', {unit}' if unit else ''}. {how}{over}")
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
