"""The tiny masked autoencoder of the lab `reconstruction`: its shape, its weights, its images."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image
from PIL import Image as Pillow
from torch import Tensor

import crate_interp as ci
from crate_interp import CrateConfig, HookedCrateMAE

FOLDER = Path(__file__).parent.parent / "weights" / "crate-tiny-mae"
GALLERY = "train-images.parquet"  # the first training images, beside the weights
MEAN, STD, SEED = (0.2860,), (0.3530,), 0
MASK_RATIO = 0.75


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
