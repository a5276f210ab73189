"""The figure of the lab joma_dynamics."""

from typing import Any  # of a LabResult: pandas' own types are too wide here

import joma_theorems as theorems
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def _drifts(axis: Axes, found: Any) -> None:
    for kind in ("linear", "exp", "softmax"):
        rows = found.numbers("drift", setting=kind).groupby("place")["value"].mean()
        axis.loglog(2 / rows.index.to_numpy(), rows.to_numpy(), "o-", label=kind)
    axis.set_xticks([2 / steps for steps in (256, 128, 64, 32)], ["1/128", "1/64", "1/32", "1/16"])
    axis.minorticks_off()
    axis.set(xlabel="dt of Runge-Kutta", ylabel="drift / movement of z")
    axis.set_title("Theorem 1: linear and exp are exact")
    axis.legend()


def _correlations(axis: Axes, found: Any) -> None:
    names = {"whole": "estimate", "squares": r"part $\Sigma v^2$", "rest": r"part $-|v|^2\bar b$"}
    for kind, line in (("gauss", "-"), ("random", "--")):
        for colour, (name, words) in enumerate(names.items()):
            rows = found.numbers(name, setting=kind).groupby("place")["value"].mean()
            axis.plot(rows, line, color=f"C{colour}", label=f"{words}, {kind}")
    axis.set(xlabel="iteration", ylabel="correlation with z", ylim=(-0.6, 1.05))
    axis.set_title("Figure 2: softmax logits follow the estimate")
    axis.legend(fontsize=7)


def _growth(axis: Axes, found: Any) -> None:
    for token in range(4):
        rows = found.numbers(f"v_0 of token {token}", setting="gauss", seed=0)
        axis.plot(rows["place"], rows["value"], label=f"token {token}")
    axis.set(xlabel="iteration", ylabel="weight for class 0")
    axis.set_title("Figure 3: the salient token takes over")
    axis.legend()


def _blow_up(axis: Axes) -> None:
    end = theorems.blow_up_time(theorems.DELTA)
    times = np.linspace(0, 0.9999, 400) * end
    for delta in theorems.DELTA:
        values = np.array([theorems.grown(np.array([delta]), t)[0] for t in times])
        axis.plot(times, values, label=rf"$\Delta$ = {delta}")
    axis.axvline(end, color="black", linewidth=0.8, linestyle=":")
    axis.set(xlabel="t", ylabel="v")
    axis.set_title(rf"Theorem 2: blow-up at $t^*$ = {end:.3f}")
    axis.legend()


def _entropy(axis: Axes, found: Any) -> None:
    for name, words in (("entropy", "attention"), ("entropy without attention", "without")):
        rows = found.numbers(name).sort_values("place")
        axis.plot(rows["place"], rows["value"], label=words)
    axis.axhline(
        found.numbers("asymptote")["value"][0], color="black", linestyle=":", label="limit"
    )
    axis.set(xlabel="iteration", ylabel="entropy, nats")
    axis.set_title("Figure 4: entropy falls, then rises")
    axis.legend()


def _trees(axis: Axes, found: Any) -> None:
    exact, right, printed = (
        found.numbers(f"Theorem 5, {name}") for name in ("all paths", "corrected", "printed")
    )
    at = np.arange(len(exact))
    axis.bar(at - 0.2, right["value"], 0.4, label="corrected")
    axis.bar(at + 0.2, printed["value"], 0.4, label="as printed")
    axis.plot(at - 0.2, exact["value"], "k_", markersize=18, label="sum over all paths")
    axis.set(
        xticks=at, ylim=(0, 1), xlabel=r"$(\rho, L, H, q)$", ylabel=r"$P[y_l = 1 \mid y_m = 1]$"
    )
    axis.set_xticklabels(exact["setting"], fontsize=8)
    axis.set_title("Theorem 5")
    axis.legend(loc="upper right", fontsize=8)


def draw(found: Any) -> Figure:
    """Draws Theorems 1, 2, 5 and Figures 2, 3, 4."""
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
    _drifts(axes[0, 0], found)
    _correlations(axes[0, 1], found)
    _growth(axes[0, 2], found)
    _blow_up(axes[1, 0])
    _entropy(axes[1, 1], found)
    _trees(axes[1, 2], found)
    seeds = found.numbers("drift")["seed"].nunique()
    figure.suptitle(
        "JoMA: linear and exp attention keep their invariants, softmax follows its own nearly "
        f"(published size, {seeds} seeds)"
    )
    return figure
