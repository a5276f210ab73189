"""The command line: crate-interp report | audit | segment | atlas | convert | verify | models | --version."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from crate_interp import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool | None) -> None:
    if wanted:
        typer.echo(f"crate-interp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print it."),
    ] = None,
) -> None:
    """Load a CRATE, measure what each layer does, read the report."""


@app.command()
def report(
    source: Annotated[
        str,
        typer.Argument(help="A name of `crate-interp models`, a weight file, or a saved folder."),
    ],
    data: Annotated[
        str,
        typer.Option(
            help='"embedded:fashion", "embedded:held-out-text", "imagefolder:DIR" or "hf:owner/name:split".'
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write into.")],
    family: Annotated[str | None, typer.Option(help="Told from the keys otherwise.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="step-N: a checkpoint along the training.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="A config field, such as n_heads=6; repeatable.")
    ] = None,
    probes: Annotated[
        str | None, typer.Option(help="Probe names with commas; the default four otherwise.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first samples.")] = None,
    untrained: Annotated[int, typer.Option(help="How many random twins to measure beside it.")] = 3,
    audit: Annotated[bool, typer.Option("--audit", help="Write the audit's page too.")] = False,
) -> None:
    """Measure a model layer by layer on data, beside the same network untrained, and write a page about it."""
    import crate_interp as ci

    model = ci.load(source, family=family, revision=revision, **_fields(config or []))
    names = None if probes is None else [name.strip() for name in probes.split(",")]
    path = ci.report(model, data, out, probes=names, limit=limit, untrained=untrained, audit=audit)
    typer.echo(path.with_name("summary.txt").read_text(encoding="utf-8"))
    twins = (
        f" (in brackets: untrained, mean of {untrained} seed{'s' * (untrained > 1)})"
        if untrained
        else ""
    )
    typer.echo(f"Means over samples{twins}. The page: {path}")


@app.command()
def audit(
    source: Annotated[
        str,
        typer.Argument(help="A name of `crate-interp models`, a weight file, or a saved folder."),
    ],
    data: Annotated[str, typer.Option(help="As for `report`.")],
    out: Annotated[Path, typer.Option(help="The folder to write into.")],
    family: Annotated[str | None, typer.Option(help="Told from the keys otherwise.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="step-N: a checkpoint along the training.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="A config field, such as n_heads=6; repeatable.")
    ] = None,
    eps: Annotated[float, typer.Option(help="Of the rates, as in the paper.")] = 0.1,
    limit: Annotated[int | None, typer.Option(help="Only the first samples.")] = None,
    untrained: Annotated[int, typer.Option(help="How many random twins to audit beside it.")] = 1,
) -> None:
    """Ask of every layer whether it does what the papers say: a table of layers and claims, and a page about it."""
    import crate_interp as ci
    from crate_interp.files import writable

    writable(out)
    model = ci.load(source, family=family, revision=revision, **_fields(config or []))
    result = ci.audit(model, data, eps=eps, limit=limit, untrained=untrained)
    page = ci.viz.audit_page(result, out)
    typer.echo(result.text())
    typer.echo(
        f"+ kept, - broken, ? undecided; in brackets: untrained. {result!r}. The page: {page}"
    )


@app.command()
def segment(
    source: Annotated[
        str,
        typer.Argument(help="A name of `crate-interp models`, a weight file, or a saved folder."),
    ],
    data: Annotated[
        str,
        typer.Option(
            help='With masks: "embedded:cutouts", "cutouts:DIR", "voc:DIR", "coco:FILE", "hf:owner/name:split".'
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write into.")],
    family: Annotated[str | None, typer.Option(help="Told from the keys otherwise.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="step-N: a checkpoint along the training.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="A config field, such as n_heads=6; repeatable.")
    ] = None,
    mass: Annotated[float, typer.Option(help="The share of a map that its mask holds.")] = 0.6,
    fraction: Annotated[
        float, typer.Option(help="The share of patches that the other rule keeps.")
    ] = 0.6,
    unscaled: Annotated[
        bool, typer.Option("--unscaled", help="As the paper: no 1/sqrt(d_head), no CLS key.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first samples.")] = None,
    untrained: Annotated[int, typer.Option(help="How many random twins to measure beside it.")] = 1,
) -> None:
    """Ask whether attention maps segment: every layer and head against masks, beside chance levels, and a page about it."""
    import crate_interp as ci
    from crate_interp.files import writable
    from crate_interp.segmentation.result import CELL
    from crate_interp.sweeps.text import as_text
    from crate_interp.viz.segment import sentence

    writable(out)  # said before work starts
    model = ci.load(source, family=family, revision=revision, **_fields(config or []))
    options: dict[str, Any] = dict(
        scaled=not unscaled, cls_key=not unscaled, limit=limit, untrained=untrained
    )
    result = ci.segment(model, data, mass=mass, fraction=fraction, **options)
    page = ci.viz.segment_page(result, model, data, out)
    for rule in ("mass", "top"):
        share = mass if rule == "mass" else fraction
        typer.echo(
            f"{rule} rule, {share:.0%}; Jaccard index over tokens ({', '.join(CELL.values())}):"
        )
        typer.echo(as_text(*result.cells(rule)) + "\n")
    typer.echo(f"{sentence(result)} The page: {page}")


@app.command()
def atlas(
    source: Annotated[
        str,
        typer.Argument(help="A name of `crate-interp models`, a weight file, or a saved folder."),
    ],
    data: Annotated[str, typer.Option(help="As for `report`.")],
    out: Annotated[Path, typer.Option(help="The folder to write into.")],
    family: Annotated[str | None, typer.Option(help="Told from the keys otherwise.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="step-N: a checkpoint along the training.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="A config field, such as n_heads=6; repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first samples.")] = None,
    top: Annotated[
        int, typer.Option(help="How many patches or contexts to show for each atom.")
    ] = 9,
    ablate: Annotated[
        int,
        typer.Option(help="On how many samples to measure what each atom is needed for; 0: none."),
    ] = 2,
) -> None:
    """Show what every dictionary atom is for: pages with its top patches or contexts, its effects and its neighbours."""
    import crate_interp as ci
    from crate_interp.files import writable

    writable(out)
    model = ci.load(source, family=family, revision=revision, **_fields(config or []))
    found = ci.atlas(model, data, top=top, ablate=ablate, limit=limit)
    typer.echo(f"{found!r}. The pages: {ci.viz.atlas_pages(found, model, data, out)}")


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A weight file, a repo on the Hub, or a name of `crate-interp models`."
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(help="A new folder: model.safetensors, config.json and a model card.")
    ],
    family: Annotated[str | None, typer.Option(help="Told from the keys otherwise.")] = None,
    file: Annotated[str | None, typer.Option(help="A file of a repo on the Hub.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="A commit on the Hub, or step-N of an embedded model.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="A config field, such as n_heads=6; repeatable.")
    ] = None,
) -> None:
    """Read a published checkpoint and write it as a folder that `ci.load` takes without further words."""
    import crate_interp as ci
    from crate_interp.models import saving

    saving.check_new(folder)
    model = ci.load(source, family=family, file=file, revision=revision, **_fields(config or []))
    typer.echo(
        f"{sum(value.numel() for value in model.parameters()):,} parameters in {saving.save_new(model, folder)}"
    )


@app.command()
def verify(
    source: Annotated[
        str,
        typer.Argument(help="A weight file, a saved folder, or a name of `crate-interp models`."),
    ],
    family: Annotated[str | None, typer.Option(help="Told from the keys otherwise.")] = None,
    file: Annotated[str | None, typer.Option(help="A file of a repo on the Hub.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="A commit on the Hub, or step-N of an embedded model.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="A config field, such as n_heads=6; repeatable.")
    ] = None,
) -> None:
    """Check a checkpoint and print a JSON report; exit code 1 where a check fails."""
    from crate_interp.checkpoints.verify import to_json
    from crate_interp.checkpoints.verify import verify as check

    report = check(source, family=family, file=file, revision=revision, **_fields(config or []))
    typer.echo(to_json(report))
    if not report["ok"]:
        raise typer.Exit(1)


@app.command()
def models() -> None:
    """List the known models: name, family, size, licence, how far their layout is verified, and where they are."""
    from crate_interp.checkpoints.registry import MODELS

    for row in MODELS:
        where = (
            "embedded"
            if row["embedded"]
            else f"{row['repo']}/{row['file']}"
            if row["file"]
            else row["link"] or row["repo"]
        )
        params = f"{row['params']:,} parameters" if row["params"] else "size unknown"
        steps = (
            f"  revisions: {', '.join(f'step-{step}' for step in row['steps'])}"
            if row["steps"]
            else ""
        )
        typer.echo(
            f"{row['name']}  {row['family'] or '?'}  {params}  {row['licence']}  {row['status']}  {where}{steps}"
        )


def _fields(pairs: list[str]) -> dict[str, Any]:
    """n_heads=6 -> {"n_heads": 6}; a value is JSON, or else a string (and True, False and None as Python writes them)."""
    from crate_interp.config import check_names

    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--config {pair!r}: write NAME=VALUE, such as n_heads=6.")
        check_names({name: value})
        if name == "family":
            raise ValueError(f"--config {pair!r}: write --family {value}.")
        try:
            fields[name] = json.loads(
                {"True": "true", "False": "false", "None": "null"}.get(value, value)
            )
        except ValueError:
            fields[name] = value
    return fields


def main() -> None:
    """The entry point: an error is one readable line and exit code 2; --debug shows the traceback."""
    try:
        app()
    except (ValueError, OSError, KeyError) as error:
        if "--debug" in sys.argv:
            raise
        words = error.args[0] if isinstance(error, KeyError) and error.args else error
        typer.echo(f"crate-interp: {' '.join(str(words).split())}", err=True)
        raise SystemExit(2) from None
