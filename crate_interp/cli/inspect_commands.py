"""Commands that show a checkpoint or one sample: explore, graph, convert, inspect, models."""

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

import crate_interp as ci
from crate_interp.cli import options
from crate_interp.cli.command_options import ALONE, Asked, on_data

NAMED = 256  # samples of the data from which atoms get their names


@on_data(
    of=None,
    leading=ALONE,
    sample="Which sample of the data to show, from 0.",
    size="The side of a larger image, for finer maps of the same model.",
    circuit="A file that Circuit.save wrote; its heads get a ring.",
    without="Let the page switch off a head, an atom or a patch; the model runs for each.",
)
def explore(
    asked: Asked,
    sample: int = 0,
    size: int | None = None,
    circuit: Path | None = None,
    without: bool = False,
) -> None:
    """Write a page that shows one sample in detail.

    Point at a patch or token on the page to see what every head does there.
    """
    from crate_interp.cli import argument_parsing

    ring = None if circuit is None else ci.circuits.Circuit.load(circuit)
    cache, inputs, name = argument_parsing.one_sample(asked.model, asked.data, sample, size)
    off = ci.circuits.switched_off(asked.model, inputs[0]) if without else None
    page = ci.viz.explore(cache, inputs, circuit=ring, name=name, without=off)
    options.say(f"{page.title}. The page: {page.save(asked.out / 'explore.html')}")


@on_data(
    of=None,
    leading=ALONE,
    sample="Which sample of the data to explain, from 0.",
    target="A class or token, by number or name; two with a comma for their difference.",
    position="The token of a text after which the answer comes.",
    freeze="What is held constant: pattern, norm, or pattern,norm.",
    most="How many codes to look at.",
    seed="Draws random nodes and the untrained network.",
)
def graph(
    asked: Asked,
    sample: int = 0,
    target: str | None = None,
    position: int | None = None,
    freeze: str = "",
    most: int = 200,
    seed: int = 0,
) -> None:
    """Explain one answer by a graph of codes, and write it with its page.

    The page is OUT/graph.html; OUT/explore.html is the explorer of the same sample, and
    OUT/graph.json the graph as circuit-tracer's page reads it.
    """
    from crate_interp.cli import argument_parsing

    model = asked.model
    cache, inputs, name = argument_parsing.one_sample(model, asked.data, sample)
    named = ci.circuits.atom_names(model, asked.data, limit=NAMED, progress=False)
    found = ci.graph(
        model, inputs, names=named, target=argument_parsing.answers(target), position=position,
        freeze=[word for word in freeze.split(",") if word], most=most, seed=seed,
    )  # fmt: skip
    with found.saved_with_pages(asked.out) as stage:
        ci.viz.graph(found).save(stage / "graph.html")
        found.to_circuit_tracer(stage / "graph.json")
        end = found.meta["target"]["position"]
        if end is not None:  # the explorer has the same tokens, and so the same answer
            inputs = inputs[:, : end + 1]
            _, cache = model.run_with_cache(inputs)
        page = ci.viz.explore(cache, inputs, name=name, graph="graph.html")
        page.save(stage / "explore.html")
    options.say(f"{found.headline()}\nThe page: {asked.out / 'graph.html'}")


def convert(
    source: Annotated[
        str, Argument(help="A weight file, a repo on the Hub, or a name of `crate-interp models`.")
    ],
    out: Annotated[
        Path, Option(help="A new folder: model.safetensors, config.json and a model card.")
    ],
    family: options.Family = None,
    file: options.File = None,
    revision: options.Revision = None,
    config: options.Config = None,
    rename: options.Rename = None,
    weights: options.Weights = None,
) -> None:
    """Write a checkpoint as a folder that ci.load reads.

    Loading the folder needs no further options.
    """
    source, revision = options.revised(source, revision)
    arguments: dict[str, Any] = {"family": family, "file": file, "revision": revision}
    arguments |= options.chosen(rename, weights)
    model = ci.convert(source, out, **arguments, **options.fields(config))
    params = sum(value.numel() for value in model.parameters())
    options.say(f"{params:,} parameters in {out}")
    for words in _lacks(model.cfg):
        options.say(words)


def _lacks(cfg: Any) -> list[str]:
    """Returns a sentence for each field that an image model's config lacks, on what needs it."""
    lacks = []
    if getattr(cfg, "mean", 0) is None:
        lacks.append(
            "The folder has no mean and std: pictures need --config mean=... and --config std=..."
        )
    if getattr(cfg, "labels", "") is None:
        lacks.append(
            "The folder has no labels: for the loss on pictures in a folder per class, ablate and "
            'atlas need --config \'labels=["...", "..."]\', in the order of the outputs.'
        )
    return lacks


def inspect(
    source: options.Source,
    family: options.Family = None,
    file: options.File = None,
    revision: options.Revision = None,
    config: options.Config = None,
    rename: options.Rename = None,
    weights: options.Weights = None,
) -> None:
    """Say what a checkpoint holds: its layout, its settings, and where each setting comes from.

    "assumed": no tensor and no file gives the setting, so that a published default stands for it.
    """
    from crate_interp.checkpoints.inspection import Source, inspect_lines

    source, revision = options.revised(source, revision)
    fields = options.fields(config)
    for line in inspect_lines(Source(source, family, file, revision, rename, fields, {}, weights)):
        options.say(line)


def models(as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False) -> None:
    """List the known models.

    Shows name, family, size, licence, status of the layout and location. "verified on fixture": the
    layout was checked against the authors' code; "layout inferred": no file was there to check it.
    """
    table = ci.list_models().astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    if as_json:
        options.say(json.dumps(rows, indent=2, default=str))
        return
    lines = [("name", "family", "parameters", "licence", "status", "where")]
    lines += [_model_line(row) for row in rows]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if at == 2 else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, wide, strict=True))
        ]
        options.say("  ".join(cells).rstrip())


def _model_line(row: dict[str, Any]) -> tuple[str, ...]:
    where = row["link"] or row["repo"]
    where = f"{row['repo']}/{row['file']}" if row["file"] else where
    where = "embedded" if row["embedded"] else where
    if row["steps"]:
        where += f", revisions {', '.join(f'step-{step}' for step in row['steps'])}"
    size = f"{row['params']:,}" if row["params"] else "unknown"
    return row["name"], row["family"] or "?", size, row["licence"], row["status"], where
