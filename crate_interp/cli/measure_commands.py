"""Commands that measure a model on data."""

from pathlib import Path
from typing import Annotated, Any

import typer

import crate_interp as ci
from crate_interp.cli.chunked_commands import (
    conclude,
    in_chunks,
    loaded,
    measuring,
    page_of,
    say_table,
)
from crate_interp.cli.options import (
    BatchSize,
    Config,
    Data,
    Device,
    Dtype,
    Family,
    Limit,
    Out,
    ProbeNames,
    SharedOut,
    Side,
    Source,
    Step,
    Threads,
    Untrained,
    finding,
    heads_of,
    load,
    names_of,
    say,
    take_threads,
)  # fmt: skip

_HEADS = 10  # that `ablate` prints


def report(
    source: Source,
    data: Data,
    out: Out,
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    probes: ProbeNames = None,
    limit: Limit = None,
    untrained: Untrained = 5,
    audit: Annotated[bool, typer.Option("--audit", help="Write the page of an audit too.")] = False,
    batch_size: BatchSize = 32,
    threads: Threads = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Write a page about a model and its data.

    It measures every layer, beside the same network untrained.
    """
    take_threads(threads)
    model = load(source, family, revision, config, device, dtype)
    options: dict[str, Any] = {"probes": names_of(probes), "limit": limit, "untrained": untrained}
    path = ci.report(model, data, out, audit=audit, batch_size=batch_size, **options)
    say(path.with_name("summary.txt").read_text(encoding="utf-8"))
    say(f"The page: {path}")


@in_chunks
def audit(
    source: Source,
    data: Data,
    out: SharedOut,
    run: dict[str, Any],
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    eps: Annotated[float, typer.Option(help="The eps of the rates, as in the paper.")] = 0.1,
    untrained: Untrained = 5,
    grid: Annotated[
        bool, typer.Option(help="Measure nulls, ceilings and a grid of eps too.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of what the nulls draw.")] = 0,
) -> None:
    """Check every layer against the papers' claims.

    Prints a table and writes a page about it.
    """
    ci.AuditResult.check_folder(out)
    model = loaded(source, family, revision, config, run, out)
    options: dict[str, Any] = {"eps": eps, "untrained": untrained, "grid": grid, "seed": seed}
    result = ci.audit(model, data, out=out, **options, **measuring(run))
    if result is None:
        return
    page = page_of(result, out, ci.viz.audit_page)
    say_table(result, run, f"{result.text()}\n")
    signs = "+ kept, - broken, ~ depends on the setting, c by construction, ? undecided."
    more = f"{page.with_name('audit.txt')} says what each row and column is."
    conclude(run, f"{signs} {more}\n{finding(result)} The page: {page}")


def compare(
    a: Side,
    b: Side,
    out: Out,
    data: Annotated[
        str | None, typer.Option(help="As of `report`; not for saved sweeps, which have theirs.")
    ] = None,
    family: Family = None,
    config: Config = None,
    probes: ProbeNames = None,
    limit: Limit = None,
    untrained: Annotated[
        int | None, typer.Option(help="Untrained twins of each side. Default: 5, of models.")
    ] = None,
    batch_size: BatchSize = 32,
    threads: Threads = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Compare two networks, or two groups of them.

    Layer by layer, beside their untrained twins.
    """
    take_threads(threads)
    ci.Comparison.check_folder(out)
    from crate_interp.cli import argument_parsing

    def take(source: str) -> Any:
        try:
            return load(source, family, None, config, device, dtype)
        except ValueError as error:
            if config:
                raise ValueError(
                    f"{error} --config counts for every network of the comparison: where one needs "
                    "other fields, make a folder of it first with `crate-interp convert`."
                ) from error
            raise

    (one, name), (two, other) = (argument_parsing.networks(side, take) for side in (a, b))
    options: dict[str, Any] = {"probes": names_of(probes), "limit": limit, "untrained": untrained}
    options["batch_size"] = batch_size
    result = ci.compare(one, two, data, names=(name, other), out=out, **options)
    page = ci.viz.compare_page(result, out)
    say(f"a: {result.meta['a']['name']}, b: {result.meta['b']['name']}\n\n{result.text()}\n")
    signs = "+ a higher, - a lower, ? not told apart, . nothing to tell them apart by."
    say(f"{signs} {finding(result)} The page: {page}")


@in_chunks
def segment(
    source: Source,
    data: Annotated[
        str,
        typer.Option(
            help='Images with masks: "embedded:cutouts", "cutouts:DIR", "voc:DIR", "coco:FILE" or '
            '"hf:owner/name:split".'
        ),
    ],
    out: SharedOut,
    run: dict[str, Any],
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    mass: Annotated[float, typer.Option(help="The share of a map that its mask holds.")] = 0.6,
    fraction: Annotated[
        float, typer.Option(help="The share of the patches that the other rule keeps.")
    ] = 0.6,
    unscaled: Annotated[
        bool, typer.Option("--unscaled", help="As in the paper: no 1/sqrt(d_head), no CLS key.")
    ] = False,
    untrained: Untrained = 5,
) -> None:
    """Score the attention map of every head against masks.

    Beside chance levels and untrained networks.
    """
    ci.SegmentResult.check_folder(out)
    model = loaded(source, family, revision, config, run, out)
    maps: dict[str, Any] = {"scaled": not unscaled, "cls_key": not unscaled}
    shares = {"mass": mass, "fraction": fraction}
    options = {"untrained": untrained, **shares, **maps, **measuring(run)}
    result = ci.segment(model, data, out=out, **options)
    if result is None:
        return
    page = page_of(result, out, ci.viz.segment_page)
    say_table(result, run, f"{result.text('mass')}\n\n{result.text('top')}\n\n{result.legend()}\n")
    conclude(run, f"{finding(result)} The page: {page}")


@in_chunks
def atlas(
    source: Source,
    data: Data,
    out: SharedOut,
    run: dict[str, Any],
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    top: Annotated[
        int, typer.Option(help="How many patches or contexts to show for each atom.")
    ] = 9,
    ablate: Annotated[
        int,
        typer.Option(help="On how many samples to run the model without an atom; 0: none."),
    ] = 32,
) -> None:
    """Show what every dictionary atom is for.

    Writes pages of top patches or contexts, effects and neighbours.
    """
    ci.Atlas.check_folder(out)
    model = loaded(source, family, revision, config, run, out)
    result = ci.atlas(model, data, out=out, top=top, ablate=ablate, **measuring(run))
    if result is not None:
        say_table(result, run)
        conclude(run, f"{result.headline()} The pages: {page_of(result, out, ci.viz.atlas_pages)}")


@in_chunks
def ablate(
    source: Source,
    data: Data,
    out: SharedOut,
    run: dict[str, Any],
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    how: Annotated[
        str,
        typer.Option(
            help="mean: over all samples, at each position its own, or zero: what takes the place "
            "of a head's output."
        ),
    ] = "mean",
    metric: Annotated[str, typer.Option(help="loss or accuracy.")] = "loss",
    head: Annotated[
        list[str] | None,
        typer.Option(
            help="Print this head, such as L3H1, whatever its effect. All are measured. Give it "
            "once for each."
        ),
    ] = None,
) -> None:
    """Measure what each head does for the answers.

    By ablating it: a table and a heat map.
    """
    ci.HeadAblation.check_folder(out)
    model = loaded(source, family, revision, config, run, out)
    asked = heads_of(head, model.cfg.n_layers, model.cfg.n_heads)
    result = ci.ablate_heads(model, data, out=out, how=how, metric=metric, **measuring(run))
    if result is None:
        return
    page_of(result, out, _heat_map)
    every = result.heads().sort_values("drop", key=abs, ascending=False, kind="stable")
    largest: Any = enumerate(every.itertuples())
    kept = [i < _HEADS or row.p <= 0.05 or (row.layer, row.head) in asked for i, row in largest]
    shown: Any = every[kept]
    table = shown.to_string(index=False, float_format="{:.4g}".format)
    words = [table, "", *_which(len(every), len(shown)), result.legend(), ""]
    say_table(result, run, "\n".join(words))
    conclude(run, f"{finding(result)} The heat map: {out / 'heads.png'}")


def _which(count: int, shown: int) -> list[str]:
    """Returns a line that says which of so many heads were printed, if not all."""
    if shown == count:
        return []
    return [
        f"{shown} of {count} heads: the {_HEADS} with the largest effects, and all with p of 0.05 "
        "or less. --head L3H1 adds that one, --format csv prints all."
    ]


def _heat_map(result: Any, out: Path) -> None:
    with result.saved_with_pages(out) as stage:
        ci.viz.head_ablation(result).savefig(stage / "heads.png")


@in_chunks
def sweep(
    source: Source,
    data: Data,
    out: SharedOut,
    run: dict[str, Any],
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    probes: ProbeNames = None,
    controls: Annotated[
        int,
        typer.Option(
            help="On how many samples to measure the negative controls: untrained on all, the "
            "others on a part: 5 of the first 32, about an eighth of many. 0: none."
        ),
    ] = 32,
    precision: Annotated[
        str | None, typer.Option(help="bfloat16: run the model under autocast. Default: float32.")
    ] = None,
) -> None:
    """Measure probes in every layer, on data of any size.

    The tables are written when all is measured.
    """
    ci.SweepResult.check_folder(out)
    model = loaded(source, family, revision, config, run, out)
    options: dict[str, Any] = {"probes": names_of(probes), "controls": controls}
    options["precision"] = precision
    result = ci.sweep(model, data, out=out, **options, **measuring(run))
    if result is not None:
        sharpest = result.sharpest()
        words = f"{sharpest}\n" if sharpest else ""
        say_table(result, run, words + result.controls_text())
        conclude(run, f"{finding(result)} The tables: {out}")


@in_chunks
def atoms(
    source: Source,
    data: Data,
    out: SharedOut,
    run: dict[str, Any],
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    top: Annotated[
        int,
        typer.Option(help="How many of its strongest tokens to keep for each atom."),
    ] = 16,
    coactivation: Annotated[
        bool, typer.Option("--coactivation", help="Count pairs of atoms that are on together.")
    ] = False,
) -> None:
    """Measure when every dictionary atom is on.

    How often, how strongly and where.
    """
    ci.AtomResult.check_folder(out)
    model = loaded(source, family, revision, config, run, out)
    options: dict[str, Any] = {"top": top, "coactivation": coactivation}
    result = ci.atoms(model, data, out=out, **options, **measuring(run))
    if result is not None:
        table = result.layers().to_string(index=False, float_format="{:.4g}".format)
        say_table(result, run, f"{table}\n\n{result.legend()}\n")
        conclude(run, f"{result.headline()} The tables: {out}")


def merge(
    folder: Annotated[Path, typer.Argument(help="The folder that the shards of a run share.")],
) -> None:
    """Make the result of a run from its chunks.

    Or list the chunks that are missing.
    """
    result = ci.merge(folder)
    say(f"{result.headline()} The tables: {folder}")
