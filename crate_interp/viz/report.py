"""The page of a report: a model's default measurements beside the same network untrained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from crate_interp.files import write_text
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.text import as_text
from crate_interp.viz.by_layer import layers
from crate_interp.viz.curves import baseline, curve, names
from crate_interp.viz.lettering import quiet
from crate_interp.viz.page import model_name, render, sources
from crate_interp.viz.pictures import figure_uri, inline_svg
from crate_interp.viz.summary import (
    CONTROLLED,
    controls_table,
    controls_text,
    rate_reduction_bound,
    summary,
)
from crate_interp.words import cell, file_name

if TYPE_CHECKING:
    import matplotlib.figure


@dataclass(frozen=True)
class AttentionPictures:
    """What the CLS token of a model of images attends to, for the page of a report.

    figures: a figure for each layer that is shown. images: how many images each of them has.
    uniform: what each patch would get if attention were even.
    """

    figures: Mapping[int, "matplotlib.figure.Figure"]
    images: int
    uniform: float


@quiet()
def report_page(
    result: SweepResult,
    twins: Sequence[SweepResult],
    out: str | Path,
    *,
    attention: AttentionPictures | None = None,
    audited: bool = False,
) -> Path:
    """Writes a page, its tables and the result (SweepResult.save) into a folder.

    Beside report.html lie summary.txt, the table that the page begins with; layers.csv, the table
    of layers with the twins' mean, lowest and highest; and figures/*.png. Returns the path of the
    page. twins: results of the same network with random weights, for one seed each. audited: link
    to the page of an audit, audit/audit.html.

    Raises ValueError if the folder cannot be written, or another process is writing it.
    """
    with result.saved_with_pages(out) as stage:
        words = as_text(*summary(result, twins)) + "\n" + controls_text(result)
        write_text(stage / "summary.txt", words)
        write_text(stage / "layers.csv", _layers_csv(result, twins))
        (stage / "figures").mkdir()
        page = _page(result, twins, stage, attention, audited)
        write_text(stage / "report.html", page)
    return Path(out) / "report.html"


def _page(
    result: SweepResult,
    twins: Sequence[SweepResult],
    out: Path,
    attention: AttentionPictures | None,
    audited: bool,
) -> str:
    """Writes the figures and returns the page."""
    tables = [(name, *controls_table(result, name)) for name in CONTROLLED]
    return render(
        "report.html",
        title=f"{model_name(result.meta)}: what each layer does",
        meta=result.meta,
        seeds=len(twins),
        summary=summary(result, twins),
        controls=[(name, header, rows) for name, header, rows in tables if rows],
        bound=rate_reduction_bound(result),
        controlled=max(result.controls()["n"].tolist(), default=0),
        audited=audited,
        attention=None if attention is None else _attention(result, attention, out),
        sections=_sections(result, twins, out),
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
    """Writes the figures of attention and returns what the page shows of them."""
    heads = result.meta["config"]["n_heads"]
    pictures = []
    for layer, figure in shown.figures.items():
        figure.savefig(out / "figures" / f"attention-layer-{layer}.png", dpi=150)
        alt = f"CLS attention of {heads} heads in layer {layer} over {shown.images} images"
        pictures.append({"layer": layer, "alt": alt, "uri": figure_uri(figure)})
    return {"pictures": pictures, "uniform": shown.uniform}


def _sections(result: SweepResult, twins: Sequence[SweepResult], out: Path) -> list[dict[str, Any]]:
    """Writes the figure of each statistic and returns, for each probe, what the page shows."""
    sections: dict[str, dict[str, Any]] = {}
    for name in names(result):
        probe = name.split(".")[0]
        settings = result.meta["probes"][probe]["settings"]
        section = {
            "heading": probe.capitalize(),
            "settings": ", ".join(f"{key} = {value}" for key, value in settings.items()),
            "statistics": [],
        }
        figure = layers(result, name, twins)
        figure.savefig(out / "figures" / f"{file_name(name)}.png", dpi=150)
        svg = inline_svg(figure, _alt(result, twins, name), salt=name)
        how = result.meta["statistics"][name][3]
        statistic = {"name": name, "how": how, "svg": svg}
        sections.setdefault(probe, section)["statistics"].append(statistic)
    return list(sections.values())


def _alt(result: SweepResult, twins: Sequence[SweepResult], name: str) -> str:
    drawn, random = curve(result, name), baseline(twins, name)
    unit = result.meta["statistics"][name][0]
    first, last = (f"{drawn.mean[place]:.4g} in layer {drawn.layers[place]:g}" for place in (0, -1))
    words = f"{name} by layer: {first}, {last}" + (f" ({unit})" if unit else "")
    if random is not None:
        untrained = random.mean(axis=0)
        words += f"; untrained {untrained[0]:.4g} and {untrained[-1]:.4g}"
    return words + "."


def _sources(result: SweepResult, twins: Sequence[SweepResult]) -> list[tuple[str, str]]:
    seeds = f"official initialisation, seeds 0 to {len(twins) - 1}" if twins else "none"
    return [
        *sources(result.meta),
        ("untrained twins", seeds),
        ("seconds for the twins", f"{sum(twin.meta['seconds'] for twin in twins):g}"),
    ]
