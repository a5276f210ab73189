"""The small CRATEs that train_zoo.py trains: their names, their start, their data, their weights.

Every model reads scikit-learn's digits (8x8 grey pixels, 1,797 images, 10 classes) in patches of
2x2, as 16 patches and CLS; d = 32, 4 heads. Two families:

- zoo: the six variants of arXiv 2411.17182, 4 layers, 5 seeds, one budget of steps.
- grid: 4 variants x 2 depths x 2 learning rates x 2 batches, each trained until its cross-entropy
  on the training images is 0.01, for the study of complexity measures.
"""

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from crate_interp import CrateConfig, HookedCrate
from crate_interp.core.files import write

DEMOS = Path(__file__).parent.parent
sys.path.append(str(DEMOS))

from training import learning_rate  # noqa: E402 (a script beside this folder)

WEIGHTS = DEMOS / "weights" / "zoo"
READINGS = WEIGHTS / "readings.csv"  # of the zoo along training
TRAININGS = WEIGHTS / "trainings.csv"  # one row a model
NAMES = {
    "c": "CRATE-C", "n": "CRATE-N", "t": "CRATE-T", "crate": "CRATE",
    "fix": "CRATE-Fix", "identity": "CRATE-Identity",
}  # fmt: skip
SEEDS = (0, 1, 2, 3, 4)
STEPS, BATCH, LR, LAYERS = 800, 64, 2e-3, 4
READ_AT = (0, STEPS // 4, STEPS // 2, STEPS)
READ_ON = 256  # test images that the measure is taken on
TARGET, LOOKS, LIMIT = 0.01, 20, 6000  # of the grid: stop there, look so often, give up then


@dataclass(frozen=True)
class Recipe:
    """How one model is made: its variant, depth, learning rate, batch and seed."""

    family: str
    variant: str
    layers: int
    lr: float
    batch: int
    seed: int

    @property
    def name(self) -> str:
        """The name of its file of weights."""
        if self.family == "zoo":
            return f"zoo-{self.variant}-{self.seed}"
        return f"grid-{self.variant}-{self.layers}-{self.lr:g}-{self.batch}"


def zoo() -> list[Recipe]:
    """Returns the 30 recipes of the zoo."""
    pairs = itertools.product(SEEDS, NAMES)
    return [Recipe("zoo", variant, LAYERS, LR, BATCH, seed) for seed, variant in pairs]


def grid() -> list[Recipe]:
    """Returns the 32 recipes of the grid; each has a seed of its own."""
    axes = itertools.product(("c", "n", "t", "crate"), (2, 4), (1e-3, 4e-3), (32, 128))
    return [Recipe("grid", *each, seed) for seed, each in enumerate(axes)]


def start(recipe: Recipe) -> HookedCrate:
    """Returns the untrained model; the same recipe gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        size: dict[str, Any] = dict(d_model=32, n_heads=4, n_layers=recipe.layers, n_classes=10)
        look: dict[str, Any] = dict(image_size=8, patch_size=2, channels=1)
        return HookedCrate(
            CrateConfig(family="crate", variant=recipe.variant, **size, **look)
        ).eval()


def load(recipe: Recipe, path: Path) -> HookedCrate:
    """Returns the model with weights from a file that `save` wrote."""
    model = start(recipe)
    model.load_state_dict({name: value.float() for name, value in load_file(path).items()})
    return model


def trained(recipe: Recipe) -> HookedCrate:
    """Returns the model with the shipped weights."""
    return load(recipe, WEIGHTS / f"{recipe.name}.safetensors")


def save(model: HookedCrate, path: Path) -> None:
    """Writes the weights in float16, whole or not at all."""
    state = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, lambda part: save_file(state, part))


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images and labels, then those for testing: 897 and 900, stratified.

    Images are float32 [n, 1, 8, 8]: standardised by the mean and deviation of all training pixels.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found: Any = load_digits()
    images = torch.from_numpy(found.images).float().unsqueeze(1)
    labels = torch.from_numpy(found.target).long()
    rows = torch.arange(len(labels))
    halves = train_test_split(rows.numpy(), test_size=900, stratify=labels.numpy(), random_state=0)
    train, test = (torch.from_numpy(half) for half in halves)
    mean, deviation = images[train].mean(), images[train].std()
    scaled = (images - mean) / deviation
    return scaled[train], labels[train], scaled[test], labels[test]


@torch.no_grad()
def scores(model: HookedCrate, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Returns the mean cross-entropy in nats, and the accuracy."""
    logits = model(images)
    hits = (logits.argmax(dim=-1) == labels).double().mean()
    return float(F.cross_entropy(logits, labels)), float(hits)


def fit(
    recipe: Recipe,
    steps: int,
    rate: Callable[[int], float],
    look: Callable[[HookedCrate, int], bool],
    penalty: Callable[[HookedCrate], Any] | None = None,
) -> HookedCrate:
    """Returns a model trained with Adam on the digits, without augmentation.

    rate: the learning rate of a step. look: sees the model before each step and after the last,
    and stops the training by returning True. The order of the images follows from the seed.
    penalty(model): a context manager around the training, whose calls are added to the loss.
    """
    images, labels, _, _ = digits()
    model, order = start(recipe), torch.Generator().manual_seed(recipe.seed)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=recipe.lr)
    left = torch.empty(0, dtype=torch.long)
    with penalty(model) if penalty else nullcontext() as more:
        for step in range(steps):
            if look(model, step):
                return model.eval()
            if len(left) < recipe.batch:
                left = torch.randperm(len(labels), generator=order)
            rows, left = left[: recipe.batch], left[recipe.batch :]
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model.train()(images[rows]), labels[rows])
            (loss + more() if more else loss).backward()
            optimizer.step()
    look(model, steps)
    return model.eval()


def fit_zoo(recipe: Recipe, keep: Callable[[HookedCrate, int], None]) -> HookedCrate:
    """Returns a model of the zoo: STEPS steps, the rate by warm-up and a cosine.

    keep: is given the model at the steps READ_AT.
    """

    def look(model: HookedCrate, step: int) -> bool:
        if step in READ_AT:
            keep(model, step)
        return False

    return fit(recipe, STEPS, lambda step: learning_rate(step, STEPS, recipe.lr), look)


def fit_grid(recipe: Recipe) -> tuple[HookedCrate, int]:
    """Returns a model of the grid, trained at a constant rate, and after how many steps it stopped.

    It stops as soon as the cross-entropy on all training images is at most TARGET, which is looked
    at every LOOKS steps, or after LIMIT steps.
    """
    images, labels, _, _ = digits()
    stopped = LIMIT

    def look(model: HookedCrate, step: int) -> bool:
        nonlocal stopped
        if step % LOOKS or scores(model.eval(), images, labels)[0] > TARGET:
            return False
        stopped = step
        return True

    return fit(recipe, LIMIT, lambda step: recipe.lr, look), stopped
