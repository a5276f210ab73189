"""Peak resident memory of a sweep, an atlas, a store and a linear probe over many images and few.

A sweep is also measured against the plain forward of as many images, and with a folder that keeps
its chunks, whose fold at the end counts too. A linear probe keeps features: its growth is compared
with their arithmetic. Each is measured in a process of its own. The word `small`: fewer images.
"""

import os
import subprocess
import sys
import tempfile

from timing import verdict

FEW, MANY, SMALL = 512, 10_000, 3000
# glibc keeps freed blocks and moves its thresholds as it goes: peaks of the same run differ by a
# tenth. With fixed thresholds every large block goes back, and they differ by a thousandth.
_HAND_BACK = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**17),
    "MALLOC_TRIM_THRESHOLD_": str(2**17),
}


def child(what: str, n: int, many: int) -> None:
    """Takes n of the images, all of which every process holds, and prints its peak."""
    import torch

    import crate_interp as ci

    images = torch.randn(many, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    model = ci.load("crate-tiny-fashion")
    with tempfile.TemporaryDirectory() as out:
        if what == "forward":
            with torch.no_grad():
                for start in range(0, n, 32):
                    model(images[start : min(start + 32, n)])
        elif what == "atlas":
            found = ci.atlas(model, images, limit=n, progress=False)
            ci.viz.atlas_pages(found, out)
        elif what == "store":
            points = [f"blocks.{layer}.hook_resid_mid" for layer in range(6)]
            ci.store(model, images, points=points, out=out, limit=n, progress=False)
        elif what == "linear":
            labels = [place % 10 for place in range(n)]
            ci.linear_probe(model, images, labels=labels, limit=n, progress=False)
        else:
            folder = out if what == "sweep into a folder" else None
            ci.sweep(model, images, limit=n, out=folder, progress=False)
    # not ru_maxrss, which begins at what the parent had when it forked
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])


def peak(what: str, n: int, many: int) -> int:
    """Returns the KiB at most resident over n images."""
    command = [sys.executable, __file__, what, str(n), str(many)]
    environment = os.environ | _HAND_BACK
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def main(many: int) -> bool:
    right, forward = True, peak("forward", FEW, many)
    print(f"plain forward: peak resident memory {forward / 1024:.0f} MiB")
    for what in ("sweep", "sweep into a folder", "store", "atlas"):
        few, most = peak(what, FEW, many), peak(what, many, many)
        peaks = f"{few / 1024:.0f} MiB over {FEW} images, {most / 1024:.0f} MiB over {many}"
        print(f"{what}: peak resident memory {peaks}")
    return right & linear(many)


def linear(many: int) -> bool:
    """Compares the growth of a linear probe with n * (n_layers + 2) * d_model * 4 bytes."""
    few, most = (peak("linear", n, many) for n in (FEW, many))
    needed = (many - FEW) * 8 * 128 * 4 / 1024  # of crate-tiny-fashion, in KiB
    print(f"linear: from {FEW} to {many} images {most - few} KiB, features {needed:.0f} KiB")
    return verdict("  growth over features", (most - few) / needed, 1.2)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(0 if main(SMALL if sys.argv[1:] == ["small"] else MANY) else 1)
