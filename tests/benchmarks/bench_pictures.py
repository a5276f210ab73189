"""What it costs to note the contents of picture files: a sweep, and a finished run asked again."""

import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timing import least, settle, verdict

import crate_interp as ci
from crate_interp.core.file_reading import STEP
from crate_interp.data import open_data

COUNT, SIDE, QUALITY, LIMIT = 2000, 224, 98, 250  # files of about 80 kB; samples of a timed sweep


def network() -> ci.HookedCrate:
    torch.manual_seed(0)
    half = (0.5, 0.5, 0.5)
    size = dict(d_model=48, n_layers=2, n_heads=3, image_size=SIDE, n_classes=10)
    return ci.HookedCrate(ci.CrateConfig(family="crate", mean=half, std=half, **size)).eval()


def folder(root: Path) -> str:
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        path = root / f"{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(noise).save(path, quality=QUALITY)
    time.sleep(2 * STEP / 1e9)  # files that have just changed are read again
    return f"imagefolder:{root}"


def main() -> bool:
    settle()
    model = network()
    with tempfile.TemporaryDirectory() as place:
        source = folder(Path(place) / "in")

        def swept(noted: bool, kind: str, **more: object) -> None:
            samples = open_data(source, model.preprocess)
            samples = samples if noted else replace(samples, files=None)
            out = Path(place) / f"{kind}-{noted}"
            ci.sweep(model, samples, out=out, controls=0, progress=False, **more)

        new = dict(kind="new", resume=False, limit=LIMIT)
        jobs = {"noted": partial(swept, True, **new), "bare": partial(swept, False, **new)}
        times = least(jobs | {"bare again": jobs["bare"]}, seconds=120)
        again = least({f"{one}": partial(swept, one, "old") for one in (True, False)}, seconds=10)
    floor = min(times["bare"], times["bare again"])
    print(f"{LIMIT} JPEG files, two layers, d=48: {floor:.2f} s without notes")
    print(f"  without notes over without, the noise: {times['bare again'] / times['bare']:.4f}")
    print(
        f"{COUNT:,} files, a finished run asked again: {1e3 * again['False']:.1f} ms without notes,"
        f" {1e3 * again['True']:.1f} ms with their times compared"
    )
    return verdict("  a sweep with notes over one without", times["noted"] / floor, 1.03)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
