"""The figure of the lab scan_and_snap."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

from matplotlib import pyplot
from matplotlib.figure import Figure


def draw(found: Any) -> Figure:
    """Draws the scores, the growth B(t), and what one B leaves unexplained, over iterations."""
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for name, colour in (("distinct", "C0"), ("common", "C1")):
        for setting, line in (("trained", "-"), ("permuted", ":")):
            _curve(axes[0], found, name, setting, line, colour, f"{name}, {setting}")
    axes[0].set_title("mean score of tokens")
    _curve(axes[1], found, "growth", "trained", "-", "C0", "measured")
    axes[1].set(xscale="log", title="B(t), the growth of who wins")
    _curve(axes[2], found, "error", "trained", "-", "C0", "trained")
    _curve(axes[2], found, "error", "permuted", ":", "C0", "permuted answers")
    axes[2].set(title="share of who wins that one B leaves", yscale="log")
    for axis in axes:
        axis.set_xlabel("iteration")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8)
    rows = found.table()
    figure.suptitle(
        f"Distinct tokens rise to {rows['ours'].iloc[0]:+.2f}, common ones fall to "
        f"{rows['ours'].iloc[1]:+.2f} ({rows['n'].iloc[0]} seeds, bands their range)"
    )
    return figure


def _curve(
    axis: Any, found: Any, name: str, setting: str, line: str, colour: str, words: str
) -> None:
    rows = found.numbers(name, setting=setting)
    curves = rows[rows["place"] > 0].groupby("place")["value"].agg(["mean", "min", "max"])
    axis.plot(curves["mean"], line, color=colour, label=words)
    axis.fill_between(curves.index, curves["min"], curves["max"], color=colour, alpha=0.15)
