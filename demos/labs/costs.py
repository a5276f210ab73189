"""What a CRATE costs beside a ViT: operations, parameters, processor time and memory, by depth.

Counted by formula (attention, MSSA, ISTA, MLP), checked against torch's counter, and measured:
processor time of a forward, and peak memory of a forward and of a forward with its backward. The
ViT shares patches, embedding and attention's code style; it has the CRATE's width, or half of it,
which gives as many parameters within a few per cent (12 (d/2)^2 = 3 d^2 for a layer).
"""

from functools import partial
from typing import Any

from counted import (
    KINDS,
    counted_layer,
    images_for,
    layer_operations,
    make_network,
    peaks,
    published_parameters,
    seconds,
)
from lab import LabResult, Steps, claim, main, result
from tqdm.auto import tqdm

PUBLISHED = {  # d, layers, heads, millions of parameters as printed
    "CRATE-T": (384, 12, 6, 6.09),
    "CRATE-S": (576, 12, 12, 13.12),
    "CRATE-B": (768, 12, 12, 22.80),
    "CRATE-L": (1024, 24, 16, 77.64),
}
NETWORKS = {"crate": 1, "vit": 1, "vit of half the width": 2}  # by what the width is divided
DEPTHS = {"quick": (2, 4, 8), "full": (2, 4, 6, 8, 12)}
WIDTH = {"quick": 128, "full": 384}
TOKENS, BATCH, REPEATS = {"quick": 65, "full": 197}, 8, 12
SHAPES = ((17, 24), (65, 128), (197, 192))  # (N, d) where formula and counter are compared

HEADLINE = (
    "A CRATE takes {same[ours]:.2f} of the processor time of a ViT of its width, and "
    "{equal[ours]:.2f} of a ViT of as many parameters (operations: {operations})."
)


def kind_of(name: str) -> str:
    """Returns "crate" or "vit"."""
    return name.split()[0]


def measured(form: str, layers: int) -> dict[str, dict[str, Any]]:
    """Returns processor times, peaks and the parameters of the networks, by name."""
    tokens = TOKENS[form]
    images = images_for(tokens, BATCH)
    widths = {name: WIDTH[form] // divisor for name, divisor in NETWORKS.items()}
    models = {name: make_network(kind_of(name), d, layers, tokens) for name, d in widths.items()}
    times = seconds(models, images, REPEATS)
    return {
        name: {
            "seconds": times[name],
            "parameters": sum(value.numel() for value in model.parameters()),
            "operations": BATCH * layers * layer_operations(kind_of(name), tokens, widths[name]),
        }
        | peaks(model, images)
        for name, model in models.items()
    }


def counts() -> dict[str, list[int]]:
    """Returns what the formula and torch's counter say of each kind, N and d."""
    return {
        f"{kind}|{n}|{d}": [layer_operations(kind, n, d), counted_layer(kind, n, d)]
        for kind in KINDS
        for n, d in SHAPES
    }


def parameters_claim(parameters: dict[str, int]) -> dict:
    """Returns the claim on the printed numbers of parameters: the largest difference counts."""
    wrong = max(abs(parameters[name] / 1e6 - row[-1]) for name, row in PUBLISHED.items())
    return claim(
        "costs.parameters", wrong, cases={"": (wrong, wrong)}, n=len(PUBLISHED),
        published=", ".join(f"{row[-1]:.2f}" for row in PUBLISHED.values()),
        size="published size", baseline=parameters["ViT-B"] / 1e6 - PUBLISHED["CRATE-B"][-1],
        why="Two digits are printed.",
    )  # fmt: skip


def ratio_claims(found: dict[str, list[dict]], form: str) -> list[dict]:
    """Returns the claims on time and memory at the largest depth; memory is counted."""
    claims = []
    own = found["crate"][-1]
    for name in list(NETWORKS)[1:]:
        other = found[name][-1]
        pairs = [a / b for a, b in zip(own["seconds"], other["seconds"], strict=True)]
        memory = own["training"] / other["training"]
        given: dict[str, Any] = dict(
            words="the same width" if NETWORKS[name] == 1 else "as many parameters",
            shape=f"d {WIDTH[form]}, {DEPTHS[form][-1]} layers, {TOKENS[form]} tokens",
            size="one core",
            baseline=1.0,
        )
        operations = own["operations"] / other["operations"]
        claims += [
            claim("costs.time", pairs, n=len(pairs), **given,
                  why=f"By operations it would be {operations:.4g}."),
            claim("costs.memory", memory, cases={"": (memory, memory)}, n=1, **given,
                  why="Peaks are counted, without weights."),
        ]  # fmt: skip
    return claims


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by network and depth."""
    layer_counts = steps.do("counts", counts)
    parameters = steps.do(
        "published",
        lambda: {
            **{name: published_parameters("crate", *row[:3]) for name, row in PUBLISHED.items()},
            "ViT-B": published_parameters("vit", *PUBLISHED["CRATE-B"][:3]),
        },
    )
    found: dict[str, list[dict]] = {name: [] for name in NETWORKS}
    for layers in tqdm(DEPTHS[form], desc="depths"):
        rows = steps.do(f"depth-{layers}", partial(measured, form, layers))
        for name in NETWORKS:
            found[name].append(rows[name])
    claims = [parameters_claim(parameters), *ratio_claims(found, form)]
    numbers: list[tuple] = []
    for key, (formula, counter) in layer_counts.items():
        numbers += [("formula", key, 0, 0, formula), ("counter", key, 0, 0, counter)]
    for name, depths in found.items():
        for layers, row in zip(DEPTHS[form], depths, strict=True):
            for quantity in ("forward", "training", "parameters", "operations"):
                numbers.append((quantity, name, 0, layers, row[quantity]))
            for repeat, value in enumerate(row["seconds"]):
                numbers.append(("seconds", name, repeat, layers, value))
    same, _, equal, _ = claims[1:]
    own, *others = (found[name][-1]["operations"] for name in NETWORKS)
    operations = " and ".join(f"{own / other:.2f}" for other in others)
    headline = HEADLINE.format(same=same, equal=equal, operations=operations)
    return result("costs", form, headline, claims, numbers)


def draw(found: LabResult) -> Any:
    """Returns a figure: operations, processor time and memory in training, by depth."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.9))
    shown = {
        "operations": ("operations of the layers, 10^9", 1e9),
        "seconds": ("processor time of a forward, ms", 1e-3),
        "training": ("peak memory in training, MiB", 1),
    }
    for axis, (quantity, (words, unit)) in zip(axes, shown.items(), strict=True):
        for name in NETWORKS:
            table: Any = found.numbers(quantity, setting=name).groupby("place")["value"]
            (line,) = axis.plot(table.median() / unit, "o-", label=name)
            low, high = table.quantile(0.25) / unit, table.quantile(0.75) / unit
            axis.fill_between(low.index, low, high, alpha=0.2, color=line.get_color())
        axis.set_xlabel("layers")
        axis.set_xticks(DEPTHS[found.meta["form"]])
        axis.set_title(words, fontsize=10)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    form = found.meta["form"]
    same, equal = (float(found.table()["ours"].iloc[row]) for row in (1, 3))
    figure.suptitle(
        f"A CRATE takes {same:.2f} of the time of a ViT of its width, {equal:.2f} of one of as "
        f"many parameters\n(d {WIDTH[form]}, {TOKENS[form]} tokens, batch {BATCH}, one core; "
        f"shaded: middle half of {REPEATS} forwards)",
        fontsize=11,
    )
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main(run, draw)
