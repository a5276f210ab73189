"""Peak resident memory of a sweep and of an atlas over many images against few.

Each is measured in a process of its own.
"""

import os
import subprocess
import sys
import tempfile

from timing import verdict

FEW, MANY = 256, 2048
# glibc keeps freed blocks and moves its thresholds as it goes: peaks of the same run differ by a
# tenth. With fixed thresholds every large block goes back, and they differ by a thousandth.
_HAND_BACK = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**17),
    "MALLOC_TRIM_THRESHOLD_": str(2**17),
}


def child(what: str, n: int) -> None:
    """Takes n of the images, all of which every process holds, and prints its peak."""
    import torch

    import crate_interp as ci

    images = torch.randn(MANY, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    model = ci.load("crate-tiny-fashion")
    if what == "sweep":
        ci.sweep(model, images, limit=n, progress=False)
    else:
        found = ci.atlas(model, images, limit=n, progress=False)
        with tempfile.TemporaryDirectory() as out:
            ci.viz.atlas_pages(found, out)
    # not ru_maxrss, which begins at what the parent had when it forked
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])


def peak(what: str, n: int) -> int:
    """Returns the KiB at most resident over n images."""
    command = [sys.executable, __file__, what, str(n)]
    environment = os.environ | _HAND_BACK
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def main() -> bool:
    right = True
    for what in ("sweep", "atlas"):
        few, many = peak(what, FEW), peak(what, MANY)
        peaks = f"{few / 1024:.0f} MiB over {FEW} images, {many / 1024:.0f} MiB over {MANY}"
        print(f"{what}: peak resident memory {peaks}")
        right &= verdict("  many over few", many / few, 1.05)
    return right


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1], int(sys.argv[2]))
    else:
        sys.exit(0 if main() else 1)
