"""The figure of the lab random_walk."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

from matplotlib import pyplot
from matplotlib.figure import Figure


def draw(found: Any) -> Figure:
    """Draws accuracy, attention and distances along training, and the certain walks' accuracy."""
    figure, axes = pyplot.subplots(1, 4, figsize=(16, 4.2), layout="constrained")
    for axis, quantity in zip(axes, ("accuracy", "attention on the parent"), strict=False):
        for setting, rows in found.numbers(quantity).groupby("setting"):
            curve = rows.groupby("place")["value"].mean()
            axis.semilogx(curve, "o-", label=setting)
        axis.set(xlabel="iteration", title=quantity, ylim=(0, 1.03))
    axes[0].legend(fontsize=8)
    names = (("Pi", "-", r"$\Pi^T$"), ("root of Pi", ":", r"$\sqrt{\Pi^T}$"))
    for name, line, words in names:
        for colour, (setting, rows) in enumerate(
            found.numbers(f"exact: distance to {name}").groupby("setting")
        ):
            curve = rows.groupby("place")["value"].mean()
            label = f"{setting}, to {words}"
            axes[2].loglog(curve, f"o{line}", color=f"C{colour}", label=label)
    axes[2].set(xlabel="iteration", title="distance of V's direction, exact shares")
    axes[2].legend(fontsize=8)
    for colour, form in enumerate(("grouped", "naive")):
        rows = found.numbers(f"{form}: training accuracy")
        for place, (_, one) in enumerate(rows.groupby("setting")):
            at = [place + colour * 0.4 + 0.025 * i for i in range(len(one))]
            label = form if place == 0 else None
            axes[3].plot(at, one["value"], "o", markersize=4, color=f"C{colour}", label=label)
    settings = sorted(found.numbers("naive: training accuracy")["setting"].unique())
    axes[3].set_xticks([place + 0.3 for place in range(len(settings))], settings)
    axes[3].set(title="certain walks: training accuracy, each seed", ylim=(0, 1.05))
    axes[3].legend()
    figure.suptitle(
        "A walk is learned unless it is certain; V tends to the root of its probabilities "
        "(published size)"
    )
    return figure
