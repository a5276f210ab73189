"""Peak resident memory of writing a store, over many images against few.

Each is measured in a process of its own.
"""

import os
import subprocess
import sys
import tempfile

from bench_memory import _HAND_BACK
from timing import verdict

FEW, MANY = 512, 4000
POINTS = [f"blocks.{layer}.hook_resid_mid" for layer in range(6)]


def child(n: int) -> None:
    """Stores points of n of the images, all of which every process holds; prints its peak."""
    import torch

    import crate_interp as ci

    images = torch.randn(MANY, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    model = ci.load("crate-tiny-fashion")
    with tempfile.TemporaryDirectory() as out:
        ci.store(model, images, points=POINTS, out=out, limit=n, progress=False)
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])


def peak(n: int) -> int:
    """Returns the KiB at most resident over n images."""
    command = [sys.executable, __file__, str(n)]
    environment = os.environ | _HAND_BACK
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def main() -> bool:
    few, many = peak(FEW), peak(MANY)
    peaks = f"{few / 1024:.0f} MiB over {FEW} images, {many / 1024:.0f} MiB over {MANY}"
    print(f"store: peak resident memory {peaks}")
    return verdict("  many over few", many / few, 1.05)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(int(sys.argv[1]))
    else:
        sys.exit(0 if main() else 1)
