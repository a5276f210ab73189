"""What each verb costs at the size of published models: time in forwards, memory, and files.

    OMP_NUM_THREADS=1 python tests/benchmarks/what_verbs_cost.py        # make cost
    OMP_NUM_THREADS=1 python tests/benchmarks/what_verbs_cost.py CRATE-B,197

Markdown, a row for each verb; a word chooses the rows that contain it. Each row is measured in a
process of its own, with random weights of the official initialisation: processor seconds of one
thread over those of a forward of one sample, which is the least of several; the most memory the
process held, and the size of what it wrote. On a CUDA device (--device cuda) times are those of the
clock. A network with fewer layers than its name has says so: all that is measured in each layer
costs the same share of a forward, and only exact ablations grow with the square of the layers.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import settle

import crate_interp as ci

BASE = {"d_model": 768, "n_heads": 12}
MODELS: dict[str, dict[str, Any]] = {
    "CRATE-B,197": BASE | {"family": "crate", "n_layers": 12, "image_size": 224},
    "CRATE-alpha-L,257,4 layers": {
        "family": "crate-alpha", "d_model": 1024, "n_heads": 16, "n_layers": 4, "image_size": 224,
        "patch_size": 14,
    },
    "CRATE-LM,256": BASE | {
        "family": "crate-lm", "n_layers": 12, "d_vocab": 50257, "n_ctx": 256,
    },
    "CRATE-B,785,2 layers": BASE | {"family": "crate", "n_layers": 2, "image_size": 448},
    "CRATE-B,1370,2 layers": BASE | {
        "family": "crate", "n_layers": 2, "image_size": 518, "patch_size": 14,
    },
}  # fmt: skip
QUIET: dict[str, Any] = {"progress": False}


def explore(model: Any, data: Any, out: Path) -> None:
    _, cache = model.run_with_cache(data[:1])
    ci.viz.explore(cache, data[:1]).save(out / "explore.html")


def graph(model: Any, data: Any, out: Path) -> None:
    ci.viz.graph(ci.graph(model, data[0])).save(out / "graph.html")


def labelled(data: Any) -> Any:
    return (data, torch.arange(len(data))) if data.is_floating_point() else data


def paged(page: Callable[[Any, Path], Any], verb: Callable[..., Any], **settings: Any) -> Any:
    return lambda model, data, out: page(verb(model, data, **settings, **QUIET), out)


VERBS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "sweep": lambda model, data, out: ci.sweep(model, data, out=out, **QUIET),
    "atoms": lambda model, data, out: ci.atoms(model, data, out=out, **QUIET),
    "explore": explore,
    "graph": graph,
    "report, 1 twin": lambda model, data, out: ci.report(model, data, out, untrained=1, **QUIET),
    "audit, no twins": paged(ci.viz.audit_page, ci.audit, untrained=0),
    "audit, grid=False": paged(ci.viz.audit_page, ci.audit, untrained=0, grid=False),
    "compare, no twins": lambda model, data, out: ci.compare(
        model, model.fresh().eval(), data, untrained=0, out=out, **QUIET
    ),
    "ablate_heads": lambda model, data, out: ci.ablate_heads(
        model, labelled(data), out=out, **QUIET
    ),
    "atlas": paged(ci.viz.atlas_pages, ci.atlas),
    "segment, no twins": lambda model, data, out: ci.segment(
        model, "embedded:pictures", limit=len(data), untrained=0, out=out, **QUIET
    ),
}
# model -> verb -> samples
ROWS: dict[str, dict[str, int]] = {
    "CRATE-B,197": {
        "sweep": 16, "atoms": 16, "explore": 1, "graph": 1, "report, 1 twin": 8,
        "audit, no twins": 64, "audit, grid=False": 16, "compare, no twins": 8, "ablate_heads": 2,
        "atlas": 32, "segment, no twins": 8,
    },
    "CRATE-alpha-L,257,4 layers": {
        "sweep": 4, "atoms": 4, "explore": 1, "graph": 1, "audit, no twins": 8,
        "audit, grid=False": 4, "compare, no twins": 4, "atlas": 16,
    },
    "CRATE-LM,256": {
        "sweep": 4, "atoms": 4, "explore": 1, "graph": 1, "audit, no twins": 8,
        "audit, grid=False": 4, "compare, no twins": 4, "ablate_heads": 1, "atlas": 8,
    },
    "CRATE-B,785,2 layers": {
        "sweep": 4, "explore": 1, "audit, no twins": 8, "audit, grid=False": 4, "atlas": 8,
        "segment, no twins": 4,
    },
    "CRATE-B,1370,2 layers": {
        "sweep": 4, "explore": 1, "audit, no twins": 8, "audit, grid=False": 4, "atlas": 8,
    },
}  # fmt: skip


def made(name: str, samples: int, device: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = MODELS[name]
    if config["family"] == "crate-lm":
        model: Any = ci.HookedCrateLM(ci.CrateConfig(**config))
        data = torch.randint(config["d_vocab"], (samples, config["n_ctx"]))
    else:
        size = config["image_size"]
        look = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "resize": size, "crop": (size, size)}
        model = ci.HookedCrate(ci.CrateConfig(**config, **look))
        # smooth pictures: their files are about as large as those of photographs
        data = torch.randn(samples, 3, size // 16, size // 16)
        data = torch.nn.functional.interpolate(data, size=size, mode="bicubic")
    return model.eval().to(device), data


def clock(device: str) -> Callable[[], float]:
    if device == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def cell(name: str, verb: str, device: str) -> dict[str, float]:
    """Measures one row in this process."""
    samples = ROWS[name][verb]
    model, data = made(name, samples, device)
    now, few, times = clock(device), data[: min(samples, 4)].to(device), []

    def forwards() -> None:
        for _ in range(3):
            start = now()
            with torch.no_grad():
                model(few)
            times.append((now() - start) / len(few))

    forwards()
    with tempfile.TemporaryDirectory() as out:
        start = now()
        VERBS[verb](model, data, Path(out))
        took = now() - start
        size = sum(path.stat().st_size for path in Path(out).rglob("*") if path.is_file())
    forwards()
    forward = min(times)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device != "cpu":
        held = torch.cuda.max_memory_allocated()
    again = min(times[3:]) / min(times[:3])
    return {
        "samples": samples, "forward": forward, "noise": max(again, 1 / again),
        "forwards": took / samples / forward, "held": held, "size": size,
    }  # fmt: skip


def main() -> bool:
    settle()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        print(json.dumps(cell(*asked.cell, asked.device)))
        return True
    where = "one thread" if asked.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}\n")
    print("| model, tokens | verb | samples | forward, s | forwards a sample | peak, GiB | MB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    good, noise = True, 1.0
    for name, verbs in ROWS.items():
        for verb in verbs:
            if asked.word not in f"{name},{verb}":
                continue
            command = [sys.executable, __file__, "--device", asked.device, "--cell", name, verb]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                good = False
                last = (done.stderr.strip().splitlines() or ["no words"])[-1]
                print(f"| {name} | {verb} | failed: {last} | | | | |", flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            noise = max(noise, found["noise"])
            cells = [f"{found['samples']:.0f}", f"{found['forward']:.3f}"]
            cells += [f"{found['forwards']:.1f}", f"{found['held'] / 2**30:.1f}"]
            cells += [f"{found['size'] / 1e6:.1f}"]
            print(f"| {name} | {verb} | {' | '.join(cells)} |", flush=True)
    print(f"\nForward over forward, the noise: up to {noise:.2f}.")
    return good


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
