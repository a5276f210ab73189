"""The figure of the lab nearest_neighbour."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

from matplotlib import pyplot
from matplotlib.figure import Figure


def draw(found: Any) -> Figure:
    """Draws loss and attention, the coefficients, and the loss under a shift, over iterations."""
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for name, words in (("loss", "loss"), ("attention", "attention on the nearest")):
        _curve(axes[0], found, name, words)
    chance = found.table()["baseline"].iloc[0]
    axes[0].axhline(chance, color="black", ls=":", label=f"loss of even attention, {chance:.3f}")
    axes[0].set(ylim=(0, 1.02), title="loss and attention on fresh points")
    for name in ("xi 1", "xi 2"):
        _curve(axes[1], found, name, name.replace(" ", "_"))
    outside = found.numbers("outside the form")
    last = outside[outside["place"] == outside["place"].max()]["value"].mean()
    axes[1].set_title(f"coefficients of W; {last:.1%} of |W| lies outside")
    gaps = [name for name in found.table("numbers")["quantity"].unique() if "gap" in name]
    for name in gaps:
        _curve(axes[2], found, name, name.removeprefix("loss, "))
    axes[2].set(xscale="log", yscale="log", title="loss under a shift, by the gap to the next")
    for axis in axes:
        axis.set_xlabel("iteration")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8)
    seeds = found.numbers("loss")["seed"].nunique()
    figure.suptitle(
        f"Attention learns to copy its nearest neighbour (d = 4, N = 16, {seeds} seeds, "
        "bands are their range)"
    )
    return figure


def _curve(axis: Any, found: Any, name: str, words: str) -> None:
    curves = found.numbers(name).groupby("place")["value"].agg(["mean", "min", "max"])
    curves = curves[curves.index > 0] if "gap" in name else curves
    (line,) = axis.plot(curves["mean"], label=words)
    axis.fill_between(curves.index, curves["min"], curves["max"], color=line.get_color(), alpha=0.2)
