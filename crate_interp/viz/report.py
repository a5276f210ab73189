"""The report: a model's default measurements beside the same network untrained, as one page and its pictures."""

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from crate_hooks import PATTERN, every_layer
from crate_interp.audits import audit as run_audit
from crate_interp.files import writable, write_text
from crate_interp.probes import resolve
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import Probes, sweep
from crate_interp.sweeps.stream import samples_of, twin
from crate_interp.sweeps.text import as_text
from crate_interp.viz.audit import audit_page
from crate_interp.viz.by_layer import layers
from crate_interp.viz.curves import baseline, curve, names
from crate_interp.viz.on_image import attention_on_image
from crate_interp.viz.page import (
    captioned,
    facts,
    inline_png,
    inline_svg,
    page,
    sources,
    table,
    text,
)
from crate_interp.viz.summary import (
    CONTROLLED,
    controls_table,
    controls_text,
    rate_reduction_bound,
    summary,
)

_SHOWN_IMAGES, _SHOWN_LAYERS = 4, 2


def report(
    model: Any,
    data: Any,
    out: str | Path,
    *,
    probes: Probes = None,
    limit: int | None = None,
    untrained: int = 3,
    audit: bool = False,
    progress: bool = True,
) -> Path:
    """Sweeps the model and `untrained` random twins over `data`, and writes report.html into `out`; returns its path.

    Beside it: the result as SweepResult.save writes it (samples.parquet, ...), summary.txt (the table the page begins
    with), layers.csv (with the twins' mean, lowest and highest), and figures/*.png. A twin is the same architecture
    with the official random initialisation, seeds 0, 1, ...; the global random state is left as it was. audit: a second
    page, audit.html (`ci.audit`, beside one twin). Raises
    ValueError, before work starts, where `out` cannot be written, and as `sweep` does.
    """
    if not isinstance(untrained, int) or untrained < 0:
        raise ValueError(f"untrained={untrained!r}: give a whole number of at least 0.")
    chosen = None if probes is None else resolve(probes)  # said before work starts
    out = writable(Path(out))
    result = sweep(model, data, probes=chosen, limit=limit, progress=progress)
    _remove_figures(out)
    result.save(out)  # before the twins: an interrupt must not cost what has been measured
    twins = [
        sweep(
            twin(model, seed), data, probes=chosen, limit=limit, controls=False, progress=progress
        )
        for seed in tqdm(range(untrained), desc="untrained twins", disable=not progress)
    ]
    write_text(out / "layers.csv", _layers_csv(result, twins))
    write_text(out / "summary.txt", as_text(*summary(result, twins)) + "\n" + controls_text(result))
    (out / "figures").mkdir(exist_ok=True)
    body = [
        *_opening(result, twins),
        *(
            [
                '<p><a href="audit.html">Does each layer do its job?</a> The audit of each claim of the papers.</p>'
            ]
            if audit
            else []
        ),
        *(_attention(model, data, out) if model.cfg.kind == "vision" else []),
        *_figures(result, twins, out),
        *_closing(result, twins),
    ]
    if audit:
        found = run_audit(model, data, limit=limit, untrained=min(untrained, 1), progress=progress)
        audit_page(found, out)
    write_text(out / "report.html", page(f"{_title(result)}: what each layer does", body))
    return out / "report.html"


def _remove_figures(out: Path) -> None:
    """Takes away the figures of an earlier report in this folder, and nothing else: the new page may have fewer."""
    try:
        earlier = names(SweepResult.load(out))
    except ValueError:
        return
    for path in [
        *(out / "figures" / f"{name}.png" for name in earlier),
        *out.glob("figures/attention-layer-*.png"),
    ]:
        path.unlink(missing_ok=True)


def _title(result: SweepResult) -> str:
    return result.meta["model"] or f"{result.meta['config']['family']} model"


def _layers_csv(result: SweepResult, twins: list[SweepResult]) -> str:
    """layers() with the untrained mean, lowest and highest of each row."""
    rows = result.layers()
    if twins:
        keys = ["probe", "statistic", "layer"]
        spread = [
            twin.layers()[[*keys, "mean"]].assign(seed=seed) for seed, twin in enumerate(twins)
        ]
        stats = pd.concat(spread).groupby(keys)["mean"].agg(["mean", "min", "max"])
        stats.columns = ["untrained_mean", "untrained_min", "untrained_max"]
        rows = rows.merge(stats.reset_index(), on=keys, how="left")
    return rows.to_csv(index=False)


def _opening(result: SweepResult, twins: list[SweepResult]) -> list[str]:
    meta = result.meta
    beside = (
        f"; in brackets: the same network with random weights, mean of {len(twins)} seed{'s' * (len(twins) > 1)}"
        if twins
        else ""
    )
    return [
        f"<h1>{text(_title(result))}: what each layer does</h1>",
        f"<p>{meta['n_samples']:,} {meta['unit']}, {meta['n_layers']} layers, {meta['config']['n_heads']} heads. "
        f"Means over {meta['unit']}{beside}. Rates are in nats. R^c is the rate of the tokens against the layer's subspaces: "
        "MSSA compressed where it is lower after than before. Zeros: share of exact zeros in the code. U defect: 0 where the "
        "subspaces' bases are orthonormal. CLS support: how many tokens the CLS token attends to.</p>".replace(
            "R^c", "R<sup>c</sup>"
        ),
        table(*summary(result, twins)),
        *_controls(result),
    ]


def _controls(result: SweepResult) -> list[str]:
    """What the same measures say where there is nothing to find."""
    tables = [(name, controls_table(result, name)) for name in CONTROLLED]
    shown = [(name, *found) for name, found in tables if found[1]]
    if not shown:
        return []
    bound = rate_reduction_bound(result)
    words = (
        f"The same measures on the first {max(result.controls()['n'].tolist())} {result.meta['unit']}: of the untrained network; with "
        "random subspaces of the same singular values; with every head's result written by the next head's output map; and on a "
        "stream of the same energy without structure (R^c depends on Z Z^T alone: it cannot tell which token lies in which "
        f"subspace). For complete orthonormal subspaces R - R^c is at most d/2 ln K = {bound:.4g} nats."
    )
    parts = ["<h2>Negative controls</h2>", f"<p>{text(words)}</p>"]
    for name, header, rows in shown:
        parts += [f"<h3>{text(name)}</h3>", table(header, rows)]
    return parts


def _attention(model: Any, data: Any, out: Path) -> list[str]:
    """CLS attention of each head of the last layers over the first images."""
    samples = samples_of(model, data, None)
    images = samples.read(0, min(_SHOWN_IMAGES, samples.n)).to(model.cfg.device)
    count = len(model.blocks)
    shown = range(max(0, count - _SHOWN_LAYERS), count)
    points = every_layer(model, PATTERN, shown)
    with torch.no_grad():
        _, cache = model.run_with_cache(images, names_filter=points)
    uniform = 1 / cache[points[0]].shape[-1]
    parts = ["<h2>What the CLS token attends to</h2>"]
    for layer in shown:
        figure = attention_on_image(cache, layer, images)
        figure.savefig(out / "figures" / f"attention-layer-{layer}.png", dpi=150)
        alt = (
            f"CLS attention of {model.cfg.n_heads} heads in layer {layer} over {len(images)} images"
        )
        caption = text(
            f"Layer {layer}: brighter patches get more of the CLS token's attention. Each panel is scaled to its own "
            f"largest value, max, a share of the whole; uniform attention would give every patch {uniform:.3f}."
        )
        parts.append(captioned(inline_png(figure, alt), caption))
    return parts


def _figures(result: SweepResult, twins: list[SweepResult], out: Path) -> list[str]:
    parts: list[str] = []
    for name in names(result):
        probe = name.split(".")[0]
        heading = f"<h2>{text(probe.capitalize())}</h2>"
        if heading not in parts:
            settings = result.meta["probes"][probe]["settings"]
            said = ", ".join(f"{key} = {value}" for key, value in settings.items())
            parts += [heading, *([f"<p>Settings: {text(said)}.</p>"] if said else [])]
        figure = layers(result, name, twins)
        figure.savefig(out / "figures" / f"{name}.png", dpi=150)
        how = result.meta["statistics"][name][3]
        parts.append(
            captioned(
                inline_svg(figure, _alt(result, twins, name), salt=name),
                f"<b>{text(name)}</b>. {text(how)}",
            )
        )
    return parts


def _alt(result: SweepResult, twins: list[SweepResult], name: str) -> str:
    drawn, random = curve(result, name), baseline(twins, name)
    unit = result.meta["statistics"][name][0]
    words = f"{name} by layer: {drawn.mean[0]:.4g} in layer {drawn.layers[0]:g}, {drawn.mean[-1]:.4g} in layer {drawn.layers[-1]:g}"
    words += f" ({unit})" if unit else ""
    if random is not None:
        words += f"; untrained {random.mean(axis=0)[0]:.4g} and {random.mean(axis=0)[-1]:.4g}"
    return words + "."


def _closing(result: SweepResult, twins: list[SweepResult]) -> list[str]:
    pairs = [
        *sources(result.meta),
        (
            "untrained twins",
            f"official initialisation, seeds 0 to {len(twins) - 1}" if twins else "none",
        ),
        ("seconds for the twins", f"{sum(twin.meta['seconds'] for twin in twins):g}"),
    ]
    return ["<h2>Where the numbers come from</h2>", facts(pairs)]
