"""The charts of a report: each statistic by layer, with untrained networks and chance."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crate_interp.probes.built_in import statistic
from crate_interp.sweeps.layer_curves import baseline, chance, curve, names
from crate_interp.sweeps.report_findings import beginning, ends
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_findings import Change, at_attention
from crate_interp.viz.figures.paper_curves import PUBLISHED, is_crate_s
from crate_interp.viz.pages.chart import Line, chart
from crate_interp.viz.pages.page import render


@dataclass(frozen=True)
class Panel:
    """A chart with its texts; numbers: its first and last values; chance: the dotted line."""

    name: str
    title: str
    way: str
    svg: str
    numbers: str
    how: str = ""
    chance: str = ""


def hero(result: SweepResult, twins: Sequence[SweepResult]) -> list[Panel]:
    """Returns the first few panels of a report, from what was measured."""
    known = names(result)
    change = _change(result, twins)
    chosen = [panel(result, twins, name, heads=False) for name in beginning(known)]
    if change is not None:
        chosen.insert(0, change)
    return chosen or [panel(result, twins, name) for name in known[:3]]


def panel(
    result: SweepResult, twins: Sequence[SweepResult], name: str, heads: bool = True
) -> Panel:
    """Returns the panel of a statistic: mean and interval, heads, untrained networks, chance."""
    drawn, random = curve(result, name), baseline(twins, name)
    known = not np.isnan(drawn.low).all()
    lines: list[Line] = []
    record = statistic(result.meta, name)
    how = record.how
    if heads and drawn.heads is not None:
        lines += [Line("head", head) for head in drawn.heads.T]
        how += " Thin lines are heads."
    low, high = (drawn.low, drawn.high) if known else (None, None)
    if random is not None:
        ends_of = (random.min(axis=0), random.max(axis=0))
        lines.append(Line("untrained", random.mean(axis=0), *ends_of))
    words, level = chance([result], name) or ("", None)
    if level is not None:
        lines.append(Line("chance", level))
    if is_crate_s(result.meta["config"]) and name in PUBLISHED:
        lines.append(Line("published", np.array(PUBLISHED[name][0])))
        words = "long and short dashes: published for CRATE-S on ImageNet, read off a figure"
    numbers = ends(result, twins, name)
    lines.append(Line("trained", drawn.mean, low, high))
    svg = _drawn(drawn.layers, lines, f"{record.title} by layer: {numbers}.")
    return Panel(name, record.title, record.direction, svg, numbers, how, words)


def _change(result: SweepResult, twins: Sequence[SweepResult]) -> Panel | None:
    """Returns the panel of attention's change of R^c, in per cent."""
    step = at_attention(result)
    if step is None:
        return None
    others: list[Change] = [one for one in map(at_attention, twins) if one is not None]
    lines = [Line("chance", np.zeros(len(step.layers)))]
    if others:
        random = 100 * np.stack([one.change for one in others])
        lines.append(Line("untrained", random.mean(axis=0), random.min(axis=0), random.max(axis=0)))
    lines.append(Line("trained", 100 * step.change, 100 * step.low, 100 * step.high))
    said = "; ".join(
        f"layer {step.layers[at]}: {step.before[at]:.4g} before, {step.after[at]:.4g} after"
        for at in dict.fromkeys((0, len(step.layers) - 1))
    )
    numbers = f"{said} (nats per token)"
    words = "R^c before and after attention"
    svg = _drawn(step.layers.astype(float), lines, f"Change of R^c at attention: {numbers}.")
    return Panel(
        "compression.subspace_rate_pre, _mid",
        words,
        "change in per cent, mean of each sample's; below 0 compresses",
        svg,
        numbers,
        chance="no change",
    )


def _drawn(layers: np.ndarray, lines: Sequence[Line], alt: str) -> str:
    return render("chart.svg", **chart(layers, lines, alt))
