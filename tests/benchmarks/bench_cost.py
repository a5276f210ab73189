"""What one figure by layer over ImageNet would cost: CRATE-B/16 on 1.28 million images.

Markdown, an estimate: the time is that of one thread of this processor on a few images, times their
number; disk and memory are those of chunks of a small network with as many layers and heads, whose
tables are as large. Nothing here ran on 1.28 million images.
"""

import io
import sys
import tracemalloc
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from timing import least, settle

import crate_interp as ci
from crate_interp.data import open_data
from crate_interp.sweeps.ledgers.ledger import unpacked
from crate_interp.sweeps.result import SweepResult
from crate_interp.sweeps.run import measure_batch
from crate_interp.sweeps.runs.batches import Batch, Chunk
from crate_interp.sweeps.runs.chunked_pass import folded, merged
from crate_interp.sweeps.sweep_tables import Tally

IMAGES, BATCH, CHUNK = 1_281_167, 8, 256
SHAPE = {"family": "crate", "n_layers": 12, "n_heads": 12}
FOLDED = 64  # chunks


def seconds() -> dict[str, float]:
    """Returns the processor seconds of an image: the forward, and each default probe beside it."""
    torch.manual_seed(0)
    model = ci.HookedCrate(ci.CrateConfig(**SHAPE, d_model=768, image_size=224)).eval()
    images = torch.randn(BATCH, 3, 224, 224)
    chunk = Chunk(model, open_data(images, model.preprocess), BATCH)
    suite = ci.probes.resolve(None)
    lasting: list[dict] = [{} for _ in model.blocks]

    def measure(probes: list[ci.Probe]) -> None:
        measure_batch(chunk, Batch(images, 0), probes, Tally(BATCH), lasting, {})

    with torch.no_grad():
        jobs = {"forward": lambda: model(images), "all of them": lambda: measure(suite)}
        jobs |= {probe.name: lambda probe=probe: measure([probe]) for probe in suite}
        times = least(jobs | {"forward again": jobs["forward"]}, seconds=60)
    print(f"forward over forward, the noise: {times['forward again'] / times['forward']:.3f}\n")
    forward = min(times.pop("forward again"), times["forward"])
    beside = {name: (time - forward) / BATCH for name, time in times.items()}
    return {**beside, "forward": forward / BATCH}


def bytes_of_a_sample() -> tuple[float, float]:
    """Returns the bytes on the disk, and those that the fold holds at most, of each sample."""
    model = ci.HookedCrate(
        ci.CrateConfig(**SHAPE, d_model=48, image_size=14, patch_size=7, channels=1)
    ).eval()
    with TemporaryDirectory() as out, redirect_stderr(io.StringIO()):
        ci.sweep(model, torch.randn(CHUNK, 1, 14, 14), out=out, controls=0, progress=False)
        content = next(Path(out, "chunks").glob("*.parquet")).read_bytes()

    def parts():
        for place in range(FOLDED):
            tables = unpacked(content)
            tables["samples"]["sample"] += place * CHUNK
            yield tables

    tracemalloc.start()
    folded(parts(), lambda one, two: merged(SweepResult.STORED, one, two, {}))
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return len(content) / CHUNK, held / (FOLDED * CHUNK)


def main() -> bool:
    settle()
    times = seconds()
    forward, suite = times.pop("forward"), times.pop("all of them")
    disk, memory = bytes_of_a_sample()
    hours = IMAGES / 3600
    print(f"Estimate: CRATE-B/16 at 224, {IMAGES:,} images, one thread\n")
    print("| part | share of the forward | core-hours |\n|---|---:|---:|")
    print(f"| forward | 1.00 | {forward * hours:,.0f} |")
    for name, time in times.items():
        print(f"| {name}, alone | {time / forward:.2f} | {time * hours:,.0f} |")
    print(f"| the default probes together | {suite / forward:.2f} | {suite * hours:,.0f} |")
    print(f"| all | {1 + suite / forward:.2f} | {(forward + suite) * hours:,.0f} |")
    print(f"\nChunks on the disk: {disk:,.0f} bytes an image, {disk * IMAGES / 2**30:.1f} GiB.")
    print(f"Fold at the end: {memory:,.0f} bytes an image, {memory * IMAGES / 2**30:.1f} GiB.")
    return True


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
