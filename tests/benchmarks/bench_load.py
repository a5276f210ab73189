"""Reading a .pth: our reader against torch.load, on a file as large as CRATE-alpha B/16.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_load.py

Both give every tensor memory of its own. torch.load does so with mmap=False; with mmap=True it
gives views of the file, whose copies are then counted too. Times are of the processor, one thread,
the least of alternating runs; the file is in the system's cache.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from timing import least, settle, verdict

from crate_interp.checkpoints import progress
from crate_interp.checkpoints.formats import torch_files
from crate_interp.checkpoints.formats.tensor_files import read_file

KEYS = Path(__file__).parents[1] / "fixtures" / "keys" / "crate_alpha_B16_in1k.json"
LIMIT, SECONDS = 1.5, 20.0


def main() -> bool:
    """Prints the ratios, the noise and how often a file is parsed; tells whether all are low."""
    settle()
    progress.SHOWN_FROM = 2**40  # no bars
    shapes = json.loads(KEYS.read_text())["keys"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.pth"
        torch.save({key: torch.randn(shape) for key, shape in shapes.items()}, path)

        def copied() -> dict[str, torch.Tensor]:
            loaded = torch.load(path, weights_only=True, mmap=True)
            return {name: value.clone() for name, value in loaded.items()}

        best = least(
            {
                "ours": lambda: read_file(path),
                "ours again": lambda: read_file(path),
                "torch": lambda: torch.load(path, weights_only=True),
                "torch mapped and copied": copied,
            },
            SECONDS,
        )
        size = path.stat().st_size / 2**20
        parsed = _times_parsed(path)
    print(f"{size:.0f} MiB, " + ", ".join(f"{name} {t:.3f} s" for name, t in best.items()))
    ours = min(best["ours"], best["ours again"])
    print(f"noise, the same job twice: {best['ours'] / best['ours again']:.3f}")
    held = [
        verdict("ours / torch.load(weights_only=True)", ours / best["torch"], LIMIT),
        verdict("ours / mmap=True and a copy", ours / best["torch mapped and copied"], LIMIT),
        verdict("times that the file is parsed", parsed, 1),
    ]
    return all(held)


def _times_parsed(path: Path) -> int:
    """Returns how many pickles are read for one load."""
    seen, read = [], torch_files.read_pickle

    def counted(*args: object) -> object:
        seen.append(args)
        return read(*args)  # pyright: ignore[reportArgumentType]

    torch_files.read_pickle = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        read_file(path)
    finally:
        torch_files.read_pickle = read
    return len(seen)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
