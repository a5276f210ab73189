"""The figure of the lab training_lens."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

from matplotlib import pyplot
from matplotlib.figure import Figure

WORDS = {
    "frames.change_stream": "attention adds to R^c of Z, nats",
    "frames.change_read": "... of LN(Z)",
    "frames.change_unit": "... of Z at unit mean square",
    "objective.count_stream": "objective of a layer's output, nats",
}


def draw(found: Any) -> Figure:
    """Draws each statistic along training, a line a layer, the mean over seeds."""
    figure, axes = pyplot.subplots(1, len(WORDS), figsize=(15, 4), layout="constrained")
    for axis, (name, words) in zip(axes, WORDS.items(), strict=True):
        for place, (layer, rows) in enumerate(found.numbers(name).groupby("setting")):
            curves = rows.groupby("place")["value"].agg(["mean", "min", "max"])
            axis.plot(curves["mean"], color=f"C{place}", label=layer)
            axis.fill_between(
                curves.index, curves["min"], curves["max"], color=f"C{place}", alpha=0.2
            )
        axis.axhline(0, color="black", lw=0.8)
        axis.set(xlabel="updates", title=words)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
    ends = {}
    for name in ("frames.change_stream", "frames.change_read"):
        means = found.numbers(name).groupby("place")["value"].mean()
        ends[name] = f"from {means.iloc[0]:+.2f} to {means.iloc[-1]:+.2f} nats"
    seeds = found.numbers("frames.change_stream")["seed"].nunique()
    figure.suptitle(
        f"What attention adds to R^c goes {ends['frames.change_stream']} for Z and "
        f"{ends['frames.change_read']} for LN(Z) (digits, {seeds} seeds, bands are their range)"
    )
    return figure
