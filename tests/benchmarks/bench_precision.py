"""How far each statistic of a sweep moves under precision="bfloat16", and what that saves.

Markdown: for each embedded model the largest change of a layer's mean over its samples, relative to
the float32 mean. The time is of one thread of this machine's processor.
"""

import sys

import torch
from timing import least, settle

import crate_interp as ci

# name, data, samples
MODELS = (
    ("crate-tiny-fashion", "embedded:fashion", 64),
    ("crate-tiny-pictures", "embedded:pictures", 64),
    ("crate-tiny-lm", "embedded:held-out-text", 16),
)


def moved(name: str, data: str, n: int) -> dict[str, float]:
    """Returns the largest relative change of a layer's mean, by statistic."""
    model = ci.load(name)
    given = {"limit": n, "controls": 0, "progress": False}
    plain, mixed = (
        ci.sweep(model, data, precision=precision, **given).layers()
        for precision in (None, "bfloat16")
    )
    change = (mixed["mean"] - plain["mean"]).abs() / plain["mean"].abs().clip(lower=1e-12)
    return change.groupby(plain["probe"] + "." + plain["statistic"], sort=False).max().to_dict()


def time_of(d_model: int) -> dict[str, float]:
    model = ci.HookedCrate(
        ci.CrateConfig(family="crate", d_model=d_model, n_layers=2, n_heads=12, image_size=224)
    ).eval()
    images = torch.randn(8, 3, 224, 224)

    def mixed() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(images)

    with torch.no_grad():
        return least({"float32": lambda: model(images), "bfloat16": mixed}, seconds=10)


def main() -> bool:
    settle()
    found = {name: moved(name, data, n) for name, data, n in MODELS}
    names = dict.fromkeys(name for changes in found.values() for name in changes)
    print("| statistic | " + " | ".join(found) + " |\n|---|" + "---:|" * len(found))
    for name in names:
        cells = (f"{one[name]:.1e}" if name in one else "" for one in found.values())
        print(f"| {name} | " + " | ".join(cells) + " |")
    times = time_of(576)
    print(
        f"\nforward of d = 576, bfloat16 over float32: {times['bfloat16'] / times['float32']:.2f}"
    )
    return True


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
