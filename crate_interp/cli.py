"""The command line: crate-interp report | audit | compare | segment | atlas | explore | verify ...

Exit codes: 0 done; 1 verify found what fails; 2 it cannot be done as asked, and a line says why;
3 an error that nobody expected, whose traceback --debug shows; 130 interrupted.
"""

import inspect
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

import crate_interp as ci
from crate_interp import asked, terminal
from crate_interp.folders import locked

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_locks = ExitStack()  # of the folders that the command writes; they open when it ends
_places: dict[Path, int | None] = {}  # these folders, and when what was there was saved


def _lock(out: Path) -> Path:
    _places[out] = _saved_at(out)
    return _locks.enter_context(locked(out))


# Options and arguments that several commands have.
Source = Annotated[
    str, typer.Argument(help="A name of `crate-interp models`, a weight file or a saved folder.")
]
Data = Annotated[
    str,
    typer.Option(
        help='"embedded:fashion", "embedded:held-out-text", "imagefolder:DIR" or '
        '"hf:owner/name:split".'
    ),
]
Out = Annotated[Path, typer.Option(help="The folder to write into.", callback=_lock)]
Family = Annotated[str | None, typer.Option(help="Default: inferred from the checkpoint's keys.")]
Step = Annotated[
    str | None, typer.Option("--revision", help="step-N: a checkpoint along the training.")
]
Revision = Annotated[
    str | None,
    typer.Option(help="A commit on the Hub, or step-N of an embedded model."),
]
File = Annotated[str | None, typer.Option(help="A file of a repo on the Hub.")]
Config = Annotated[
    list[str] | None,
    typer.Option(help="A field of the config, such as n_heads=6. Give it once for each field."),
]
Side = Annotated[
    str,
    typer.Argument(
        help="A name of `crate-interp models`, NAME@step-N, a weight file, or the folder of a "
        "saved model or sweep; several with commas between them are seeds."
    ),
]
ProbeNames = Annotated[
    str | None,
    typer.Option(help="Names of probes with commas between them. Default: the usual four."),
]
Limit = Annotated[int | None, typer.Option(help="Use the first samples only.")]
Untrained = Annotated[int, typer.Option(help="How many untrained twins to measure as well.")]


def _show_version(wanted: bool | None) -> None:
    if wanted:
        _say(f"crate-interp {ci.__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    """Load a CRATE, measure what each layer does, read the report."""


@app.command()
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
) -> None:
    """Measure a model layer by layer beside the same network untrained, and write a page."""
    model = _load(source, family, revision, config)
    options: dict[str, Any] = {"probes": _names(probes), "limit": limit, "untrained": untrained}
    path = ci.report(model, data, out, audit=audit, **options)
    _say(path.with_name("summary.txt").read_text(encoding="utf-8"))
    seeds = f"{untrained} seed{'s' * (untrained > 1)}"
    twins = f" (in brackets: untrained, mean of {seeds})" if untrained else ""
    _say(f"Means over samples{twins}. The page: {path}")


@app.command()
def audit(
    source: Source,
    data: Data,
    out: Out,
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    eps: Annotated[float, typer.Option(help="The eps of the rates, as in the paper.")] = 0.1,
    limit: Limit = None,
    untrained: Untrained = 5,
    grid: Annotated[
        bool, typer.Option(help="Measure nulls, ceilings and a grid of eps too.")
    ] = True,
) -> None:
    """Check every layer against the claims of the papers: a table, and a page about it."""
    ci.AuditResult.check_folder(out)
    model = _load(source, family, revision, config)
    result = ci.audit(model, data, eps=eps, limit=limit, untrained=untrained, grid=grid)
    page = ci.viz.audit_page(result, out)
    _say(result.text())
    signs = "+ kept, - broken, ~ depends on the setting, c by construction, ? undecided."
    _say(f"{signs} {result.headline()} {result.caution()} The page: {page}")


@app.command()
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
) -> None:
    """Compare two networks, or groups of them, layer by layer beside their untrained twins."""
    ci.Comparison.check_folder(out)
    load = lambda source, revision: _load(source, family, revision, config)  # noqa: E731
    (one, name), (two, other) = (asked.networks(side, load) for side in (a, b))
    options: dict[str, Any] = {"probes": _names(probes), "limit": limit, "untrained": untrained}
    result = ci.compare(one, two, data, names=(name, other), out=out, **options)
    page = ci.viz.compare_page(result, out)
    _say(f"a: {result.meta['a']['name']}, b: {result.meta['b']['name']}\n\n{result.text()}\n")
    signs = "+ a higher, - a lower, ? not told apart, . nothing to tell them apart by."
    _say(f"{signs} {result.headline()} {result.caution()} The page: {page}")


@app.command()
def segment(
    source: Source,
    data: Annotated[
        str,
        typer.Option(
            help='Images with masks: "embedded:cutouts", "cutouts:DIR", "voc:DIR", "coco:FILE" or '
            '"hf:owner/name:split".'
        ),
    ],
    out: Out,
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
    limit: Limit = None,
    untrained: Untrained = 5,
) -> None:
    """Compare the attention maps of every layer and head with masks, beside chance levels."""
    ci.SegmentResult.check_folder(out)
    model = _load(source, family, revision, config)
    maps: dict[str, Any] = {"scaled": not unscaled, "cls_key": not unscaled}
    shares = {"mass": mass, "fraction": fraction}
    result = ci.segment(model, data, limit=limit, untrained=untrained, **shares, **maps)
    page = ci.viz.segment_page(result, out)
    _say(result.text("mass") + "\n")
    _say(result.text("top") + "\n")
    _say(f"{result.headline()} {result.caution()} The page: {page}")


@app.command()
def atlas(
    source: Source,
    data: Data,
    out: Out,
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    limit: Limit = None,
    top: Annotated[
        int, typer.Option(help="How many patches or contexts to show for each atom.")
    ] = 9,
    ablate: Annotated[
        int,
        typer.Option(help="On how many samples to run the model without an atom; 0: none."),
    ] = 32,
) -> None:
    """Show what every dictionary atom is for: top patches or contexts, effects and neighbours."""
    ci.Atlas.check_folder(out)
    model = _load(source, family, revision, config)
    result = ci.atlas(model, data, top=top, ablate=ablate, limit=limit)
    _say(f"{result.headline()} The pages: {ci.viz.atlas_pages(result, out)}")


@app.command()
def ablate(
    source: Source,
    data: Data,
    out: Out,
    family: Family = None,
    revision: Step = None,
    config: Config = None,
    how: Annotated[str, typer.Option(help="mean or zero: what takes a head's place.")] = "mean",
    metric: Annotated[str, typer.Option(help="loss or accuracy.")] = "loss",
    limit: Limit = None,
) -> None:
    """Measure what each head does for the answers, by ablating it: a table and a heat map."""
    ci.HeadAblation.check_folder(out)
    model = _load(source, family, revision, config)
    result = ci.ablate_heads(model, data, how=how, metric=metric, limit=limit)
    with result.saved_with_pages(out) as stage:
        ci.viz.head_ablation(result).savefig(stage / "heads.png")
    table = result.heads().sort_values("drop", ascending=False).head(10)
    _say(f"{table.to_string(index=False, float_format='{:.4g}'.format)}\n")
    _say(f"{result.headline()} {result.caution()} The heat map: {out / 'heads.png'}")


@app.command()
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
    ring = None if circuit is None else ci.circuits.Circuit.load(circuit)
    model = _load(source, family, revision, config)
    cache, inputs, name = asked.one_sample(model, data, sample)
    page = ci.viz.explore(cache, inputs, circuit=ring, name=name)
    _say(f"{page.title}. The page: {page.save(out / 'explore.html')}")


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
    family: Family = None,
    file: File = None,
    revision: Revision = None,
    config: Config = None,
) -> None:
    """Write a published checkpoint as a folder that `ci.load` reads without further options."""
    options: dict[str, Any] = {"family": family, "file": file, "revision": revision}
    model = ci.convert(source, folder, **options, **_fields(config))
    params = sum(value.numel() for value in model.parameters())
    _say(f"{params:,} parameters in {folder}")


@app.command()
def verify(
    source: Source,
    family: Family = None,
    file: File = None,
    revision: Revision = None,
    config: Config = None,
) -> None:
    """Check a checkpoint and print a JSON report. The exit code is 1 if a check fails."""
    options: dict[str, Any] = {"family": family, "file": file, "revision": revision}
    checked = ci.verify(source, **options, **_fields(config))
    _say(json.dumps(checked, indent=2, default=str))
    if not checked["ok"]:
        raise typer.Exit(1)


@app.command()
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
        _say("  ".join(line))


def _load(source: str, family: str | None, revision: str | None, config: list[str] | None) -> Any:
    return ci.bridge.load(source, family=family, revision=revision, **_fields(config))


def _names(probes: str | None) -> list[str] | None:
    return None if probes is None else [name.strip() for name in probes.split(",")]


def _fields(pairs: list[str] | None) -> dict[str, Any]:
    """Returns the fields of --config: n_heads=6 becomes {"n_heads": 6}.

    A value is JSON, True, False or None; anything else is a string.
    """
    python = {"True": "true", "False": "false", "None": "null"}
    taken = inspect.signature(ci.load).parameters
    fields: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--config {pair!r}: write NAME=VALUE, such as n_heads=6.")
        if name == "family":
            raise ValueError(f"--config {pair!r}: write --family {value}.")
        if name in taken:
            raise ValueError(f"--config {pair!r}: CrateConfig has no field {name!r}.")
        try:
            fields[name] = json.loads(python.get(value, value))
        except (ValueError, RecursionError):
            fields[name] = value
    return fields


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Runs the command line. An error is one line on stderr; --debug shows the traceback."""
    _places.clear()
    with terminal.any_terminal():
        code = terminal.code_of(_run, _place, "--debug" in sys.argv)
    raise SystemExit(code)


def _run() -> None:
    with _locks:
        app()


def _place() -> Path | None:
    """Returns the folder in which the command has finished something, if there is one."""
    done = [out for out, before in _places.items() if _saved_at(out) not in (None, before)]
    return done[0] if done else None


def _saved_at(out: Path) -> int | None:
    """Returns when the result in a folder was saved, or None if there is none."""
    try:
        return (out / "meta.json").stat().st_mtime_ns
    except (OSError, ValueError):
        return None
