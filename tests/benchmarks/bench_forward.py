"""What hook points cost when nothing hangs on them: the hooked forward over a plain one."""

import functools
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from timing import least, settle, verdict

import crate_interp as ci
from reference import forward, published_layout

SIZES = {"CRATE-T (d=384, 6 heads)": (384, 6), "CRATE-S (d=576, 12 heads)": (576, 12)}


def main() -> bool:
    settle()
    good = True
    for name, (d_model, n_heads) in SIZES.items():
        torch.manual_seed(0)
        model = ci.HookedCrate(
            ci.CrateConfig(family="crate", d_model=d_model, n_layers=12, n_heads=n_heads)
        ).eval()
        weights, images = published_layout(model), torch.randn(4, 3, 224, 224)
        plain = functools.partial(forward, weights, images, "crate", n_heads, (16, 16))
        with torch.no_grad():
            assert torch.equal(plain(), model(images))
            jobs = {"plain": plain, "hooked": lambda m=model, x=images: m(x), "plain again": plain}
            times = least(jobs, seconds=100)
        print(f"{name}, 197 tokens, batch 4, 12 layers: plain {times['plain'] * 1e3:.0f} ms")
        print(f"  plain over plain, the noise: {times['plain again'] / times['plain']:.3f}")
        good &= verdict("  hooked over plain", times["hooked"] / times["plain"], 1.03)
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
