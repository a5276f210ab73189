"""The figure of the lab srr_regularizer."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

from lab import mean_and_interval
from matplotlib import pyplot
from matplotlib.figure import Figure

WORDS = {
    "accuracy": "accuracy with the term less without it, points",
    "measure": "R^c - R of the last layer, with less without, nats",
}


def draw(found: Any) -> Figure:
    """Draws the change by the term for each variant and weight: seeds as dots, mean, interval."""
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    for axis, (quantity, words) in zip(axes, WORDS.items(), strict=True):
        table = found.numbers(quantity)
        both = table["setting"].str.split(", weight ", expand=True)
        table = table.assign(variant=both[0], arm=both[1])
        variants = list(dict.fromkeys(table["variant"]))
        arms = [arm for arm in dict.fromkeys(table["arm"]) if arm != "0 l0"]
        for place, arm in enumerate(arms):
            shift = 0.8 * ((place + 0.5) / len(arms) - 0.5)
            for row, variant in enumerate(variants):
                own = table[table["variant"] == variant].pivot(
                    index="seed", columns="arm", values="value"
                )
                values = (own[arm] - own["0 l0"]).tolist()
                mean, (low, high) = mean_and_interval(values)
                at = row + shift
                axis.plot([at] * len(values), values, ".", color=f"C{place}", alpha=0.4)
                axis.errorbar(
                    at, mean, [[mean - low], [high - mean]], fmt="o", color=f"C{place}", capsize=3,
                    label=f"weight {arm}" if not row else None,
                )  # fmt: skip
        axis.axhline(0, color="black", lw=0.8)
        axis.set_xticks(range(len(variants)), variants)
        axis.set_ylabel(words)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8)
    size = found.table()["size"].iloc[0].split(" (")[0]
    sure = sum(found.table()["answer"] == "supported")
    figure.suptitle(
        f"At weight 1e-3 the term raises accuracy in {sure} of 4 variants ({size}; "
        "dots are seeds, bars 95 % intervals)"
    )
    return figure
