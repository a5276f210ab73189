"""What ci.watch costs at its defaults, as a share of the training: at most 5 %.

A training of a small CRATE (d 192, 6 layers, images of 64 x 64) by AdamW with batches of 32. The
share is that of processor time: one measurement of 32 images, over 100 updates.
"""

import sys
import tempfile

import torch
from timing import least, settle, verdict

import crate_interp as ci

BATCH, EVERY, LIMIT = 32, 100, 0.05


def main() -> bool:
    settle()
    torch.manual_seed(0)
    shape = {"d_model": 192, "n_layers": 6, "n_heads": 6, "image_size": 64, "patch_size": 8}
    model = ci.HookedCrate(ci.CrateConfig(family="crate", **shape, n_classes=10))
    images, labels = torch.randn(BATCH, 3, 64, 64), torch.arange(BATCH) % 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def update() -> None:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as out:
        numbers = iter(range(EVERY, 10**9, EVERY))
        with ci.watch(model, images, out=out) as watch, ci.watch(model, images) as unkept:
            jobs = {
                "update": update,
                "kept": lambda: watch.step(next(numbers)),
                "measured": lambda: unkept.step(next(numbers)),
                "update again": update,
            }
            times = least(jobs, seconds=60)
    one = min(times["update"], times["update again"])
    print(f"an update: {one * 1e3:.0f} ms; again over it: {times['update again'] / one:.3f}")
    good = True
    for name, words in (("measured", "in memory"), ("kept", "with a folder")):
        share = times[name] / (EVERY * one)
        print(f"a measurement {words}: {times[name] * 1e3:.0f} ms, {times[name] / one:.1f} updates")
        good = verdict(f"  share of the training, every {EVERY} updates", share, LIMIT) and good
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
