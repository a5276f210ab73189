"""What the lab `sparsity_ablation` does to networks: thresholds, noise on codes, trainings."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from crate_interp import CrateConfig, HookedCrate

LR, BATCH, DECAY = 3e-3, 64, 0.05
CORRUPTIONS = ("clean", "pixel noise", "shift", "code noise")
PIXEL_NOISE, CODE_NOISE = 0.5, 0.5  # of the standard deviation of pixels, of the size of a code


@contextmanager
def threshold(model: Any, lambd: float) -> Iterator[Any]:
    """Gives all sparse steps the threshold `lambd` while the context is open."""
    before = [block.mlp.lambd for block in model.blocks]
    try:
        for block in model.blocks:
            block.mlp.lambd = lambd
        yield model
    finally:
        for block, own in zip(model.blocks, before, strict=True):
            block.mlp.lambd = own


def shifted(images: Tensor, shift: tuple[int, int]) -> Tensor:
    """Returns images moved by (down, right) pixels; the edge is filled with their least value."""
    down, right = shift
    padded = F.pad(images, (right, 0, down, 0), value=float(images.min()))
    return padded[..., : images.shape[-2], : images.shape[-1]]


def noisy_codes(seed: int) -> list[tuple[Any, Any]]:
    """Returns the hooks that add noise to every code: half of its root mean square, by layer."""
    random = torch.Generator().manual_seed(seed)

    def add(code: Tensor, hook: Any) -> Tensor:
        size = code.square().mean().sqrt()
        return code + CODE_NOISE * size * torch.randn(code.shape, generator=random)

    return [(lambda name: name.endswith("mlp.hook_post"), add)]


def random_signs(model: Any, lambd: float, seed: int) -> list[tuple[Any, Any]]:
    """Returns the hooks that move what the ReLU reads by eta lambd, up or down at random.

    As far as a threshold that changes by lambd moves it, but each coordinate in its own direction.
    """
    random = torch.Generator().manual_seed(seed)
    cfg = model.cfg
    signs = 2.0 * torch.randint(2, (cfg.n_layers, cfg.d_model), generator=random) - 1

    def move(pre: Tensor, hook: Any) -> Tensor:
        return pre + cfg.eta * lambd * signs[hook.layer()]

    return [(lambda name: name.endswith("mlp.hook_pre"), move)]


@torch.no_grad()
def hits(
    model: Any, images: Tensor, labels: Tensor, how: str, shift: tuple[int, int]
) -> list[float]:
    """Returns 1 for each image whose largest logit is its label's, else 0, under a corruption."""
    hooks: list = noisy_codes(0) if how == "code noise" else []
    if how == "pixel noise":
        random = torch.Generator().manual_seed(0)
        images = images + PIXEL_NOISE * torch.randn(images.shape, generator=random)
    if how == "shift":
        images = shifted(images, shift)
    logits = model.run_with_hooks(images, fwd_hooks=hooks)
    return (logits.argmax(dim=-1) == labels).float().tolist()


@torch.no_grad()
def code_share(model: Any, images: Tensor) -> list[float]:
    """Returns the share of entries of Z^{l+1} that are not 0, by layer: |Z|_0 / (d N)."""
    names = [f"blocks.{layer}.mlp.hook_post" for layer in range(model.cfg.n_layers)]
    _, cached = model.run_with_cache(images, names_filter=names)
    return [(cached[name] != 0).float().mean().item() for name in names]


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns scikit-learn's 8x8 digits: 1,437 images and labels to train, 360 to test."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.images))
    pixels = torch.from_numpy(data.images[order]).float()[:, None]
    pixels = (pixels - pixels.mean()) / pixels.std()
    labels = torch.from_numpy(data.target[order])
    return pixels[:-360], labels[:-360], pixels[-360:], labels[-360:]


def make_digits_model(lambd: float, seed: int) -> HookedCrate:
    """Returns an untrained CRATE for digits: patch 2 (17 tokens), d 48, 3 layers, 4 heads."""
    size: dict[str, Any] = dict(
        d_model=48, n_layers=3, n_heads=4, image_size=8, patch_size=2, channels=1, n_classes=10
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HookedCrate(CrateConfig(family="crate", **size, lambd=lambd)).eval()


def train_on_digits(lambd: float, seed: int, steps: int) -> HookedCrate:
    """Returns a CRATE trained on digits; order and start depend on the seed alone."""
    images, labels, _, _ = digits()
    model = make_digits_model(lambd, seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    random = torch.Generator().manual_seed(seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(images), (BATCH,), generator=random)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()
