"""The commands: what each calls, prints and draws."""

import json as json_text
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from re import fullmatch
from shlex import join, quote
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any

import crate_interp as ci
from crate_interp.circuits.circuit import number_of, place_of
from crate_interp.circuits.excerpts import special_tokens
from crate_interp.cli.request import LOADING, MEASURING, ONE_INPUT, Request, say
from crate_interp.core.safe_text import plain

HEADS = 10  # heads or atoms that are printed
NAMED = 256  # samples of the data from which atoms get their names
_SAMPLE = "Which sample of the data to show, from 0."
_MISSING = {
    "mean": "mean and std: pictures need --config mean=... and --config std=...",
    "labels": "labels: for the loss on pictures in a folder per class, ablate and atlas need "
    '--config \'labels=["...", "..."]\', in the order of the outputs.',
}
_SIDE = (
    "A name of `crate-interp models`, NAME@step-N, a weight file, or the folder of a saved model "
    "or sweep. Separate several seeds with commas."
)


@dataclass(frozen=True)
class Command:
    """What a signature cannot say. verb: the public function whose options the command has."""

    call: Callable[..., None]
    verb: str = ""
    example: str = "crate-tiny-fashion --data embedded:fashion"  # without --out
    fields: Sequence[str] = MEASURING  # of Request
    required: Sequence[str] = ("source", "data")
    without: Sequence[str] = ()  # options of the function that the command lacks


COMMANDS: dict[str, Command] = {}


def command(verb: str = "", **facts: Any) -> Callable[[Callable[..., None]], None]:
    """Returns a decorator that makes a command of a function."""

    def add(call: Callable[..., None]) -> None:
        COMMANDS[call.__name__] = Command(call, verb, **facts)

    return add


@command("report")
def report(request: Request) -> None:
    """Write a page about a model and its data.

    Measures every layer of the model, and of the same network untrained.
    """
    path = ci.report(request.model, request.data, request.out, **request.options)
    summary, _, more = path.with_name("summary.txt").read_text(encoding="utf-8").partition("\n\n")
    finding, _, table = summary.partition("\n")
    request.print(finding, f"The page: {path}, and its charts: figures/*.png", table, more)


@command("sweep")
def sweep(request: Request) -> None:
    """Measure probes in every layer, on data of any size.

    Writes the tables when all samples are measured.
    """
    result = request.measured(ci.sweep)
    from crate_interp.results.result import as_text
    from crate_interp.sweeps.findings import OFFICIAL
    from crate_interp.sweeps.layer_curves import columns, summary

    names = [*dict(columns(result))]
    names = [name for name in names if name in (OFFICIAL, "sparsity.zero_fraction")] or names[:1]
    folder, names = json_text.dumps(str(request.out)), json_text.dumps(names)
    drawn = f'[ci.viz.layers(r, name).savefig({folder} + f"/{{name}}.png") for name in {names}]'
    code = quote(f"import crate_interp as ci; r = ci.SweepResult.load({folder}); {drawn}")
    table = f"{as_text(*summary(result, []))}\nCharts by layer:  python -c {code}"
    more = f"{result.sharpest()}\n{result.controls_text()}"
    request.print(result, f"The tables: {request.out}", table, more)


@command("audit", example="crate-tiny-fashion --data embedded:fashion --limit 64")
def audit(request: Request) -> None:
    """Check every layer against the papers' claims.

    Prints a table and writes a page about it.
    """
    result = request.measured(ci.audit)
    from crate_interp.audits.result import legend
    from crate_interp.stats.verdicts import SHOWN

    signs = ", ".join(f"{one.sign} {one.answer}" for one in SHOWN.values() if one.sign)
    request.show(result, ci.viz.audit_page, f"{result.text()}\n{signs}", legend(result))


@command(
    "compare",
    example="crate-tiny-fashion crate-tiny-fashion@step-640 --data embedded:fashion",
    fields=[name for name in MEASURING if name not in ("source", "revision")],
    required=("a", "b"),
)
def compare(request: Request, a: Annotated[str, _SIDE], b: Annotated[str, _SIDE]) -> None:
    """Compare two networks, or two groups of them.

    Compares them layer by layer, next to their untrained copies.
    """
    (one, name), (two, other) = request.networks(a), request.networks(b)
    options = {"names": (name, other), "out": request.out, **request.options}
    result = ci.compare(one, two, request.data, **options)
    sides = ", ".join(f"{side}: {result.meta[side]['name']}" for side in "ab")
    signs = "+ a is higher, - a is lower, o untrained networks may differ as much, ? can't tell, "
    signs += ". no test."
    request.show(result, ci.viz.compare_page, f"{sides}. {signs}\n{result.text()}")


@command(
    "segment", example="crate-tiny-pictures --data embedded:pictures", without=("scaled", "cls_key")
)
def segment(
    request: Request,
    unscaled: Annotated[bool, "As in the paper: no 1/sqrt(d_head), no CLS key."] = False,
) -> None:
    """Score the attention map of every head against the masks of the data.

    Chance levels and untrained networks are scored too.
    """
    result = request.measured(ci.segment, scaled=not unscaled, cls_key=not unscaled)
    more = f"{result.text('top')}\n\n{result.legend()}"
    request.show(result, ci.viz.segment_page, result.text("mass"), more)


@command("atoms")
def atoms(request: Request) -> None:
    """Measure when every dictionary atom is on.

    Counts how often, how strongly and where it is on, and writes a page with the strongest atoms.
    """
    result = request.measured(ci.atoms)
    from crate_interp.circuits.excerpts import excerpts
    from crate_interp.questions.batches import samples_of

    places, samples = result.table("top").query("rank < 4"), samples_of(request.model, request.data)
    write = partial(ci.viz.atoms_page, excerpts=excerpts(places, request.model, samples, False))
    table = result.layers()[["layer", "atoms", "dead", "dense", "firing_rate"]]
    request.show(result, write, _in_text(table), result.legend())


@command("atlas", example="crate-tiny-pictures --data embedded:pictures --limit 16")
def atlas(request: Request) -> None:
    """Show what every dictionary atom is for.

    Writes pages of top patches or contexts, effects and neighbours.
    """
    result = request.measured(ci.atlas)
    columns = ["layer", "atom", "ablation", "ablation_low", "ablation_high", "firing_rate"]
    table = result.table().dropna(subset="ablation")[[*columns, "nearest"]]
    table = table.sort_values("ablation", key=abs, ascending=False, kind="stable").head(HEADS)
    text = _in_text(table) if len(table) else ""
    request.show(result, ci.viz.atlas_pages, text, result.legend())


@command("ablate_heads")
def ablate(
    request: Request,
    head: Annotated[list[str] | None, "Print this head too, such as L3H1. Repeat for more."] = None,
) -> None:
    """Measure what each head does for the answers.

    For one picture, `explore --image FILE --without` does it without labels.

    Ablates one head at a time. Prints a table of the heads that matter most, and writes a page with
    a heat map of all heads.
    """
    cfg, names = request.model.cfg, [name.upper() for name in head or []]
    heads = [f"L{layer}H{head}" for layer in range(cfg.n_layers) for head in range(cfg.n_heads)]
    unknown = [name for name in names if name not in heads]
    if unknown:
        raise ValueError(f"--head {unknown[0]}: the heads of this model are L0H0 to {heads[-1]}.")
    result = request.measured(ci.ablate_heads)
    table = result.heads().assign(name=heads)
    table = table.sort_values("drop", key=abs, ascending=False, kind="stable")
    kept = (table["p"] <= 0.05) | table["name"].isin([*names, *table["name"].head(HEADS)])
    text = _in_text(table[kept][["name", "base", "ablated", "drop", "low", "high", "p"]])
    if not kept.all():
        ways = "--head NAME adds one, --format csv prints all"
        text += f"\n{kept.sum()} of {len(kept)} heads; {ways}."

    write = ci.viz.ablation_page
    with suppress(ValueError):  # a text of more tokens than the explorer shows
        cache, inputs, words = _one_sample(request.model, request.data, 0)
        ci.viz.explore(cache, inputs, **words).save(request.out / "explore.html")
        write = partial(write, explorer="explore.html")
    request.show(result, write, text, result.legend())


@command("circuits.concentration", example="crate-tiny-fashion --data embedded:fashion --limit 64")
def concentration(request: Request) -> None:
    """Measure how few nodes of each layer's code carry an answer.

    Gives (token, coordinate) nodes another sample's values, in the code's own axes, in principal
    axes and in random rotations. Prints a table and draws it by layer.
    """
    result = request.measured(ci.circuits.concentration)
    shares = result.table("shares").pivot(index=["layer", "k"], columns="basis", values="carried")
    table = _in_text(shares[["native", "pca", "rotated"]].reset_index())
    request.show(result, ci.viz.concentration_page, table, f"{result.text()}\n\n{result.legend()}")


@command(
    example="crate-tiny-fashion --data embedded:fashion --without",
    fields=ONE_INPUT,
    required=("source",),
)
def explore(
    request: Request,
    sample: Annotated[int, _SAMPLE] = 0,
    size: Annotated[int | None, "The side of a larger image, for finer maps."] = None,
    circuit: Annotated[Path | None, "A file of Circuit.save; its heads get a ring."] = None,
    without: Annotated[bool, "Let the page switch off a head, an atom or a patch."] = False,
) -> None:
    """Write a page that shows one sample in detail.

    Point at a patch or token on the page to see what every head does there. With --without the
    model runs once for each head, atom and patch.
    """
    ring = None if circuit is None else ci.circuits.Circuit.load(circuit)
    cache, inputs, words = _one_sample(request.model, request.looked_at, sample, size)
    off = ci.circuits.switched_off(request.model, inputs[0]) if without else None
    page = ci.viz.explore(cache, inputs, circuit=ring, without=off, **words)
    if off is not None:
        say(f"--without: {len(off) - 1:,} runs, each without one head, atom or patch.")
    say(f"{page.title}. {page.said}\nThe page: {page.save(request.out / 'explore.html')}")


@command("graph", fields=ONE_INPUT, required=("source",))
def graph(request: Request, sample: Annotated[int, _SAMPLE] = 0) -> None:
    """Explain one answer by a graph of codes, and write it with its page.

    The page is OUT/graph.html; OUT/explore.html is the explorer of the same sample, and
    OUT/graph.json the graph as circuit-tracer's page reads it.
    """
    model = request.model
    cache, inputs, words = _one_sample(model, request.looked_at, sample)
    names = None  # atoms get their names from data
    if request.data is not None:
        names = ci.circuits.atom_names(model, request.data, limit=NAMED, progress=False)
    result = ci.graph(model, inputs, names=names, **request.options)
    with result.saved_with_pages(request.out) as stage:
        ci.viz.graph(result).save(stage / "graph.html")
        result.to_circuit_tracer(stage / "graph.json")
        end = result.meta["target"]["position"]
        if end is not None:  # the explorer has the same tokens, and so the same answer
            inputs = inputs[:, : end + 1]
            _, cache = model.run_with_cache(inputs)
        ci.viz.explore(cache, inputs, graph="graph.html", **words).save(stage / "explore.html")
    say(f"{result.headline()}\nThe page: {request.out / 'graph.html'}")


@command(
    example="crate-tiny-fashion --data embedded:fashion --head L1H0",
    fields=ONE_INPUT,
    required=("source", "head"),
)
def why(
    request: Request,
    head: Annotated[str | None, "The head, such as L1H0."] = None,
    query: Annotated[
        str | None, "The token that looks: from 0, or CLS. Default: CLS, or the last of a text."
    ] = None,
    key: Annotated[
        str | None, "The token that it looks at. Default: the other token with most attention."
    ] = None,
    sample: Annotated[int, _SAMPLE] = 0,
) -> None:
    """Say why a head looks from one token at another: which atoms of the two tokens match.

    Prints the pairs of atoms with the largest parts of the score, and what is left of the attention
    without the key's strongest atoms.
    """
    name = str(head).upper()
    if not fullmatch(r"L\d{1,4}H\d{1,4}", name):
        raise ValueError(f"--head {head}: give a head such as L1H0.")
    layer, number = place_of(name)[0], number_of(name)
    _, inputs, _ = _one_sample(request.model, request.looked_at, sample)
    places: dict[str, Any] = {"query": query, "key": key}
    for side, words in places.items():
        if str(words).upper() == "CLS" and special_tokens(request.model):
            places[side] = 0
        elif words is not None and not words.isdecimal():
            raise ValueError(f"--{side} {words}: give a number from 0, or CLS of an image.")
        elif words is not None:
            places[side] = int(words)
    reason = ci.circuits.why_attends(request.model, inputs, layer, number, **places)
    pairs = reason.table().query("query_atom >= 0 and key_atom >= 0")
    request.show(reason, ci.viz.why_page, _in_text(pairs.head(HEADS)), reason.legend())


@command(example="crate-alpha-b16", fields=(*LOADING, "out"), required=("source",))
def convert(request: Request) -> None:
    """Write a checkpoint as a new folder that ci.load reads.

    The folder gets model.safetensors, config.json and a model card. Loading it needs no further
    options.
    """
    source, arguments = request.checkpoint(request.source)
    model = ci.convert(source, request.out, **arguments)
    say(f"{sum(value.numel() for value in model.parameters()):,} parameters in {request.out}")
    for name, words in _MISSING.items():
        if getattr(model.cfg, name, "") is None:
            say(f"The folder has no {words}")


@command(example="crate-tiny-fashion", fields=LOADING, required=("source",))
def inspect(request: Request) -> None:
    """Say what a checkpoint holds: its layout, its settings, and where each setting comes from.

    "assumed" means that no tensor and no file gives the setting, so we take a published default.
    """
    from crate_interp.checkpoints.load import Source, inspect_lines

    source, fields = request.checkpoint(request.source)
    options = {name: fields.pop(name, None) for name in LOADING[1:] if name != "config"}
    for line in inspect_lines(Source(source, fields=fields, hub={}, **options)):
        say(line)


@command(example="--json", fields=(), required=())
def models(request: Request, json: Annotated[bool, "Print JSON."] = False) -> None:
    """List the known models.

    Shows name, family, size, licence, status of the layout and location. "verified on fixture": the
    layout was checked against the authors' code; "layout inferred": no file was there to check it.
    """
    table = ci.list_models().astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    if json:
        say(json_text.dumps(rows, indent=2, default=str))
        return
    for row in rows:
        where = f"{row['repo']}/{row['file']}" if row["file"] else row["link"] or row["repo"]
        if row["embedded"]:
            steps = ", ".join(f"step-{step}" for step in row["steps"] or ())
            where = f"embedded, revisions {steps}" if steps else "embedded"
        size = f"{row['params']:,}" if row["params"] else "unknown"
        say(f"{row['name']:<24} {row['family'] or '?':<13} {size:>11}  {row['status']}")
        text, ends = f"{where}; {row['licence']}", ("initial_indent", "subsequent_indent")
        indents: Any = dict.fromkeys(ends, " " * 4)
        say(fill(text, get_terminal_size().columns, break_long_words=False, **indents))


def _in_text(table: Any) -> str:
    """Returns a table as text, with four digits a number."""
    return table.to_string(index=False, float_format="{:.4g}".format)


def _one_sample(model: Any, data: Any, sample: int, size: int | None = None) -> tuple:
    """Returns a cache of what the explorer shows of one sample, the sample itself, and words.

    words: the sample's name and the command as it was typed, for `ci.viz.explore`. size: the side
    of a larger image, or None for the model's own size.
    """
    from crate_interp.questions.batches import check_model, samples_of
    from crate_interp.viz.explorer_page import check_count, shown_points

    check_model(model)
    text = model.unit == "windows"
    if size is not None and text:
        raise ValueError("--size is the side of images, but this model reads text.")
    model = model if size is None else model.resized(size)
    if not text:
        check_count(model, model.cfg.n_tokens)
    samples = samples_of(model, data)
    if not 0 <= sample < samples.n:
        raise ValueError(f"--sample {sample}: the data has samples 0 to {samples.n - 1}.")
    inputs = samples.read(sample, sample + 1).to(model.cfg.device)
    if text and inputs.shape[1] == model.cfg.n_ctx > 1:
        inputs = inputs[:, :-1]  # no training has a target for the last place of a window
    ends = shown_points(model)
    points = {"names_filter": lambda name: name.endswith(ends)}
    cache = model.requires_grad_(False).run_with_cache(inputs, **points, **model.full_options)[1]
    label: Any = None if samples.labels is None else samples.labels[sample]
    labels = samples.names or getattr(model.cfg, "labels", None)
    if isinstance(label, int) and labels is not None and 0 <= label < len(labels):
        label = labels[label]
    name = plain(data[0], 60) if isinstance(data, list) else f"sample {sample} of {data}"
    name += "" if label is None else f", {label}"
    return cache, inputs, {"name": name, "command": join(["crate-interp", *sys.argv[1:]])}
