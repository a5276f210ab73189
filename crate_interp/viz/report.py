"""The page of a report: a model's default measurements beside the same network untrained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crate_interp.files import writable, write_text
from crate_interp.sweeps.result import SweepResult
from crate_interp.viz.by_layer import layers
from crate_interp.viz.curves import baseline, curve, names
from crate_interp.viz.page import model_name, render, sources
from crate_interp.viz.pictures import figure_uri, inline_svg
from crate_interp.viz.summary import (
    CONTROLLED,
    controls_table,
    rate_reduction_bound,
    summary,
)

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


def report_page(
    result: SweepResult,
    twins: Sequence[SweepResult],
    out: str | Path,
    *,
    attention: AttentionPictures | None = None,
    audited: bool = False,
) -> Path:
    """Writes report.html and figures/*.png into a folder, and returns the path of the page.

    twins: results of the same network with random weights, for one seed each. audited: link to the
    page of an audit, audit/audit.html.
    """
    out = writable(out)
    (out / "figures").mkdir(exist_ok=True)
    tables = [(name, *controls_table(result, name)) for name in CONTROLLED]
    page = render(
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
    write_text(out / "report.html", page)
    return out / "report.html"


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
        figure.savefig(out / "figures" / f"{name}.png", dpi=150)
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
