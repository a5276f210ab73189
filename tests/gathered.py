"""What tests of large data share: folders and tables of tiny pictures, and equal results."""

import datasets
import numpy as np
import pandas as pd
from PIL import Image

# prime sizes: three chunks of 7 and one of 2, in batches of 3
COUNT = 23
CHUNKS = dict(batch_size=3, chunk_size=7, progress=False, controls=0, probes="sparsity")


def pictures(count=COUNT, seed=0):
    drawn = np.random.default_rng(seed).integers(0, 256, (count, 6, 20, 3), np.uint8)
    return [Image.fromarray(one) for one in drawn]


def folder(root, count=COUNT):
    """A folder of pictures in two classes; returns its path."""
    for number, picture in enumerate(pictures(count)):
        (root / "ab"[number % 2]).mkdir(exist_ok=True, parents=True)
        picture.save(root / "ab"[number % 2] / f"{number:02}.png")
    return root


def table(count=COUNT):
    columns = {"picture": pictures(count), "label": [number % 3 for number in range(count)]}
    features = {"picture": datasets.Image(), "label": datasets.ClassLabel(names=list("abc"))}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def same(one, two):
    """Every stored table of two results has the same bits."""
    for name in one.stored:
        pd.testing.assert_frame_equal(one.stored[name], two.stored[name], check_exact=True)
