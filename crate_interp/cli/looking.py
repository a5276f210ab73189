"""Commands that look at a checkpoint, or at one sample: explore, convert, verify, models."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import crate_interp as ci
from crate_interp.cli.options import (
    Config,
    Data,
    Family,
    File,
    Out,
    Revision,
    Source,
    Step,
    fields,
    load,
    say,
)


def explore(
    source: Source,
    data: Data,
    out: Out,
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    sample: Annotated[int, typer.Option(help="Which sample of the data to show, from 0.")] = 0,
    circuit: Annotated[
        Path | None, typer.Option(help="A file of Circuit.save: its heads get a ring.")
    ] = None,
) -> None:
    """Write a page on which to point at a patch or token and see what every head does there."""
    from crate_interp.cli import asked

    ring = None if circuit is None else ci.circuits.Circuit.load(circuit)
    model = load(source, family, revision, config)
    cache, inputs, name = asked.one_sample(model, data, sample)
    page = ci.viz.explore(cache, inputs, circuit=ring, name=name)
    say(f"{page.title}. The page: {page.save(out / 'explore.html')}")


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
    family: Family = None,
    file: File = None,
    revision: Revision = None,
    config: Config = None,
) -> None:
    """Write a published checkpoint as a folder that `ci.load` reads without further options."""
    options: dict[str, Any] = {"family": family, "file": file, "revision": revision}
    model = ci.convert(source, folder, **options, **fields(config))
    params = sum(value.numel() for value in model.parameters())
    say(f"{params:,} parameters in {folder}")


def verify(
    source: Source,
    family: Family = None,
    file: File = None,
    revision: Revision = None,
    config: Config = None,
) -> None:
    """Check a checkpoint, a saved result or a run: a JSON report, and exit code 1 if one fails."""
    options: dict[str, Any] = {"family": family, "file": file, "revision": revision}
    checked = ci.verify(source, **options, **fields(config))
    say(json.dumps(checked, indent=2, default=str))
    if not checked["ok"]:
        raise typer.Exit(1)


def models() -> None:
    """List the known models: name, family, size, licence, status of their layout, location."""
    table = ci.list_models().astype(object)
    for row in table.where(table.notna(), None).to_dict("records"):
        where = row["link"] or row["repo"]
        where = f"{row['repo']}/{row['file']}" if row["file"] else where
        where = "embedded" if row["embedded"] else where
        size = f"{row['params']:,} parameters" if row["params"] else "size unknown"
        line = [row["name"], row["family"] or "?", size, row["licence"], row["status"], where]
        if row["steps"]:
            line.append(f"revisions: {', '.join(f'step-{step}' for step in row['steps'])}")
        say("  ".join(line))
