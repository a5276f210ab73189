"""What workers and chunks cost: two workers over one, and a sweep in chunks over its bare loop.

Two workers need two idle cores: their ratio is of wall time, and other work on the machine spoils
it. The noise beside it is one worker over one worker.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from timing import least, settle, verdict

import crate_interp as ci
from crate_interp.data import open_data
from crate_interp.questions.batches import Chunk
from crate_interp.sweeps.measuring import measure_batch, measure_weights
from crate_interp.sweeps.sweep_tables import Tally

SECONDS, CHUNKS, ROUNDS = 60.0, 16, 3  # of one worker, in so many chunks, each measured so often
FEW = 16  # images by which a worker is timed first
# what a worker runs on its data: verb -> (layers, how it is called)
VERBS = {
    "sweep": (12, lambda *args, **settings: ci.sweep(*args, controls=0, **settings)),
    "audit": (4, lambda *args, **settings: ci.audit(*args, untrained=0, **settings)),
    "atlas": (4, ci.atlas),
}


def network(n_layers: int = 12) -> ci.HookedCrate:
    torch.manual_seed(0)
    cfg = ci.CrateConfig(
        family="crate", d_model=384, n_layers=n_layers, n_heads=6, image_size=224, n_classes=10
    )
    return ci.HookedCrate(cfg).eval()


def images(n: int) -> torch.Tensor:
    return torch.randn(n, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def sized() -> int:
    """Returns how many images of a chunk keep one worker busy for SECONDS in all chunks."""
    model, few = network(), images(FEW)
    ci.sweep(model, few, controls=0, progress=False)
    start = time.perf_counter()
    ci.sweep(model, few, controls=0, progress=False)
    return max(1, round(FEW * SECONDS / CHUNKS / (time.perf_counter() - start)))


def of_torchrun(size: int, workers: int, verb: str = "sweep") -> float:
    """Returns the seconds of a whole command: the start of its processes is in them."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *launch, __file__, verb, str(size), f"{out}/result"],
            check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        seconds = time.perf_counter() - start
        meta = json.loads(Path(out, "result", "meta.json").read_text())
        assert meta["n_samples"] == size * CHUNKS
    return seconds


def worker(verb: str, size: int, out: str) -> None:
    layers, measure = VERBS[verb]
    measure(network(layers), images(size * CHUNKS), out=out, chunk_size=size, progress=False)


def two_over_one(name: str, seconds, size: int, limit: float) -> bool:
    """Times one and two workers in turn and prints the least of each."""
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(ROUNDS):
        for workers, found in times.items():
            found.append(seconds(size, workers))
    one, two = sorted(times[1]), sorted(times[2])
    print(
        f"{name}: {CHUNKS} chunks of {size} images: one worker {one[0]:.1f} s, two {two[0]:.1f} s"
    )
    print(f"  one over one, the noise: {one[1] / one[0]:.3f}")
    return verdict("  two workers over one", two[0] / one[0], limit)


def chunked_over_bare() -> bool:
    model, data = network(), images(512)
    probes, samples = ci.probes.resolve(None), open_data(data, model.preprocess)

    def bare() -> None:
        chunk, tally = Chunk(model, samples, 32), Tally(samples.n)
        lasting: list[dict] = [{} for _ in model.blocks]
        with torch.no_grad():
            measure_weights(model, "blocks", probes, tally)
            for batch in chunk.batches():
                numbers = measure_batch(chunk, batch, probes, lasting)
                tally.add(numbers, probes, batch.start)

    def chunked() -> None:
        with tempfile.TemporaryDirectory() as place:
            ci.sweep(model, data, out=Path(place) / "out", controls=0, progress=False)

    times = least({"bare": bare, "chunked": chunked, "bare again": bare}, seconds=600)
    print(f"512 images, batch 32, chunks of 256, 12 layers, d=384: bare loop {times['bare']:.1f} s")
    print(f"  bare over bare, the noise: {times['bare again'] / times['bare']:.4f}")
    floor = min(times["bare"], times["bare again"])
    return verdict("  sweep in chunks over the bare loop", times["chunked"] / floor, 1.03)


def main() -> bool:
    settle()
    size = sized()
    good = two_over_one("torchrun", of_torchrun, size, 0.55)
    for verb in ("audit", "atlas"):
        good &= two_over_one(f"torchrun, {verb}", partial(of_torchrun, verb=verb), FEW, 0.55)
    return chunked_over_bare() and good


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(0 if main() else 1)
