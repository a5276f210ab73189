"""The page of a report: a model's default measurements beside the same network untrained."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from crate_interp.core.files import write_text
from crate_interp.core.safe_text import cell, file_name, plain
from crate_interp.probes.built_in import BUILT_IN, DEFAULT, heading, statistic
from crate_interp.results.result import ENOUGH, counted, model_name
from crate_interp.results.text_table import as_text
from crate_interp.sweeps import layer_summary
from crate_interp.sweeps.control_tables import (
    CONTROLLED,
    IN_BRACKETS,
    KINDS,
    by_rate,
    controlled,
    controls_table,
    few_controlled,
    rate_reduction_bound,
)
from crate_interp.sweeps.layer_curves import names
from crate_interp.sweeps.report_findings import finding, strip, two_rates
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.sweep_findings import instead_of_u
from crate_interp.viz.figures.by_layer import layers
from crate_interp.viz.figures.labels import quiet
from crate_interp.viz.pages.page import render, sources
from crate_interp.viz.pages.page_pictures import figure_uri
from crate_interp.viz.pages.report_charts import hero, panel

if TYPE_CHECKING:
    import matplotlib.figure


# fields of a config that cannot be told from weights
_OF_NO_FILE = ("n_heads", "channels", "interpolate_pos", "resize", "crop", "mean", "std")


@dataclass(frozen=True)
class AttentionPictures:
    """The attention of an image model's CLS token, for the page of a report.

    figures: a figure for each layer that is shown. images: how many images each of them has.
    uniform: the share of each patch if attention were even. names: the names of the images, if they
    have any.
    """

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
    start: str = "",
) -> Path:
    """Writes a page, its tables and the result (SweepResult.save) into a folder.

    The folder also gets summary.txt (means by layer, the meaning of its columns, the controls),
    layers.csv (layers() with the twins' mean, lowest and highest) and figures/*.png. Returns the
    path of the page. twins: results of the same network with random weights, for one seed each.
    audited: link to the page of an audit, audit/audit.html. data: the name of the data, for the
    command that the page gives to repeat it. start: a caution about the twins.

    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        table = as_text(*layer_summary.summary(result, twins))
        caution = f"{_caution(result)} {start}".strip()
        words = f"{layer_summary.heading(result, twins, data)}\n{caution}\n{table}\n\n"
        words += layer_summary.legend(result)
        words += f"\n{result.sharpest()}\n" * bool(result.sharpest())
        write_text(stage / "summary.txt", words + result.controls_text())
        write_text(stage / "layers.csv", _layers_csv(result, twins))
        (stage / "figures").mkdir()
        page = _page(result, twins, stage, attention, audited, data, caution)
        write_text(stage / "report.html", page)
    return Path(out) / "report.html"


def _page(
    result: SweepResult,
    twins: Sequence[SweepResult],
    out: Path,
    attention: AttentionPictures | None,
    audited: bool,
    data: str,
    caution: str,
) -> str:
    """Writes the figures and returns the page."""
    sections = _sections(result, twins, out)
    tables = [
        (statistic(result.meta, name).title, *controls_table(result, name)) for name in CONTROLLED
    ]
    return render(
        "report.html",
        title=f"{model_name(result.meta)}: what each layer does",
        meta=result.meta,
        finding=finding(result, twins),
        two_rates=two_rates(result),
        caution=caution,
        hero=hero(result, twins),
        strip=strip(result, twins),
        layers=range(result.meta["n_layers"]),
        seeds=len(twins),
        compared=max((twin.meta["n_samples"] for twin in twins), default=0),
        summary=layer_summary.summary(result, twins),
        numbers=layer_summary.numbers(result, twins),
        controls=[(name, header, rows) for name, header, rows in tables if rows],
        bound=rate_reduction_bound(result),
        controlled=controlled(result) if len(result.controls()) else "",
        kinds=KINDS,
        in_brackets=IN_BRACKETS,
        few_controlled=few_controlled(result) if len(result.controls()) else "",
        by_rate=by_rate(result),
        audited=audited,
        attention=None if attention is None else _attention(result, attention, out),
        sections=sections,
        contents=_contents(sections, attention is not None),
        command=_command(result, twins, data, audited),
        sources=_sources(result, twins),
    )


def _layers_csv(result: SweepResult, twins: Sequence[SweepResult]) -> str:
    """Returns layers() with the untrained mean, lowest and highest of each row."""
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
    for layer, figure in shown.figures.items():
        figure.savefig(out / "figures" / f"attention-layer-{layer}.png", dpi=150)
        alt = f"CLS attention of {heads} heads in layer {layer} over {shown.images} images"
        pictures.append({"layer": layer, "alt": alt, "uri": figure_uri(figure)})
    names = [f"image {place}: {plain(name)}" for place, name in enumerate(shown.names)]
    return {"pictures": pictures, "uniform": shown.uniform, "names": "; ".join(names)}


def _sections(result: SweepResult, twins: Sequence[SweepResult], out: Path) -> list[dict[str, Any]]:
    """Writes the figure of each statistic and returns each probe's part of the page."""
    sections: dict[str, dict[str, Any]] = {}
    for name in names(result):
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
        sections.setdefault(probe, new)["panels"].append(panel(result, twins, name))
    return list(sections.values())


def _contents(sections: list[dict[str, Any]], attention: bool) -> list[tuple[str, str]]:
    """Returns the id and the title of each part of the page."""
    parts = [
        ("short", "In short"),
        *((one["id"], one["heading"].split(":")[0]) for one in sections),
    ]
    parts += [("cls", "What the CLS token attends to")] * attention
    parts += [("controls", "Negative controls"), ("numbers", "All numbers")]
    return [*parts, ("sources", "Sources, and how to repeat it")]


def _caution(result: SweepResult) -> str:
    """Returns a warning: what was measured in place of U, and if intervals may be too narrow."""
    n = result.meta["n_samples"]
    few = f"Intervals of {counted(n, result.meta['unit'])} may be too narrow." if n < ENOUGH else ""
    found = result.meta.get("edits")
    edited = f"Measured with edits: {', '.join([*found][:4])}." if found else ""
    return " ".join(words for words in (instead_of_u(result), edited, few) if words)


def _command(
    result: SweepResult, twins: Sequence[SweepResult], data: str, audited: bool
) -> list[str]:
    """Returns the command that repeats this measurement; unknown parts are in capitals."""
    words = ["crate-interp", "report", str(result.meta["model"] or "MODEL")]
    if not result.meta["model"]:  # a user's own file does not hold these
        config = result.meta["config"]
        known = {
            name: config[name] for name in _OF_NO_FILE if config.get(name) not in (None, False)
        }
        words += [
            word
            for name, value in known.items()
            for word in ("--config", f"{name}={json.dumps(value)}")
        ]
    words += ["--data", data or "DATA", "--out", "OUT"]
    words += ["--limit", str(result.meta["n_samples"]), "--untrained", str(len(twins))]
    probes = list(result.meta["probes"])
    words += [] if probes == list(DEFAULT) else ["--probes", ",".join(probes)]
    return [*map(shlex.quote, words + ["--audit"] * audited)]


def _sources(result: SweepResult, twins: Sequence[SweepResult]) -> list[tuple[str, str]]:
    seeds = f"official initialisation, seeds 0 to {len(twins) - 1}" if twins else "none"
    return [
        *sources(result.meta),
        ("untrained twins", seeds),
        ("seconds for the twins", f"{sum(twin.meta['seconds'] for twin in twins):g}"),
    ]
