"""What verbs cost at CRATE-B's size, in forwards of a sample, beside the goals.

One thread, processor time; a verb runs once, and a forward's time is the mean of those just before
and after it. Noise is how far these two are apart. A word chooses verbs; `small` takes two layers
and few samples, without a verdict. BEFORE=FOLDER times the checkout in that folder first.
"""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from timing import settle, verdict

import crate_interp as ci

SIZE = {"image_size": 224, "patch_size": 16, "d_model": 768, "n_heads": 12, "d_head": 64}
QUIET = {"progress": False}
# verb -> what runs on a model and pictures, samples, most forwards a sample
VERBS = {
    "ablate_heads": (lambda m, x: ci.ablate_heads(m, (x, torch.arange(len(x))), **QUIET), 2, 66),
    "ablate_heads screen=24": (
        lambda m, x: ci.ablate_heads(m, (x, torch.arange(len(x))), screen=24, **QUIET), 2, 14,
    ),
    "graph tests=False": (lambda m, x: ci.graph(m, x[0], tests=False), 1, 30),
    "graph": (lambda m, x: ci.graph(m, x[0]), 1, 120),
    "audit grid=False": (lambda m, x: ci.audit(m, x, untrained=0, grid=False, **QUIET), 64, 5),
    "audit": (lambda m, x: ci.audit(m, x, untrained=0, **QUIET), 64, 15),
    "atlas": (lambda m, x: ci.atlas(m, x, **QUIET), 32, 12),
    "sweep in bfloat16": (
        lambda m, x: ci.sweep(m, x, controls=0, precision="bfloat16", **QUIET), 16, 0.6,
    ),
}  # fmt: skip


def timed(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> bool:
    if folder := os.environ.pop("BEFORE", ""):
        print(f"before, {folder}:", flush=True)
        path = f"{folder}:{folder}/hooks"
        subprocess.run([sys.executable, *sys.argv], env=os.environ | {"PYTHONPATH": path})
        print("after:", flush=True)
    settle()
    small = "small" in sys.argv[1:]
    words = [word for word in sys.argv[1:] if word != "small"]
    layers = 2 if small else 12
    cfg = ci.CrateConfig(family="crate", n_layers=layers, n_classes=1000, **SIZE)
    model, good = ci.HookedCrate(cfg).eval(), []
    for name, (verb, samples, most) in VERBS.items():
        if words and not any(word in name for word in words):
            continue
        images = torch.randn(2 if small else samples, 3, 224, 224)
        forward = partial(torch.no_grad()(model), images[:1])
        forward()
        before = sum(timed(forward) for _ in range(6)) / 6
        verb_time = timed(partial(verb, model, images))
        after = sum(timed(forward) for _ in range(6)) / 6
        ratio = verb_time / len(images) / ((before + after) / 2)
        print(f"{layers} layers, {len(images)} samples: a forward {before:.3f} and {after:.3f} s")
        good.append(verdict(f"  {name}, in forwards a sample", ratio, 1e9 if small else most))
    return all(good)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
