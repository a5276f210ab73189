"""Peak resident memory of a sweep over many images against one over few; each in a process of its own."""

import subprocess
import sys

from timing import verdict

FEW, MANY = 256, 4096


def child(n: int) -> None:
    """Sweeps n images that all processes hold in full, so that only the sweep's own memory differs; prints the peak."""
    import torch

    import crate_interp as ci

    images = torch.randn(MANY, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    ci.sweep(ci.load("crate-tiny-fashion"), images, limit=n, progress=False)
    # not ru_maxrss, which begins at what the parent had when it forked
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])


def peak(n: int) -> int:
    """KiB at most resident while sweeping n images."""
    done = subprocess.run([sys.executable, __file__, str(n)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> bool:
    few, many = peak(FEW), peak(MANY)
    print(f"peak resident memory: {few / 1024:.0f} MiB over {FEW} images, {many / 1024:.0f} MiB over {MANY}")
    return verdict("  many over few", many / few, 1.05)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(int(sys.argv[1]))
    else:
        sys.exit(0 if main() else 1)
