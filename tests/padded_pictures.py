"""Pictures in files of one size, in folders of their own, and others to replace them."""

import os

import numpy as np
from PIL import Image

from conftest import PLAIN

COUNT, SIZE = 11, 4096  # pictures, and the bytes of each file
MODEL = dict(PLAIN, n_layers=2, labels=tuple("abcdefghijk"))

RUN = dict(batch_size=2, chunk_size=5, progress=False)

QUICK = dict(RUN, controls=0, probes="sparsity")


def draw(path, seed):
    """Saves a picture as a file of SIZE bytes: what follows its end is not decoded."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 20, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes().ljust(SIZE, b"\0"))


def replace(path, seed=99, times=True):
    """Replaces a picture by another of the same size, and with the same time of modification."""
    before = path.stat()
    draw(path, seed)
    if times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def folder(root, suffix=".png", count=COUNT):
    for number in range(count):
        (root / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        draw(root / "ab"[number % 2] / f"{number:02}{suffix}", number)
    return root
