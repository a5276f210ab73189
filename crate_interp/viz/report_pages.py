"""The page of a report: a model's default measurements next to the same network untrained."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from crate_interp.audits.result import AuditResult, main_rows
from crate_interp.core.files import write_text
from crate_interp.core.run_options import tqdm
from crate_interp.core.safe_text import cell, file_name
from crate_interp.probes import BUILT_IN, DEFAULT, OF_MEMBERS, heading, statistic
from crate_interp.results.result import as_text
from crate_interp.results.result_files import assumed
from crate_interp.results.sample_ranges import counted
from crate_interp.sweeps import findings, layer_curves
from crate_interp.sweeps.findings import at_attention, ends, instead_of_u
from crate_interp.sweeps.result import SweepResult
from crate_interp.viz.by_layer import change_at_attention, layers
from crate_interp.viz.canvas import fix_layout, quiet, set_title
from crate_interp.viz.page import image_uri, inline_svg, map_tile, result_page, sources

_TITLE = 0.35  # inches, for two lines above a figure
Sweeps = Sequence[SweepResult]
# fields of a config that cannot be inferred from weights, and the value that needs no naming
_OF_NO_FILE = ("n_heads", "channels", "interpolate_pos", "resize", "crop", "mean", "std")
_USUAL = {**dict.fromkeys(_OF_NO_FILE), "transparency": "drop", "bits": 8}


@quiet()
def report_page(
    result: SweepResult,
    twins: Sweeps,
    out: str | Path,
    *,
    attention: Mapping[int, Figure] | None = None,
    images: Sequence[str] = (),
    audited: AuditResult | None = None,
    data: str = "",
    shuffled: Sweeps = (),
    progress: bool = False,
) -> Path:
    """Writes a page, its tables and the result (SweepResult.save) into a folder.

    The folder also gets figures/*.png and two tables: summary.txt has the finding, means by layer,
    the meaning of its columns, and the controls; layers.csv has `result.layers()` with the mean,
    lowest and highest value of the untrained copies. Returns the path of the page.

    twins: results of untrained copies of the network, one result for each seed. attention: a figure
    of `attention_on_image` for each layer shown; images: their names. audited: an audit of the
    network; the page names what it found, and links to its page. data: its name, for the
    command that repeats the report. shuffled: results of the network with its weights in random
    order, a second baseline of random weights. progress: whether to show a bar while the figures
    are drawn.

    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        caution = _caution(result, twins)
        write_text(stage / "summary.txt", _summary(result, twins, data, caution))
        write_text(stage / "layers.csv", _layers_csv(result, twins))
        (stage / "figures").mkdir()
        for layer, figure in (attention or {}).items():
            figure.savefig(stage / "figures" / f"attention-layer-{layer}.png", dpi=150)
        known = layer_curves.names(result)
        change, first = _change(result, twins, shuffled), findings.beginning(known)
        first = first if first or change else known[:3]
        sections = _sections(result, twins, shuffled, stage, progress)
        by_name = {item["name"]: item for part in sections for item in part["panels"]}
        for part in sections:
            part["panels"] = [item for item in part["panels"] if item["name"] not in first]
        read, doubts = None, []
        if audited is not None and (doubts := audited.sentences()[1:]):
            read = main_rows(audited, "cells").query("number == 'compresses' and frame == 'read'")
            read = int((read["high"] < 0).sum())
        said = findings.sentences(result, twins, read)
        said[1:1] = doubts
        seeds = f"official initialisation, seeds 0 to {len(twins) - 1}" if twins else "none"
        page = result_page(
            result,
            "report.html",
            "what does each layer do?",
            said=[said[0], " ".join([*said[1:2], caution]), *said[2:]],
            numbers={},
            twins=twins,
            shuffled=shuffled,
            strip=findings.strip(result, twins, shuffled),
            curves=layer_curves,
            controls=layer_curves,
            controlled=[
                (statistic(result.meta, name).title, *layer_curves.controls_table(result, name))
                for name in layer_curves.CONTROLLED
            ],
            hero=[*change, *(by_name[name] for name in first)],
            audited=audited is not None,
            attention={layer: _tiles(one) for layer, one in (attention or {}).items()},
            images=images,
            sections=sections,
            command=_command(result, twins, data, audited is not None),
            sources=[
                *sources(result.meta),
                ("untrained copies", seeds),
                ("seconds for the copies", f"{sum(twin.meta['seconds'] for twin in twins):g}"),
            ],
        )
        write_text(stage / "report.html", page)
    return Path(out) / "report.html"


def _tiles(figure: Figure) -> list[list[dict[str, str]]]:
    """Returns the panels of `attention_on_image` row by row: the image, then each head's map."""
    rows: list[list[dict[str, str]]] = []
    panels: Any = figure.axes
    for panel in panels:
        place, values = panel.get_subplotspec(), panel.images[0].get_array()
        if place.colspan.start == 0:
            rows.append([])
        uri = map_tile(values) if rows[-1] else image_uri(values)
        rows[-1].append({"uri": uri, "words": panel.get_xlabel().replace("\n", ", ")})
    return rows


def _change(result: SweepResult, twins: Sweeps, shuffled: Sweeps) -> list[dict[str, str]]:
    """Returns the figure of how many per cent attention changes R^c by, if that was measured."""
    step = at_attention(result)
    if step is None:
        return []
    others = [[one for one in map(at_attention, some) if one] for some in (twins, shuffled)]
    said = "; ".join(
        f"layer {step.layers[at]}: {step.before[at]:.4g} before, {step.after[at]:.4g} after"
        for at in dict.fromkeys((0, len(step.layers) - 1))
    )
    title, name = "R^c before and after attention", "compression.subspace_rate_pre, _mid"
    svg = inline_svg(change_at_attention(step, *others), f"{title}: {said}.", "change", False)
    way = "change in per cent, mean over samples; below 0 means compression"
    caption = f"{said} (nats per token)"
    return [{"svg": svg, "title": title, "caption": caption, "way": way, "name": name}]


def _caution(result: SweepResult, twins: Sweeps) -> str:
    """Returns cautions: on what replaces U, and on too few untrained copies."""
    cautions = [instead_of_u(result)]
    if 0 < len(twins) < 4:
        cautions.append(
            f"With {counted(len(twins), 'untrained networks')} of each kind most comparisons "
            "with them say \u201ccan't tell\u201d: give 5 (--untrained 5)."
        )
    return " ".join(filter(None, cautions))


def _summary(result: SweepResult, twins: Sweeps, data: str, caution: str) -> str:
    """Returns the text of summary.txt."""
    parts = *findings.sentences(result, twins), assumed(result.meta)
    table = as_text(*layer_curves.summary(result, twins))
    words = f"{' '.join(part for part in parts if part)}\n"
    words += f"{layer_curves.heading(result, twins, data)}\n{caution} {result.caution()}\n{table}\n"
    words += f"\n{layer_curves.legend(result)}"
    words += f"\n{result.sharpest()}\n" * bool(result.sharpest())
    return words + result.controls_text()


def _layers_csv(result: SweepResult, twins: Sweeps) -> str:
    """Returns `result.layers()` as CSV, with the mean and range of the untrained copies."""
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
    result: SweepResult, twins: Sweeps, shuffled: Sweeps, out: Path, progress: bool
) -> list[dict[str, Any]]:
    """Writes the figure of each statistic and returns each probe's part of the page."""
    sections: dict[str, dict[str, Any]] = {}
    every = layer_curves.names(result)
    for name in tqdm(every, desc="figures", leave=False, disable=not progress):
        probe, record = name.split(".")[0], statistic(result.meta, name)
        settings = result.meta["probes"][probe]["settings"]
        new = {
            "id": f"section-{len(sections)}",
            "heading": heading(result.meta, probe),
            "settings": ", ".join(f"{key} = {value}" for key, value in settings.items()),
            "probe": probe if probe in BUILT_IN else "",
            "panels": [],
            "notes": result.sharpest().splitlines() if probe == "attention" else [],
        }
        figure = layers(result, name, twins, shuffled=shuffled, title="")
        numbers = ends(result, twins, name)
        fix_layout(figure)
        set_title(figure.axes[0], None, record.title)  # the page has it as a heading
        whole = Bbox.from_bounds(0, 0, *(figure.get_size_inches() + (0, _TITLE)))
        figure.savefig(out / "figures" / f"{file_name(name)}.png", dpi=150, bbox_inches=whole)
        figure.axes[0].set_title("")
        svg = inline_svg(figure, f"{record.title} by layer: {numbers}.", name, legend=False)
        panel = {"svg": svg, "title": record.title, "way": record.direction, "name": name}
        panel |= {"caption": f"{numbers}. {record.how}"}
        sections.setdefault(probe, new)["panels"].append(panel)
    return list(sections.values())


def _command(result: SweepResult, twins: Sweeps, data: str, audited: bool) -> str:
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
    return shlex.join(words + ["--audit"] * audited)
