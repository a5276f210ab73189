"""What the labs on embedded models share: the models, their untrained twins, images, intervals."""

import sys
from pathlib import Path

import torch
from lab import mean_and_interval
from torch import Tensor

import crate_interp as ci

sys.path.append(str(Path(__file__).parent.parent))

from train_tiny_cutouts import SHIPPED, composites, loaded  # noqa: E402

FASHION, CUTOUTS = "crate-tiny-fashion", SHIPPED.name
MODELS = (FASHION, CUTOUTS)
UNTRAINED = (0, 1, 2, 3, 4)  # seeds


def untrained(cfg: ci.CrateConfig, seed: int) -> ci.HookedCrate:
    """Returns a network of this shape with random weights; the same seed gives the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ci.HookedCrate(cfg).eval()


def images_of(name: str, n: int) -> tuple[Tensor, Tensor]:
    """Returns the first n test images of a model as it takes them, and their labels `[n]`."""
    rows = (composites() if name == CUTOUTS else ci.data.embedded("fashion"))[:n]
    return loaded(name).preprocess(rows["image"]), torch.tensor(rows["label"])


def spread(values: Tensor) -> dict[str, float]:
    """Returns mean, low and high of a 95 % interval over values `[n]`."""
    mean, (low, high) = mean_and_interval(values.double().tolist())
    return {"mean": mean, "low": low, "high": high}
