"""Trains crate-tiny-mae, a masked autoencoder of 0.1 M parameters, on Fashion-MNIST.

    python demos/labs/train_tiny_mae.py --data DIR --out runs/crate-tiny-mae

It takes about 5 minutes of one CPU core. demos/training.py says where to get the data; --data gives
the folder of the four .gz files. The recipe was not searched: one learning rate, one seed. The test
images are read once, after the last step, to say how far the nearest training image is from them.

You can interrupt it at any time: the same command goes on from the last save. It writes the weights
in float16, the first 1,000 training images and the facts of the training into
demos/weights/crate-tiny-mae (--weights).
"""

import argparse
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image
from PIL import Image as Pillow
from torch import Tensor, nn
from tqdm.auto import tqdm

import crate_interp as ci
from crate_interp import CrateConfig, HookedCrateMAE

sys.path.append(str(Path(__file__).parent.parent))
from training import load_resume, read_idx, save_resume, set_learning_rate

FOLDER = Path(__file__).parent.parent / "weights" / "crate-tiny-mae"
GALLERY = "train-images.parquet"  # the first training images, beside the weights
MEAN, STD, SEED = (0.2860,), (0.3530,), 0
MASK_RATIO = 0.75
STEPS, BATCH, LR, DECAY, CLIP, SAVE_EVERY = 2500, 64, 3e-3, 0.05, 1.0, 100
N_GALLERY, N_TEST, TEST_SEED = 1000, 256, 0

CARD = """---
license: mit
library_name: crate_interp
tags: [crate, white-box-transformer, masked-autoencoder]
---
# crate-tiny-mae

A CRATE-MAE (arXiv 2404.02446) of {params:,} parameters: 28x28 grey
images, patch 4, d_model 64, 4 layers of encoder and 4 of decoder, 4 heads. Made for the lab
`reconstruction`; not a model to build on.

* Data: the 60,000 training images of Fashion-MNIST (Zalando SE, MIT licence), without labels. The
  first {gallery:,} of them lie beside the weights.
* Recipe: AdamW, learning rate {lr:g} (cosine, 5 % warm-up), weight decay {decay:g}, batch {batch},
  {steps:,} steps, three quarters of the patches removed, mean squared error of the removed patches,
  seed {seed}. One recipe was tried.
* Error of the removed pixels of the first 256 test images, in units of the training pixels'
  variance: {error:.3f}; the nearest of all training images by the visible pixels has {near:.3f}.
* Processor time: {minutes:.1f} minutes of one core. Script: demos/labs/train_tiny_mae.py.
"""


def make_mae(seed: int) -> HookedCrateMAE:
    """Returns the untrained network (CRATE-MAE); the same seed gives the same start."""
    size: dict[str, Any] = dict(
        d_model=64, n_layers=4, n_heads=4, image_size=28, patch_size=4, channels=1
    )
    look: dict[str, Any] = dict(resize=28, crop=28, mean=MEAN, std=STD)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        cfg = CrateConfig(family="crate-mae", **size, **look, model_name="crate-tiny-mae")
        return HookedCrateMAE(cfg).eval()


def load_mae() -> HookedCrateMAE:
    """Returns the trained network, from the weights beside the scripts."""
    return ci.load(str(FOLDER))


def noise_of(n: int, seed: int) -> Tensor:
    """Returns noise that orders the patches of n images, `[n, 49]`; the lowest quarter is shown."""
    return torch.rand(n, 49, generator=torch.Generator().manual_seed(seed))


def visible_pixels(mae: HookedCrateMAE, mask: Tensor) -> Tensor:
    """Returns which pixels are seen, float `[batch, 1, 28, 28]`, from a mask `[batch, patch]`."""
    wide = (1 - mask)[..., None].expand(-1, -1, 16)  # [batch, patch, pixel]
    return mae.unpatchify(wide)


def nearest(images: Tensor, seen: Tensor, gallery: Tensor) -> Tensor:
    """Returns the gallery's image that is nearest to each image in its seen pixels.

    images, seen `[n, 1, h, w]`, gallery `[m, 1, h, w]` -> `[n, 1, h, w]`. The distance is
    `sum seen (x - y)^2`, up to what does not depend on y.
    """
    x, s, y = images.flatten(1), seen.flatten(1), gallery.flatten(1)
    distance = s @ y.square().T - 2 * (s * x) @ y.T  # [n, m]
    return gallery[distance.argmin(dim=1)]


def removed_error(pictures: Tensor, images: Tensor, seen: Tensor) -> Tensor:
    """Returns the mean squared error of each image over its removed pixels, `[n]`."""
    removed = 1 - seen
    wrong = (removed * (pictures - images).square()).flatten(1).sum(dim=1)
    return wrong / removed.flatten(1).sum(dim=1)


def save_gallery(images: np.ndarray, path: Path) -> None:
    """Saves images uint8 [n, 28, 28] as PNG bytes in parquet."""
    rows = []
    for image in images:
        buffer = io.BytesIO()
        Pillow.fromarray(image).save(buffer, "PNG", optimize=True)
        rows.append({"image": {"bytes": buffer.getvalue(), "path": None}})
    Dataset.from_list(rows, features=Features({"image": Image()})).to_parquet(path)


def read_gallery(path: Path = FOLDER / GALLERY) -> Tensor:
    """Returns the images of a gallery as the network takes them, float `[n, 1, 28, 28]`."""
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(path)["image"].to_pylist()
    pixels = np.stack([np.asarray(Pillow.open(io.BytesIO(row["bytes"]))) for row in rows])
    return scaled(pixels)


def scaled(pixels: np.ndarray) -> Tensor:
    """Returns images uint8 [n, 28, 28] as the network takes them, float `[n, 1, 28, 28]`."""
    return ((torch.from_numpy(pixels.copy()).float() / 255 - MEAN[0]) / STD[0]).unsqueeze(1)


def held_out_images(n: int) -> Tensor:
    """Returns the first n embedded test images of Fashion-MNIST, float `[n, 1, 28, 28]`."""
    rows = ci.data.embedded("fashion")[:n]["image"]
    return scaled(np.stack([np.asarray(row) for row in rows]))


def batch_of(images: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Returns images and the noise that masks them; both depend on the step alone."""
    chance = torch.Generator().manual_seed(1_000_003 * (SEED + 1) + step)
    rows = torch.randint(len(images), (BATCH,), generator=chance)
    return images[rows], torch.rand(BATCH, 49, generator=chance)


def train(images: Tensor, resume: Path) -> tuple[nn.Module, float]:
    """Returns the trained network and the minutes of processor time; goes on from `resume`."""
    mae = make_mae(SEED)
    optimizer = torch.optim.AdamW(mae.parameters(), lr=LR, weight_decay=DECAY, betas=(0.9, 0.95))
    settings: dict[str, Any] = dict(steps=STEPS, batch=BATCH, lr=LR, decay=DECAY, seed=SEED)
    step, minutes = 0, 0.0
    saved = load_resume(resume, settings)
    if saved is not None:
        mae.load_state_dict(saved["weights"])
        optimizer.load_state_dict(saved["optimizer"])
        step, minutes = saved["step"], saved["minutes"]
    bar = tqdm(total=STEPS, initial=step, desc="crate-tiny-mae", unit="step", mininterval=10)
    while step < STEPS:
        started = time.process_time()
        set_learning_rate(optimizer, step, STEPS, LR)
        loss = mae.train()(*batch_of(images, step), mask_ratio=MASK_RATIO).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(mae.parameters(), CLIP)
        optimizer.step()
        step += 1
        minutes += (time.process_time() - started) / 60
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if step % SAVE_EVERY == 0 or step == STEPS:
            state = dict(weights=mae.state_dict(), optimizer=optimizer.state_dict())
            save_resume(state | dict(step=step, settings=settings, minutes=minutes), resume)
    bar.close()
    return mae.eval(), minutes


@torch.no_grad()
def facts_of(images: Tensor, test: Tensor) -> dict[str, float]:
    """Returns the error on removed pixels of the saved network and of the nearest image."""
    mae = load_mae()
    given = mae(test, noise_of(len(test), TEST_SEED), MASK_RATIO)
    seen = visible_pixels(mae, given.mask)
    drawn = mae.unpatchify(given.pred)
    near = nearest(test, seen, images)
    return dict(
        error=removed_error(drawn, test, seen).mean().item(),
        near=removed_error(near, test, seen).mean().item(),
    )


def main() -> None:
    """Trains, and writes the folder of the weights."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--out", type=Path, default=Path("runs/crate-tiny-mae"))
    parser.add_argument("--weights", type=Path, default=FOLDER)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pixels, _ = read_idx(args.data, "train")
    images = scaled(pixels)
    mae, minutes = train(images, args.out / "resume.pt")
    mae.half().save_pretrained(args.weights)  # type: ignore[operator]
    (args.weights / "model.safetensors").chmod(0o644)
    save_gallery(pixels[:N_GALLERY], args.weights / GALLERY)
    test = scaled(read_idx(args.data, "t10k")[0][:N_TEST])
    facts: dict[str, Any] = dict(steps=STEPS, batch=BATCH, lr=LR, decay=DECAY, seed=SEED)
    facts |= dict(minutes=minutes, params=sum(value.numel() for value in mae.parameters()))
    facts |= dict(gallery=N_GALLERY) | facts_of(images, test)
    (args.weights / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    (args.weights / "README.md").write_text(CARD.format(**facts))
    print(f"error {facts['error']:.3f}, nearest image {facts['near']:.3f}: {args.weights}")


if __name__ == "__main__":
    main()
