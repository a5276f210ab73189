"""The page of a report: a model's default measurements next to the same network untrained."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from crate_interp.core.files import write_text
from crate_interp.core.progress import tqdm
from crate_interp.core.safe_text import cell, file_name
from crate_interp.probes.built_in import BUILT_IN, DEFAULT, OF_MEMBERS, heading, statistic
from crate_interp.results.result import as_text
from crate_interp.results.result_files import assumed
from crate_interp.results.sample_ranges import counted
from crate_interp.sweeps import control_tables, findings, layer_curves
from crate_interp.sweeps.findings import at_attention, ends, instead_of_u
from crate_interp.sweeps.result import SweepResult
from crate_interp.viz.figures.by_layer import PUBLISHED, is_crate_s, layers
from crate_interp.viz.figures.canvas import quiet
from crate_interp.viz.pages.chart import Line, chart
from crate_interp.viz.pages.page import figure_uri, page_of, render, sources

if TYPE_CHECKING:
    import matplotlib.figure

Sweeps = Sequence[SweepResult]
# fields of a config that cannot be inferred from weights, and the value that needs no naming
_OF_NO_FILE = ("n_heads", "channels", "interpolate_pos", "resize", "crop", "mean", "std")
_USUAL = {**dict.fromkeys(_OF_NO_FILE), "transparency": "drop", "bits": 8}


@dataclass(frozen=True)
class Panel:
    """A chart with its texts.

    numbers: the first and last values of the chart's lines. chance: what the dotted line means.
    """

    name: str
    title: str
    way: str
    svg: str
    numbers: str
    how: str = ""
    chance: str = ""


def hero(result: SweepResult, twins: Sweeps, shuffled: Sweeps) -> list[Panel]:
    """Returns the panels at the top of a report, chosen among the measured statistics."""
    known = layer_curves.names(result)
    chosen = [panel(result, twins, shuffled, name) for name in findings.beginning(known)]
    change = _change(result, twins, shuffled)
    chosen = chosen if change is None else [change, *chosen]
    return chosen or [panel(result, twins, shuffled, name) for name in known[:3]]


def panel(result: SweepResult, twins: Sweeps, shuffled: Sweeps, name: str) -> Panel:
    """Returns the panel of a statistic: mean and interval, heads, random weights, chance."""
    drawn, record = layer_curves.curve(result, name), statistic(result.meta, name)
    lines, how = [], record.how
    if drawn.heads is not None:
        lines += [Line("head", head) for head in drawn.heads.T]
        how += " Thin lines are heads."
    for kind, networks in (("untrained", twins), ("shuffled", shuffled)):
        random = layer_curves.baseline(networks, name)
        if random is not None:
            lines.append(_spread(kind, random))
    words, level = layer_curves.chance([result], name) or ("", None)
    if level is not None:
        lines.append(Line("chance", level))
    if is_crate_s(result.meta["config"]) and name in PUBLISHED:
        lines.append(Line("published", np.array(PUBLISHED[name][0])))
        words = (
            "the chance level, if it is known. Long and short dashes: published for CRATE-S on "
            "ImageNet, read off a figure"
        )
    numbers = ends(result, twins, name)
    band = () if np.isnan(drawn.low).all() else (drawn.low, drawn.high)
    lines.append(Line("trained", drawn.mean, *band))
    alt = f"{record.title} by layer: {numbers}."
    svg = render("chart.svg", **chart(drawn.layers, lines, alt))
    return Panel(name, record.title, record.direction, svg, numbers, how, words)


def _spread(kind: str, values: np.ndarray) -> Line:
    """Returns the line of several networks: their mean, with a band from lowest to highest."""
    return Line(kind, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _change(result: SweepResult, twins: Sweeps, shuffled: Sweeps) -> Panel | None:
    """Returns the panel that shows by how many per cent attention changes R^c."""
    step = at_attention(result)
    if step is None:
        return None
    lines = [Line("chance", np.zeros(len(step.layers)))]
    for kind, networks in (("untrained", twins), ("shuffled", shuffled)):
        others = [one.change for one in map(at_attention, networks) if one is not None]
        if others:
            lines.append(_spread(kind, 100 * np.stack(others)))
    lines.append(Line("trained", 100 * step.change, 100 * step.low, 100 * step.high))
    said = "; ".join(
        f"layer {step.layers[at]}: {step.before[at]:.4g} before, {step.after[at]:.4g} after"
        for at in dict.fromkeys((0, len(step.layers) - 1))
    )
    numbers = f"{said} (nats per token)"
    alt = f"Change of R^c at attention: {numbers}."
    return Panel(
        name="compression.subspace_rate_pre, _mid",
        title="R^c before and after attention",
        way="change in per cent, mean over samples; below 0 means compression",
        svg=render("chart.svg", **chart(step.layers.astype(float), lines, alt)),
        numbers=numbers,
        chance="no change",
    )


@dataclass(frozen=True)
class AttentionPictures:
    """The attention of an image model's CLS token, or memberships, for the page of a report.

    heading: what the maps show. figures: a figure for each layer that is shown. images: how many
    images each figure has. uniform: the value of each patch if maps were even. names: the names of
    the images, if the images have names.
    """

    heading: str
    figures: Mapping[int, "matplotlib.figure.Figure"]
    images: int
    uniform: float
    names: Sequence[str] = ()


@quiet()
def report_page(
    result: SweepResult,
    twins: Sweeps,
    out: str | Path,
    *,
    attention: AttentionPictures | None = None,
    audited: bool = False,
    data: str = "",
    shuffled: Sweeps = (),
    progress: bool = False,
) -> Path:
    """Writes a page, its tables and the result (SweepResult.save) into a folder.

    The folder also gets figures/*.png and two tables: summary.txt has the finding, means by layer,
    the meaning of its columns, and the controls; layers.csv has `result.layers()` with the mean,
    lowest and highest value of the twins. Returns the path of the page.

    twins: results of the same network with random weights, one result for each seed. audited:
    whether the page links to the page of an audit, audit/audit.html. data: the name of the data,
    shown in the command that repeats the report. shuffled: results of the network with its weights
    in random order, a second baseline of random weights. progress: whether to show a bar while the
    figures are drawn.

    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        caution = _caution(result, twins)
        write_text(stage / "summary.txt", _summary(result, twins, data, caution))
        write_text(stage / "layers.csv", _layers_csv(result, twins))
        (stage / "figures").mkdir()
        for layer, figure in attention.figures.items() if attention else ():
            figure.savefig(stage / "figures" / f"attention-layer-{layer}.png", dpi=150)
        first = hero(result, twins, shuffled)
        page = page_of(
            result,
            "report.html",
            "what each layer does",
            twins=twins,
            shuffled=shuffled,
            findings=findings,
            curves=layer_curves,
            controls=control_tables,
            controlled=[
                (statistic(result.meta, name).title, *control_tables.controls_table(result, name))
                for name in control_tables.CONTROLLED
            ],
            caution=caution,
            hero=first,
            audited=audited,
            attention=attention,
            uri_of=figure_uri,
            sections=_sections(result, twins, shuffled, stage, first, progress),
            command=_command(result, twins, data, audited),
            sources=_sources(result, twins),
        )
        write_text(stage / "report.html", page)
    return Path(out) / "report.html"


def _caution(result: SweepResult, twins: Sweeps) -> str:
    """Returns cautions: on what replaces U, those of every result, and on too few twins."""
    cautions = [instead_of_u(result), result.caution()]
    if 0 < len(twins) < 4:
        cautions.append(
            f"With {counted(len(twins), 'untrained networks')} of each kind most comparisons "
            "with them stay undecided: give 5 (--untrained 5)."
        )
    return " ".join(filter(None, cautions))


def _summary(result: SweepResult, twins: Sweeps, data: str, caution: str) -> str:
    """Returns the text of summary.txt."""
    parts = findings.finding(result, twins), assumed(result.meta)
    table = as_text(*layer_curves.summary(result, twins))
    words = f"{' '.join(part for part in parts if part)}\n"
    words += f"{layer_curves.heading(result, twins, data)}\n{caution}\n{table}\n\n"
    words += layer_curves.legend(result)
    words += f"\n{result.sharpest()}\n" * bool(result.sharpest())
    return words + result.controls_text()


def _layers_csv(result: SweepResult, twins: Sweeps) -> str:
    """Returns `result.layers()` as CSV, with the mean, lowest and highest value of the twins."""
    rows = result.layers()
    if twins:
        keys = ["probe", "statistic", "layer"]
        spread = [
            twin.layers()[[*keys, "mean"]].assign(seed=seed) for seed, twin in enumerate(twins)
        ]
        stats = pd.concat(spread).groupby(keys)["mean"].agg(["mean", "min", "max"])
        stats.columns = ["untrained_mean", "untrained_min", "untrained_max"]
        rows = rows.merge(stats.reset_index(), on=keys, how="left")
    return rows.map(cell).to_csv(index=False)


def _sections(
    result: SweepResult,
    twins: Sweeps,
    shuffled: Sweeps,
    out: Path,
    above: Sequence[Panel],
    progress: bool,
) -> list[dict[str, Any]]:
    """Writes the figure of each statistic and returns each probe's part of the page.

    above: the panels at the top of the page, which are not drawn again.
    """
    sections: dict[str, dict[str, Any]] = {}
    drawn, every = {one.name for one in above}, layer_curves.names(result)
    for name in tqdm(every, desc="figures", leave=False, disable=not progress):
        probe = name.split(".")[0]
        settings = result.meta["probes"][probe]["settings"]
        new = {
            "id": f"section-{len(sections)}",
            "heading": heading(result.meta, probe),
            "settings": ", ".join(f"{key} = {value}" for key, value in settings.items()),
            "probe": probe if probe in BUILT_IN else "",
            "panels": [],
            "notes": result.sharpest().splitlines() if probe == "attention" else [],
        }
        figure = layers(result, name, twins)
        figure.savefig(out / "figures" / f"{file_name(name)}.png", dpi=150)
        panels = sections.setdefault(probe, new)["panels"]
        panels += [] if name in drawn else [panel(result, twins, shuffled, name)]
    return list(sections.values())


def _command(result: SweepResult, twins: Sweeps, data: str, audited: bool) -> list[str]:
    """Returns the command that repeats this measurement; unknown parts are in capitals."""
    meta = result.meta
    words = ["crate-interp", "report", str(meta["model"] or "MODEL")]
    if not meta["model"]:  # a user's own file lacks these fields
        for name, usual in _USUAL.items():
            if (value := meta["config"].get(name)) not in (None, False, usual):
                words += ["--config", f"{name}={json.dumps(value)}"]
    words += ["--data", data or "DATA", "--out", "OUT"]
    words += ["--limit", str(meta["n_samples"]), "--untrained", str(len(twins))]
    probes = list(meta["probes"])
    # a model lacks the points of two of these probes, those of two other attentions
    usual = [name for name in (*DEFAULT, *OF_MEMBERS) if name in probes] == probes
    if not usual or len(probes) != len(DEFAULT):
        words += ["--probes", ",".join(probes)]
    return [*map(shlex.quote, words + ["--audit"] * audited)]


def _sources(result: SweepResult, twins: Sweeps) -> list[tuple[str, str]]:
    seeds = f"official initialisation, seeds 0 to {len(twins) - 1}" if twins else "none"
    seconds = f"{sum(twin.meta['seconds'] for twin in twins):g}"
    pairs = [("untrained twins", seeds), ("seconds for the twins", seconds)]
    return [*sources(result.meta), *pairs]
