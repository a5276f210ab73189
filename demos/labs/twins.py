"""What the labs on embedded models share: the models, their untrained twins, images, intervals."""

import torch
from lab import mean_and_interval
from torch import Tensor

import crate_interp as ci

MODELS = {"crate-tiny-fashion": "fashion", "crate-tiny-cutouts": "cutouts"}  # and their images
UNTRAINED = (0, 1, 2, 3, 4)  # seeds


def untrained(cfg: ci.CrateConfig, seed: int) -> ci.HookedCrate:
    """Returns a network of this shape with random weights; the same seed gives the same ones."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ci.HookedCrate(cfg).eval()


def images_of(name: str, n: int) -> tuple[Tensor, Tensor]:
    """Returns the first n embedded images as a model takes them, and their labels `[n]`."""
    rows = ci.data.embedded(MODELS[name])[:n]
    return ci.load(name).preprocess(rows["image"]), torch.tensor(rows["label"])


@torch.no_grad()
def streams(model: ci.HookedCrate, images: Tensor) -> list[Tensor]:
    """Returns Z^0 to Z^L, `[batch, pos, d_model]` each."""
    last = model.cfg.n_layers - 1
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(last + 1)]
    names.append(f"blocks.{last}.hook_resid_post")
    _, cache = model.run_with_cache(images, names_filter=names)
    return [cache[name] for name in names]


def spread(values: Tensor) -> dict[str, float]:
    """Returns mean, low and high of a 95 % interval over values `[n]`."""
    mean, (low, high) = mean_and_interval(values.double().tolist())
    return {"mean": mean, "low": low, "high": high}
