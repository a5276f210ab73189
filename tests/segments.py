"""A tiny model and pictures with masks, for the tests of segmentation."""

import numpy as np
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pillow

import crate_interp as ci

PATCH, GRID = (4, 5), (3, 2)
SIZE = (12, 10)


def model(seed=0, **changes):
    torch.manual_seed(seed)
    size = dict(d_model=12, n_layers=2, n_heads=3, image_size=SIZE, patch_size=PATCH, n_classes=5)
    look = dict(mean=[0.5] * 3, std=[0.25] * 3)
    return ci.HookedCrate(ci.CrateConfig(family="crate", **size | look | changes)).eval()


def class_map(random):
    """Returns a mask of classes 1 to 3 and 255 patch by patch, with noise.

    One patch is half unjudged, and one class lies in an unjudged patch alone.
    """
    mask = random.choice([0, 1, 2, 255], GRID).repeat(PATCH[0], 0).repeat(PATCH[1], 1)
    noise = random.random(SIZE) < 0.1
    mask[noise] = random.choice([0, 1, 2, 255], noise.sum())
    mask[4:6, :5], mask[6:8, :5] = 255, 1
    mask[8:12, 5:10], mask[9, 6:9] = 255, 3
    return mask


def dataset(n=7, seed=0, empty=(), binary=True):
    """Returns pictures with masks: of 0 and 255, or of classes 1 to 3 and 255 for unjudged."""
    random = np.random.default_rng(seed)
    rows = []
    for index in range(n):
        values = (random.random(SIZE) > 0.6) * 255 if binary else class_map(random)
        mask = np.zeros(SIZE, np.uint8) if index in empty else values.astype(np.uint8)
        picture = Pillow.fromarray(random.integers(0, 256, (*SIZE, 3), dtype=np.uint8))
        rows.append(
            {"image": picture, "mask": Pillow.fromarray(mask), "label": f"kind {index % 3}"}
        )
    return Dataset.from_list(
        rows, features=Features({"image": Image(), "mask": Image(), "label": Value("string")})
    )


def rectangles_and_noise(count, width):
    """Grey rectangles as objects, with their labels, and noise 150 x width as textures."""
    random = np.random.default_rng(0)
    objects = np.zeros((count, 28, 28), np.uint8)
    for index, (top, left) in enumerate(random.integers(1, 10, (count, 2))):
        objects[index, top : top + 11, left : left + 7] = random.integers(1, 256, (11, 7))
    textures = [
        Pillow.fromarray(random.integers(0, 256, (150, width), dtype=np.uint8)) for _ in range(2)
    ]
    return (objects, np.arange(count) % 10), textures
