"""Commands that measure a model on data."""

from functools import partial
from typing import Any

import crate_interp as ci
from crate_interp.cli import options
from crate_interp.cli.command_options import ALONE, MODEL, Asked, found_of, on_data
from crate_interp.core.run_options import Pass

_MASKED = (
    'Images with masks: "embedded:pictures", "cutouts:DIR", "voc:DIR", "coco:FILE" or '
    '"hf:owner/name:split".'
)
_COMPARED = "Data, as for `report`. Give none for saved sweeps: they hold their numbers."


@on_data(of=Pass, leading=ALONE, audit="Write the page of an audit too.")
def report(
    asked: Asked,
    probes: options.ProbeNames = None,
    untrained: options.Untrained = 5,
    audit: bool = False,
) -> None:
    """Write a page about a model and its data.

    Measures every layer of the model, and of the same network untrained.
    """
    arguments: dict[str, Any] = {"probes": options.names_of(probes), "audit": audit, **asked.run}
    path = ci.report(asked.model, asked.data, asked.out, untrained=untrained, **arguments)
    summary = path.with_name("summary.txt").read_text(encoding="utf-8")
    finding, _, more = summary.partition("\n")
    table = asked.tables.of_report(path.parent)
    note = "\nIn brackets: untrained networks." * bool(untrained)
    asked.say(None, f"{finding}\nThe page: {path}", table + note, more)


@on_data(
    "AuditResult",
    eps="The eps of the rates, as in the paper.",
    grid="Measure at a grid of eps and with orthonormal U too.",
    seed="Random seed of the null distributions.",
)
def audit(
    asked: Asked,
    eps: float = 0.1,
    untrained: options.Untrained = 5,
    grid: bool = True,
    seed: int = 0,
) -> None:
    """Check every layer against the papers' claims.

    Prints a table and writes a page about it.
    """
    result = asked.measured(ci.audit, eps=eps, untrained=untrained, grid=grid, seed=seed)
    signs = (
        "+ kept (as wanted, and better than its nulls), - broken (not as wanted, or worse than\n"
        "a null), ~ depends on the setting, c missed by an ideal layer too, ? undecided."
    )
    from crate_interp.audits.claim_summary import legend  # imports torch

    asked.show(result, ci.viz.audit_page, f"{result.text()}\n{signs}", legend(result))


@on_data(
    "Comparison",
    Pass,
    {"data": (str | None, None, _COMPARED)}
    | {name: ALONE[name] for name in ("out", "family", "config", "rename", "weights")},
    untrained="Untrained twins to measure for each side that is a model. Default: 5.",
)
def compare(
    asked: Asked,
    a: options.Side,
    b: options.Side,
    probes: options.ProbeNames = None,
    untrained: int | None = None,
) -> None:
    """Compare two networks, or two groups of them.

    Compares them layer by layer, next to their untrained twins.
    """
    from crate_interp.cli import argument_parsing

    (one, name), (two, other) = (argument_parsing.networks(side, asked.load) for side in (a, b))
    arguments: dict[str, Any] = {"probes": options.names_of(probes), "untrained": untrained}
    arguments |= {"names": (name, other), "out": asked.out, **asked.run}
    result = ci.compare(one, two, asked.data, **arguments)
    sides = ", ".join(f"{side}: {result.meta[side]['name']}" for side in "ab")
    signs = (
        "+: a is higher, -: a is lower, o: no more than untrained networks differ, ?: undecided, "
        "a dot: cannot be tested."
    )
    asked.show(result, ci.viz.compare_page, f"{sides}. {signs}\n{result.text()}")


@on_data(
    "SegmentResult",
    leading={**MODEL, "data": (str, MODEL["data"][1], _MASKED)},
    mass="The share of an attention map that its mask holds.",
    fraction="For the other rule (top): the share of the patches that a mask holds.",
    unscaled="As in the paper: no 1/sqrt(d_head), no CLS key.",
    size="The side of larger images, for finer maps of the same model.",
)
def segment(
    asked: Asked,
    mass: float = 0.6,
    fraction: float = 0.6,
    unscaled: bool = False,
    size: int | None = None,
    untrained: options.Untrained = 5,
) -> None:
    """Score the attention map of every head against masks.

    Chance levels and untrained networks are scored too.
    """
    maps = {"scaled": not unscaled, "cls_key": not unscaled, "mass": mass, "fraction": fraction}
    result = asked.measured(ci.segment, size=size, untrained=untrained, **maps)
    more = f"{result.text('top')}\n\n{result.legend()}"
    asked.show(result, ci.viz.segment_page, result.text("mass"), more)


@on_data(
    "Atlas",
    top="How many patches or contexts to show for each atom.",
    ablate="On how many samples to run the model without each atom; 0: none.",
)
def atlas(asked: Asked, top: int = 9, ablate: int = 32) -> None:
    """Show what every dictionary atom is for.

    Writes pages of top patches or contexts, effects and neighbours.
    """
    result = asked.measured(ci.atlas, top=top, ablate=ablate)
    asked.show(result, ci.viz.atlas_pages, asked.tables.of_atlas(result), result.legend())


@on_data(
    "HeadAblation",
    how="What replaces a head's output: mean (over all samples, for each position) or zero.",
    metric="loss or accuracy.",
    head="Print this head, such as L3H1, whatever its effect. Repeat the option for more heads. "
    "All heads are measured.",
)
def ablate(
    asked: Asked, how: str = "mean", metric: str = "loss", head: list[str] | None = None
) -> None:
    """Measure what each head does for the answers.

    Ablates one head at a time. Prints a table and writes a page with a heat map of all heads.
    """
    named = options.heads_of(head, asked.model.cfg.n_layers, asked.model.cfg.n_heads)
    result = asked.measured(ci.ablate_heads, how=how, metric=metric)
    from crate_interp.cli import argument_parsing  # imports torch

    write = partial(argument_parsing.ablation_pages, asked)
    table = asked.tables.of_head_ablation(result, named)
    asked.show(result, write, table, result.legend())


@on_data(
    k="How many nodes to swap. Repeat the option. Default: 4, 16, 64.",
    point="code, or stream for the axes of the stream.",
    rotations="How many random rotations to compare with.",
)
def concentration(
    asked: Asked,
    k: list[int] | None = None,
    point: str = "code",
    rotations: int = 4,
    untrained: options.Untrained = 5,
) -> None:
    """Measure how few nodes of each layer's code carry an answer.

    Swaps (token, coordinate) nodes for those of another sample, beside principal axes and random
    rotations. Prints a table and draws it by layer.
    """
    settings = {"point": point, "rotations": rotations, "untrained": untrained}
    result = asked.measured(ci.circuits.concentration, k=k or (4, 16, 64), **settings)
    more = f"{result.text()}\n\n{result.legend()}"
    asked.show(result, ci.viz.concentration_page, asked.tables.of_concentration(result), more)


@on_data(
    "SweepResult",
    controls="On how many samples to measure the negative controls. An untrained network sees all "
    "of these samples. The other controls see 5 of the first 32 samples, or about an eighth of a "
    "larger number. 0: no controls.",
    precision="bfloat16: run the model under autocast. Default: float32.",
)
def sweep(
    asked: Asked,
    probes: options.ProbeNames = None,
    controls: int = 32,
    precision: str | None = None,
) -> None:
    """Measure probes in every layer, on data of any size.

    Writes the tables when all samples are measured.
    """
    arguments = {"probes": options.names_of(probes), "controls": controls, "precision": precision}
    result = asked.measured(ci.sweep, **arguments)
    sharpest = result.sharpest()
    more = (f"{sharpest}\n" if sharpest else "") + result.controls_text()
    first = f"{found_of(result)}\nThe tables: {asked.out}"
    asked.say(result, first, asked.tables.of_sweep(result), more)


@on_data(
    "AtomResult",
    top="How many of the strongest tokens of each atom to keep.",
    coactivation="Count pairs of atoms that are on together.",
)
def atoms(asked: Asked, top: int = 16, coactivation: bool = False) -> None:
    """Measure when every dictionary atom is on.

    Counts how often, how strongly and where it is on, and writes a page with the strongest atoms.
    """
    result = asked.measured(ci.atoms, top=top, coactivation=coactivation)
    from crate_interp.cli import argument_parsing  # imports torch

    write = partial(argument_parsing.atoms_page, asked)
    asked.show(result, write, asked.tables.of_atoms(result), result.legend())
