"""What a CRATE costs beside a ViT: operations, parameters, processor time and memory, by depth.

Counted by formula (attention, MSSA, ISTA, MLP), checked against torch's counter, and measured:
processor time of a forward, and peak memory of a forward and of a forward with its backward. The
ViT shares patches, embedding and attention's code style; it has the CRATE's width, or half of it,
which gives as many parameters within a few per cent (12 (d/2)^2 = 3 d^2 for a layer).

A product of an [m, k] and a [k, n] matrix counts as 2 m n k operations; softmax, norms and
activations are not counted, as in torch.utils.flop_counter. N tokens, width d; heads fill the width
and an MLP is 4 d wide.
"""

import sys
import time
import weakref
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from drawing import panels, tidy, titled
from lab import LabResult, Steps, claim, main, result
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from crate_interp import CrateConfig, HookedCrate

sys.path.append(str(Path(__file__).parent.parent))
from plain_vit import PlainViT

NETWORK: dict[str, Any] = {"crate": HookedCrate, "vit": PlainViT}
KINDS = tuple(NETWORK)
IMAGE = {65: (32, 4), 197: (56, 4), 17: (8, 2)}  # tokens with CLS: image and patch size
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


# operations of the parts of a layer: the official code of ISTA takes the three products D y,
# D^T (D y) and D^T y; D y and D^T (y - D y) would take 4 N d^2
OPERATIONS: dict[str, Any] = {
    "attention": lambda n, d: 8 * n * d**2 + 4 * n**2 * d,  # q, k, v, output; scores and values
    "mssa": lambda n, d: 4 * n * d**2 + 4 * n**2 * d,  # one code and the output; scores, values
    "ista": lambda n, d: 6 * n * d**2,
    "mlp": lambda n, d: 16 * n * d**2,
}
PARTS = {"crate": ("mssa", "ista"), "vit": ("attention", "mlp")}


def layer_operations(kind: str, n: int, d: int) -> int:
    """Returns the operations of a layer of a CRATE or of a ViT."""
    return sum(OPERATIONS[part](n, d) for part in PARTS[kind])


def make_network(kind: str, d: int, layers: int, tokens: int, heads: int = 4) -> Any:
    """Returns an untrained CRATE or ViT; both embed and classify alike."""
    side, patch = IMAGE[tokens]
    size: dict[str, Any] = dict(d_model=d, n_layers=layers, n_heads=heads, n_classes=10)
    look: dict[str, Any] = dict(image_size=side, patch_size=patch, channels=1)
    cfg = CrateConfig(family="crate", **size, **look)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORK[kind](cfg).eval()


def images_for(tokens: int, batch: int) -> Tensor:
    """Returns random images that make this many tokens."""
    side, _ = IMAGE[tokens]
    return torch.randn(batch, 1, side, side, generator=torch.Generator().manual_seed(0))


def counted_layer(kind: str, n: int, d: int) -> int:
    """Returns the operations of a layer as torch's counter sees them run."""
    block = make_network(kind, d, 1, 17).blocks[0]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        block(torch.randn(1, n, d, generator=torch.Generator().manual_seed(0)))
    return counter.get_total_flops()


def published_parameters(kind: str, d: int, layers: int, heads: int) -> int:
    """Returns the parameters at a published size: 224x224 images, patch 16, 1,000 classes.

    Nothing is allocated.
    """
    size: dict[str, Any] = dict(d_model=d, n_layers=layers, n_heads=heads, n_classes=1000)
    with torch.device("meta"):
        model = NETWORK[kind](CrateConfig(family="crate", **size))
    return sum(value.numel() for value in model.parameters())


class PeakMemory(TorchDispatchMode):
    """Adds up the bytes of tensors that operations make, until they are freed; keeps the peak.

    What was there before (weights, images) is not counted, and neither is what an operation needs
    inside itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self._sizes = 0, 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(out):
            if (
                isinstance(value, Tensor)
                and id_of(value) not in given
                and id_of(value) not in self._sizes
            ):
                self._add(value)
        return out

    def _add(self, value: Tensor) -> None:
        storage, key = value.untyped_storage(), id_of(value)
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def id_of(value: Tensor) -> int:
    """Returns a number that tensors of one storage share."""
    return value.untyped_storage()._cdata


def peaks(model: Any, images: Tensor) -> dict[str, float]:
    """Returns the peak in MiB of a forward, and of a forward with its backward."""
    with torch.no_grad(), PeakMemory() as forward:
        model(images)
    with PeakMemory() as both:
        model(images).sum().backward()
    model.zero_grad(set_to_none=True)
    return {"forward": forward.peak / 2**20, "training": both.peak / 2**20}


@torch.no_grad()
def seconds(models: dict[str, Any], images: Tensor, repeats: int) -> dict[str, list[float]]:
    """Returns the processor times of forwards of each network, after one to warm up.

    The networks take turns, so that what slows the machine for a while slows all of them.
    """
    found: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats + 1):
        for name, model in models.items():
            started = time.process_time()
            model(images)
            if repeat:
                found[name].append(time.process_time() - started)
    return found


def measured(form: str, layers: int) -> dict[str, dict[str, Any]]:
    """Returns processor times, peaks and the parameters of the networks, by name."""
    tokens = TOKENS[form]
    images = images_for(tokens, BATCH)
    widths = {name: WIDTH[form] // divisor for name, divisor in NETWORKS.items()}
    models = {name: make_network(name.split()[0], d, layers, tokens) for name, d in widths.items()}
    times = seconds(models, images, REPEATS)
    return {
        name: {
            "seconds": times[name],
            "parameters": sum(value.numel() for value in model.parameters()),
            "operations": BATCH * layers * layer_operations(name.split()[0], tokens, widths[name]),
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
