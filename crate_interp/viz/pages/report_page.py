"""The page of a report: a model's default measurements next to the same network untrained."""

import json
import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from crate_interp.core.files import write_text
from crate_interp.core.progress import tqdm
from crate_interp.core.safe_text import cell, file_name, plain
from crate_interp.probes.built_in import BUILT_IN, DEFAULT, OF_MEMBERS, heading, statistic
from crate_interp.results.assumed_settings import assumed
from crate_interp.results.grouped_samples import counted
from crate_interp.results.result import as_text, model_name
from crate_interp.sweeps import control_tables, layer_curves
from crate_interp.sweeps.report_findings import (
    beginning,
    ends,
    finding,
    read_through_norm,
    strip,
)
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_findings import Change, at_attention, instead_of_u
from crate_interp.viz.figures.by_layer import PUBLISHED, is_crate_s, layers
from crate_interp.viz.figures.canvas import quiet
from crate_interp.viz.pages.chart import Line, chart
from crate_interp.viz.pages.page import render, sources
from crate_interp.viz.pages.page_pictures import figure_uri

if TYPE_CHECKING:
    import matplotlib.figure

# fields of a config that cannot be inferred from weights
_OF_NO_FILE = ("n_heads", "channels", "interpolate_pos", "resize", "crop", "mean", "std")
_USUAL = {"transparency": "drop", "bits": 8}  # named only if the value is another


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


def hero(
    result: SweepResult, twins: Sequence[SweepResult], shuffled: Sequence[SweepResult]
) -> list[Panel]:
    """Returns the panels at the top of a report, chosen among the measured statistics."""
    known = layer_curves.names(result)
    change = _change(result, twins, shuffled)
    chosen = [panel(result, twins, shuffled, name) for name in beginning(known)]
    if change is not None:
        chosen.insert(0, change)
    return chosen or [panel(result, twins, shuffled, name) for name in known[:3]]


def panel(
    result: SweepResult,
    twins: Sequence[SweepResult],
    shuffled: Sequence[SweepResult],
    name: str,
) -> Panel:
    """Returns the panel of a statistic: mean and interval, heads, random weights, chance."""
    drawn = layer_curves.curve(result, name)
    known = not np.isnan(drawn.low).all()
    lines: list[Line] = []
    record = statistic(result.meta, name)
    how = record.how
    if drawn.heads is not None:
        lines += [Line("head", head) for head in drawn.heads.T]
        how += " Thin lines are heads."
    low, high = (drawn.low, drawn.high) if known else (None, None)
    for kind, networks in (("untrained", twins), ("shuffled", shuffled)):
        random = layer_curves.baseline(networks, name)
        if random is not None:
            ends_of = (random.min(axis=0), random.max(axis=0))
            lines.append(Line(kind, random.mean(axis=0), *ends_of))
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
    lines.append(Line("trained", drawn.mean, low, high))
    svg = _drawn(drawn.layers, lines, f"{record.title} by layer: {numbers}.")
    return Panel(name, record.title, record.direction, svg, numbers, how, words)


def _change(
    result: SweepResult, twins: Sequence[SweepResult], shuffled: Sequence[SweepResult]
) -> Panel | None:
    """Returns the panel that shows by how many per cent attention changes R^c."""
    step = at_attention(result)
    if step is None:
        return None
    lines = [Line("chance", np.zeros(len(step.layers)))]
    for kind, networks in (("untrained", twins), ("shuffled", shuffled)):
        others: list[Change] = [one for one in map(at_attention, networks) if one is not None]
        if others:
            random = 100 * np.stack([one.change for one in others])
            lines.append(Line(kind, random.mean(axis=0), random.min(axis=0), random.max(axis=0)))
    lines.append(Line("trained", 100 * step.change, 100 * step.low, 100 * step.high))
    said = "; ".join(
        f"layer {step.layers[at]}: {step.before[at]:.4g} before, {step.after[at]:.4g} after"
        for at in dict.fromkeys((0, len(step.layers) - 1))
    )
    numbers = f"{said} (nats per token)"
    words = "R^c before and after attention"
    svg = _drawn(step.layers.astype(float), lines, f"Change of R^c at attention: {numbers}.")
    way = "change in per cent, mean over samples; below 0 means compression"
    name = "compression.subspace_rate_pre, _mid"
    return Panel(name, words, way, svg, numbers, chance="no change")


def _drawn(layers: np.ndarray, lines: Sequence[Line], alt: str) -> str:
    return render("chart.svg", **chart(layers, lines, alt))


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
    twins: Sequence[SweepResult],
    out: str | Path,
    *,
    attention: AttentionPictures | None = None,
    audited: bool = False,
    data: str = "",
    shuffled: Sequence[SweepResult] = (),
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
        table = as_text(*layer_curves.summary(result, twins))
        caution = f"{_caution(result)} {_few_seeds(len(twins))}".strip()
        parts = finding(result, twins), read_through_norm(result), assumed(result.meta)
        words = f"{' '.join(part for part in parts if part)}\n"
        words += f"{layer_curves.heading(result, twins, data)}\n{caution}\n{table}\n\n"
        words += layer_curves.legend(result)
        words += f"\n{result.sharpest()}\n" * bool(result.sharpest())
        write_text(stage / "summary.txt", words + result.controls_text())
        write_text(stage / "layers.csv", _layers_csv(result, twins))
        (stage / "figures").mkdir()
        page = _page(result, twins, shuffled, stage, attention, audited, data, caution, progress)
        write_text(stage / "report.html", page)
    return Path(out) / "report.html"


def _page(
    result: SweepResult,
    twins: Sequence[SweepResult],
    shuffled: Sequence[SweepResult],
    out: Path,
    attention: AttentionPictures | None,
    audited: bool,
    data: str,
    caution: str,
    progress: bool,
) -> str:
    """Writes the figures and returns the page."""
    first = hero(result, twins, shuffled)
    sections = _sections(result, twins, shuffled, out, {one.name for one in first}, progress)
    tables = [
        (statistic(result.meta, name).title, *control_tables.controls_table(result, name))
        for name in control_tables.CONTROLLED
    ]
    return render(
        "report.html",
        title=f"{model_name(result.meta)}: what each layer does",
        meta=result.meta,
        finding=finding(result, twins),
        elsewhere=read_through_norm(result),
        seen_as=_seen_as(result.meta["config"]),
        caution=caution,
        hero=first,
        strip=strip(result, twins, shuffled),
        layers=range(result.meta["n_layers"]),
        seeds=len(twins),
        shuffled=len(shuffled),
        compared=max((twin.meta["n_samples"] for twin in twins), default=0),
        summary=layer_curves.summary(result, twins),
        numbers=layer_curves.numbers(result, twins),
        controls=[(name, header, rows) for name, header, rows in tables if rows],
        bound=control_tables.rate_reduction_bound(result),
        controlled=control_tables.controlled(result) if len(result.controls()) else "",
        kinds=control_tables.KINDS,
        in_brackets=control_tables.IN_BRACKETS,
        few_controlled=control_tables.few_controlled(result) if len(result.controls()) else "",
        by_rate=control_tables.by_rate(result),
        audited=audited,
        attention=None if attention is None else _attention(result, attention, out),
        sections=sections,
        command=_command(result, twins, data, audited),
        sources=_sources(result, twins),
    )


def _seen_as(config: Mapping[str, Any]) -> str:
    """Returns how a network sees pictures, such as " seen as 28 x 28 grey pixels", or ""."""
    if not isinstance(config.get("image_size"), (list, tuple)):
        return ""
    height, width = config["image_size"]
    return f" seen as {width} x {height}{' grey' if config.get('channels') == 1 else ''} pixels"


def _layers_csv(result: SweepResult, twins: Sequence[SweepResult]) -> str:
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


def _attention(result: SweepResult, shown: AttentionPictures, out: Path) -> dict[str, Any]:
    """Writes the figures of attention and returns their part of the page."""
    heads = result.meta["config"]["n_heads"]
    pictures = []
    for layer, figure in shown.figures.items():  # the first is at the top of the page
        figure.savefig(out / "figures" / f"attention-layer-{layer}.png", dpi=150)
        alt = f"{shown.heading}, {heads} heads of layer {layer} over {shown.images} images"
        pictures.append({"layer": layer, "alt": alt, "uri": figure_uri(figure)})
    names = [f"image {place}: {plain(name)}" for place, name in enumerate(shown.names)]
    words = {"heading": shown.heading, "uniform": shown.uniform, "names": "; ".join(names)}
    return {"pictures": pictures, **words}


def _sections(
    result: SweepResult,
    twins: Sequence[SweepResult],
    shuffled: Sequence[SweepResult],
    out: Path,
    above: Container[str],
    progress: bool,
) -> list[dict[str, Any]]:
    """Writes the figure of each statistic and returns each probe's part of the page.

    above: the statistics whose panels are at the top of the page, which are not drawn again.
    """
    sections: dict[str, dict[str, Any]] = {}
    every = layer_curves.names(result)
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
        panels += [] if name in above else [panel(result, twins, shuffled, name)]
    return list(sections.values())


def _few_seeds(count: int) -> str:
    """Returns a caution if so few untrained networks leave most comparisons open, else ""."""
    if not 0 < count < 4:
        return ""
    return (
        f"With {counted(count, 'untrained networks')} of each kind most comparisons with them stay "
        "undecided: give 5 (--untrained 5)."
    )


def _caution(result: SweepResult) -> str:
    """Returns cautions: on what replaces U, and those of every result."""
    return f"{instead_of_u(result)} {result.caution()}".strip()


def _command(
    result: SweepResult, twins: Sequence[SweepResult], data: str, audited: bool
) -> list[str]:
    """Returns the command that repeats this measurement; unknown parts are in capitals."""
    words = ["crate-interp", "report", str(result.meta["model"] or "MODEL")]
    if not result.meta["model"]:  # a user's own file lacks these fields
        config = result.meta["config"]
        known = {
            name: config[name] for name in _OF_NO_FILE if config.get(name) not in (None, False)
        }
        known |= {
            name: config[name] for name, usual in _USUAL.items() if config.get(name, usual) != usual
        }
        words += [
            word
            for name, value in known.items()
            for word in ("--config", f"{name}={json.dumps(value)}")
        ]
    words += ["--data", data or "DATA", "--out", "OUT"]
    words += ["--limit", str(result.meta["n_samples"]), "--untrained", str(len(twins))]
    probes = list(result.meta["probes"])
    # a model lacks the points of two of these probes, those of two other attentions
    usual = [name for name in (*DEFAULT, *OF_MEMBERS) if name in probes] == probes
    usual &= len(probes) == len(DEFAULT)
    words += [] if usual else ["--probes", ",".join(probes)]
    return [*map(shlex.quote, words + ["--audit"] * audited)]


def _sources(result: SweepResult, twins: Sequence[SweepResult]) -> list[tuple[str, str]]:
    seeds = f"official initialisation, seeds 0 to {len(twins) - 1}" if twins else "none"
    return [
        *sources(result.meta),
        ("untrained twins", seeds),
        ("seconds for the twins", f"{sum(twin.meta['seconds'] for twin in twins):g}"),
    ]
