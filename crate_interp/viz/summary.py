"""The few numbers per layer that the command line prints and the report begins with."""

from collections.abc import Sequence

from crate_interp.sweep.result import SweepResult
from crate_interp.viz.curves import baseline, curve, names

_FIRST = (
    ("compression.subspace_rate_pre", "R^c before"),
    ("compression.subspace_rate_mid", "R^c after"),
    ("compression.official_rate", "official R^c"),
    ("sparsity.zero_fraction", "zeros"),
    ("alignment.orthonormality", "U defect"),
    ("attention.support_cls", "CLS support"),
)


def summary(result: SweepResult, untrained: Sequence[SweepResult]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, a row per layer; each cell is the model's mean, with the untrained mean in brackets."""
    known = names(result)
    chosen = [(name, title) for name, title in _FIRST if name in known] or [(name, name) for name in known[:6]]
    header = ["layer", *(title for _, title in chosen)]
    rows: dict[int, list[str]] = {}
    for column, (name, _) in enumerate(chosen):
        drawn, random = curve(result, name), baseline(untrained, name)
        for place, layer in enumerate(drawn.layers.astype(int).tolist()):
            cell = f"{drawn.mean[place]:.4g}"
            cell += "" if random is None else f" ({random.mean(axis=0)[place]:.4g})"
            rows.setdefault(layer, [""] * len(chosen))[column] = cell
    return header, [[str(layer), *cells] for layer, cells in sorted(rows.items())]


def as_text(header: list[str], rows: list[list[str]]) -> str:
    """The table with aligned columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    return "\n".join("  ".join(line) for line in lines)
