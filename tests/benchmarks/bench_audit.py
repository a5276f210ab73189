"""What an audit costs, in plain forwards of the same samples.

The parts of the time are those of the last audit. Layers cost the same, so that few are enough.
What is made once for each layer (random dictionaries and maps) does not grow with the samples and
is counted apart.

Of 32 samples 8 have ceilings, constructions and random maps, which take a third of the time of the
whole. The limits are what was measured on a busy machine, with a tenth on top; those of
CRATE-alpha-B are of an earlier form of the audit.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from timing import least, settle, verdict

import crate_interp as ci
from crate_interp.audits import attention, frames, layer, run, sparse
from crate_interp.audits.result import AuditResult

IMAGES = 32
# name, config, most forwards of a whole audit, and of one with grid=False
CASES = (
    ("CRATE-S", {"family": "crate", "d_model": 576, "n_heads": 12}, 28, 8),
    (
        "CRATE-alpha-B",
        {"family": "crate-alpha", "d_model": 768, "n_heads": 12, "d_mlp": 3072},
        66,
        15,
    ),
)
PARTS = {
    "constants of the weights": (layer, "audited"),
    "projections": (frames, "rows_of"),
    "projections of updates": (frames, "update_of"),
    "rates": (attention, "rates"),
    "directions": (attention, "directions"),
    "spectra": (attention, "descents"),
    "nulls, all of them": (attention, "_nulls"),
    "ceilings": (attention, "least_rate"),
    "limits of attention, all of it": (attention, "_limits"),
    "sparse step, all of it": (layer, "_sparse"),
    "its lassos": (sparse, "lasso_solution", "lasso_solutions_at"),
    "kept rates": (sparse, "of_rates"),
    "tables": (run, "table_of"),
}


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Adds the processor seconds of each part, while it is open."""
    with ExitStack() as stack:
        for part, (module, *names) in PARTS.items():
            for name in names:
                counting = counted(part, getattr(module, name), seconds)
                stack.enter_context(patch.object(module, name, counting))
        yield


def counted(part, function, seconds):
    def call(*given, **options):
        start = time.process_time()
        try:
            return function(*given, **options)
        finally:
            seconds[part] += time.process_time() - start

    return call


def audited(model, images, grid: bool) -> AuditResult:
    return ci.audit(model, images, untrained=0, grid=grid, batch_size=IMAGES, progress=False)


def measured(name: str, config: dict, whole_limit: float, plain_limit: float) -> bool:
    torch.manual_seed(0)
    model = ci.HookedCrate(ci.CrateConfig(**config, n_layers=1, image_size=224)).eval()
    images = torch.randn(IMAGES, 3, 224, 224)
    seconds: dict[str, dict[str, float]] = {}

    def audit(what: str, grid: bool) -> None:
        seconds[what] = defaultdict(float)
        with timed(seconds[what]):
            audited(model, images, grid)

    with torch.no_grad():
        jobs = {
            "forward": lambda: model(images),
            "whole": lambda: audit("whole", True),
            "plain": lambda: audit("plain", False),
            "forward again": lambda: model(images),
        }
        times = least(jobs, seconds=60)
    forward = min(times["forward"], times["forward again"])
    print(f"{name}, 1 layer, 197 tokens, {IMAGES} images: forward {forward * 1e3:.0f} ms")
    print(f"  forward over forward, the noise: {times['forward again'] / times['forward']:.3f}")
    good = True
    for what, limit, words in (
        ("whole", whole_limit, "whole audit"),
        ("plain", plain_limit, "grid=False"),
    ):
        constants = seconds[what]["constants of the weights"]
        good &= verdict(f"  {words}, forwards", (times[what] - constants) / forward, limit)
        for part in PARTS:
            print(f"    {part}: {seconds[what][part] / forward:.2f}")
    return good


def main() -> bool:
    settle()
    return all([measured(*case) for case in CASES])


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
