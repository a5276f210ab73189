"""ci.report: a page about a model and its data."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from crate_hooks import every_layer
from crate_interp.audits.result import AuditResult
from crate_interp.audits.run import audit as run_audit
from crate_interp.core import checks
from crate_interp.core.folders import check_ours, discard, locked
from crate_interp.core.run_options import Pass, RunOptions, run_options, tqdm
from crate_interp.data import Data, Samples, part
from crate_interp.data.samples import read_runs
from crate_interp.models.hooked import HookedModel
from crate_interp.models.runtimes import with_weights
from crate_interp.probes import resolve
from crate_interp.probes.segmentation_probe import points_of
from crate_interp.questions.batches import check_model, samples_of
from crate_interp.questions.untrained_twins import SAMPLES, shuffled, twin
from crate_interp.results.result import Result
from crate_interp.results.result_files import META
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import Probes, sweep
from crate_interp.viz.attention_images import attention_on_image
from crate_interp.viz.audit_pages import audit_page
from crate_interp.viz.report_pages import report_page

_SHOWN_IMAGES, _SHOWN_LAYERS = 3, 2
_SHARP = "entropy_cls"


@with_weights
def report(
    model: HookedModel,
    data: Data,
    out: str | Path,
    *,
    probes: Probes = None,
    untrained: int = 5,
    audit: bool = False,
    **run: Unpack[Pass],
) -> Path:
    """Writes a report of a model on data into a folder, and returns the path of its report.html.

    Sweeps the model over `data`, and untrained copies over the first 64 samples of `data`. An
    untrained copy has the same architecture with the official random initialisation, from seed 0,
    1, ...; the global random state does not change. An equal number of networks has the model's
    weights in random order, tensor by tensor, in case its training began at another scale. The
    folder also gets the result as SweepResult.save writes it, summary.txt (means by layer, the
    meaning of its columns, the controls), layers.csv (with the copies' mean, lowest and highest)
    and figures/*.png. With `progress`, a line on stderr says at the end how long each part took.

    Args:
        model: A hooked model.
        data: As in `ci.sweep`.
        out: The folder to write into.
        probes: Names of probes, Probe objects, or both. Default: those of `ci.sweep`.
        untrained: How many untrained copies, and networks of shuffled weights, to measure as well.
        audit: Write the page of an audit too (`ci.audit`, with the same `untrained`).
        run: As in `ci.sweep`.

    Returns:
        The path of report.html.

    Raises:
        ValueError: Before work starts, if `out` cannot be written into or holds something other
            than a report, and as `ci.sweep` does.
    """
    untrained = checks.count("untrained", untrained, least=0)
    options = run_options(report, run, Pass)
    # raises for unknown names before work starts
    chosen = None if probes is None else resolve(probes)
    check_model(model)
    samples = samples_of(model, data, options)
    with ExitStack() as locks:
        folder = locks.enter_context(locked(out))
        _check_folder(folder, SweepResult, ("report.html", "summary.txt", "layers.csv"))
        if audit:
            inner = locks.enter_context(locked(folder / "audit"))
            _check_folder(inner, AuditResult, ("audit.html", "audit.txt"))
        # each measurement is saved before the next begins, so that an interrupt costs little
        own = options.of_a_pass()
        result = sweep(model, samples, probes=chosen, **own)
        result.save(folder)
        twins, shuffles = _random_weights(model, samples, chosen, untrained, options)
        if audit:
            discard(folder / "audit", META)  # left by an earlier report
        more: Any = {"progress": options.progress} | _attention(model, samples, result)
        more["data"] = data if isinstance(data, str) else ""
        try:
            if audit:  # takes longest: if it fails, the page is written all the same
                more["audited"] = run_audit(model, samples, untrained=untrained, **own)
                audit_page(more["audited"], folder / "audit")
        finally:
            page = report_page(result, twins, folder, shuffled=shuffles, **more)
    return page


def _check_folder(folder: Path, kind: type[Result], pages: tuple[str, ...]) -> None:
    """Raises ValueError, before work starts, if something in a folder would be lost."""
    kind.check_folder(folder)
    tables = [f"{name}.parquet" for name in (*kind.STORED, *kind.DERIVED)]
    check_ours(folder, META, (*tables, *pages))


def _random_weights(
    model: HookedModel, samples: Samples, probes: Probes, count: int, options: RunOptions
) -> tuple[list[SweepResult], list[SweepResult]]:
    """Sweeps untrained copies of a model, and the model with its weights in random order."""
    if samples.start >= SAMPLES:
        return [], []
    compared = part(samples, samples.start, min(SAMPLES, samples.start + samples.n))
    own = options.of_a_pass() | {"progress": False}
    makes = [partial(make, model, seed) for make in (twin, shuffled) for seed in range(count)]
    bar = tqdm(makes, desc="untrained networks", disable=not options.progress, leave=False)
    results = [sweep(make(), compared, probes=probes, controls=0, **own) for make in bar]
    return results[:count], results[count:]


def _attention(model: Any, samples: Samples, result: SweepResult) -> dict[str, Any]:
    """Returns figures of the CLS attention of each head, or its memberships, and images' names.

    The first images are shown in a few layers: if sharpness was measured, first the layer whose
    head has the sharpest CLS attention; then the last layers.
    """
    first = samples.start
    if model.cfg.kind != "vision":
        return {}
    found = read_runs(samples, first, first + min(_SHOWN_IMAGES, samples.n), False).runs
    if not found:  # none of the images can be decoded
        return {}
    images = torch.cat([piece.inputs for piece in found]).to(model.cfg.device)
    numbers = [piece.start + place for piece in found for place in range(len(piece.inputs))]
    sharp = result.sharpest_heads(_SHARP)["layer"].head(1).astype(int).tolist()
    shown = [*dict.fromkeys([*sharp, *reversed(range(len(model.blocks)))])][:_SHOWN_LAYERS]
    points = every_layer(model, points_of(model.cfg.facts["attention"], True), sorted(shown))
    with torch.no_grad():
        _, cache = model.run_with_cache(images, names_filter=points)
    figures = {layer: attention_on_image(cache, layer, images) for layer in shown}
    names = [] if samples.name_of is None else [samples.name_of(number) for number in numbers]
    return {"attention": figures, "images": names}
