"""Heads ablated, all and screened, and a graph's heads, in forwards of CRATE-B's size.

Goals: all 144 heads at most 66 forwards a sample, screen=24 at most 14. With the word `small` four
layers of this width, without a verdict.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from timing import least, settle, verdict

import crate_interp as ci

SIZE = {"image_size": 224, "patch_size": 16, "d_model": 768, "n_heads": 12, "d_head": 64}


def main() -> bool:
    settle()
    layers = 4 if sys.argv[1:] == ["small"] else 12
    cfg = ci.CrateConfig(family="crate", n_layers=layers, n_classes=1000, **SIZE)
    model, images = ci.HookedCrate(cfg).eval(), torch.randn(2, 3, 224, 224)
    ablate = partial(ci.ablate_heads, model, (images, torch.arange(2)), progress=False)
    with torch.no_grad():
        jobs = {"forward": lambda: model(images), "again": lambda: model(images)}
        jobs |= {"all": ablate, "screen": partial(ablate, screen=24)}
        times = least(jobs, seconds=10)
    forward = min(times["forward"], times["again"])
    print(f"{layers} layers: a forward of 2 samples {forward:.2f} s, again over it "
          f"{times['again'] / times['forward']:.3f}")  # fmt: skip
    limits = (66.0, 14.0) if layers == 12 else (1e9, 1e9)
    found = [
        verdict(f"  {name} heads, in forwards", times[name] / forward, limit)
        for name, limit in zip(("all", "screen"), limits, strict=True)
    ]
    return all(found)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
