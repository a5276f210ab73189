"""What a CRATE costs beside a ViT: operations, parameters, processor time and memory, by depth.

Counted by formula (attention, MSSA, ISTA, MLP), checked against torch's counter, and measured:
processor time of a forward, and peak memory of a forward and of a forward with its backward. The
ViT shares patches, embedding and attention's code style; it has the CRATE's width, or half of it,
which gives as many parameters within a few per cent (12 (d/2)^2 = 3 d^2 for a layer).
"""

from functools import partial
from itertools import product
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
from drawing import panels, tidy, titled
from lab import LabResult, Steps, claim, main, result

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

SHOWN = {  # quantity: its words in the figure, and the unit
    "operations": ("operations of the layers, 10^9", 1e9),
    "seconds": ("processor time of a forward, ms", 1e-3),
    "training": ("peak memory in training, MiB", 1),
}


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
        for kind, (n, d) in product(KINDS, SHAPES)
    }


def parameters() -> dict[str, int]:
    """Returns the parameters of the published sizes, and those of a ViT-B."""
    found = {name: published_parameters("crate", *row[:3]) for name, row in PUBLISHED.items()}
    return found | {"ViT-B": published_parameters("vit", *PUBLISHED["CRATE-B"][:3])}


def parameters_claim(found: dict[str, int]) -> dict:
    """Returns the claim on the printed numbers of parameters: the largest difference counts."""
    wrong = max(abs(found[name] / 1e6 - row[-1]) for name, row in PUBLISHED.items())
    return claim(
        "costs.parameters", wrong, cases={"": wrong}, n=len(PUBLISHED),
        printed=", ".join(f"{row[-1]:.2f}" for row in PUBLISHED.values()),
        baseline=found["ViT-B"] / 1e6 - PUBLISHED["CRATE-B"][-1],
    )  # fmt: skip


def ratio_claims(own: dict, other: dict, **words: Any) -> list[dict]:
    """Returns the claims on time and memory of a CRATE beside a ViT; memory is counted."""
    pairs = [a / b for a, b in zip(own["seconds"], other["seconds"], strict=True)]
    memory, operations = (own[name] / other[name] for name in ("training", "operations"))
    return [
        claim("costs.time", pairs, baseline=1.0, operations=operations, **words),
        claim("costs.memory", memory, cases={"": memory}, n=1, baseline=1.0, **words),
    ]


def run(form: str, steps: Steps) -> LabResult:
    """Returns the claims, and each number by network and depth."""
    layer_counts = steps.do("counts", counts)
    claims = [parameters_claim(steps.do("published", parameters))]
    jobs = {f"depth-{layers}": partial(measured, form, layers) for layers in DEPTHS[form]}
    depths = list(steps.all(jobs, "depths").values())
    own, *others = (depths[-1][name] for name in NETWORKS)
    shape = f"d {WIDTH[form]}, {DEPTHS[form][-1]} layers, {TOKENS[form]} tokens"
    for other, words in zip(others, ("the same width", "as many parameters"), strict=True):
        claims += ratio_claims(own, other, words=words, shape=shape)
    numbers: list[tuple] = []
    for key, (formula, counter) in layer_counts.items():
        numbers += [("formula", key, 0, 0, formula), ("counter", key, 0, 0, counter)]
    for name, (layers, rows) in product(NETWORKS, zip(DEPTHS[form], depths, strict=True)):
        for quantity in ("forward", "training", "parameters", "operations"):
            numbers.append((quantity, name, 0, layers, rows[name][quantity]))
        for repeat, value in enumerate(rows[name]["seconds"]):
            numbers.append(("seconds", name, repeat, layers, value))
    operations = " and ".join(f"{own['operations'] / other['operations']:.2f}" for other in others)
    return result("costs", form, claims, numbers, operations=operations)


def draw(found: LabResult) -> Any:
    """Returns a figure: operations, processor time and memory in training, by depth."""
    figure, axes = panels(len(SHOWN), size=(11, 3.9))
    form = found.meta["form"]
    for axis, (quantity, (words, unit)) in zip(axes, SHOWN.items(), strict=True):
        for name in NETWORKS:
            table: Any = found.numbers(quantity, setting=name).groupby("place")["value"]
            (line,) = axis.plot(table.median() / unit, "o-", label=name)
            low, high = table.quantile(0.25) / unit, table.quantile(0.75) / unit
            axis.fill_between(low.index, low, high, alpha=0.2, color=line.get_color())
        axis.set_xticks(DEPTHS[form])
        axis.set_ylim(bottom=0)
        tidy(axis, legend=8 * (axis is axes[0]), xlabel="layers", title=words)
    size = {"width": WIDTH[form], "tokens": TOKENS[form], "batch": BATCH, "repeats": REPEATS}
    return titled(figure, found, **size)


if __name__ == "__main__":
    main(run, draw)
