"""What an audit costs, in plain forwards of the same samples.

Layers cost the same, so that few are enough.
What is made once for each layer (random dictionaries and maps) does not grow with the samples and
is counted apart.

Of 32 samples 8 have ceilings, constructions and random maps, which take a third of the time of the
whole. The limits are what was measured on a busy machine, with a tenth on top; those of
CRATE-alpha-B are of an earlier form of the audit.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from timing import least, settle, verdict

import crate_interp as ci
from crate_interp.audits import layer
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


@contextmanager
def timed_constants(seconds: list[float]) -> Iterator[None]:
    """Notes the processor seconds of what is made once for each layer, while it is open."""
    original = layer.audited

    def call(*given, **options):
        start = time.process_time()
        try:
            return original(*given, **options)
        finally:
            seconds[-1] += time.process_time() - start

    with patch.object(layer, "audited", call):
        yield


def audited(model, images, grid: bool) -> AuditResult:
    return ci.audit(model, images, untrained=0, grid=grid, batch_size=IMAGES, progress=False)


def measured(name: str, config: dict, whole_limit: float, plain_limit: float) -> bool:
    torch.manual_seed(0)
    model = ci.HookedCrate(ci.CrateConfig(**config, n_layers=1, image_size=224)).eval()
    images = torch.randn(IMAGES, 3, 224, 224)
    seconds: dict[bool, list[float]] = {True: [], False: []}

    def audit(grid: bool) -> None:
        seconds[grid].append(0.0)
        with timed_constants(seconds[grid]):
            audited(model, images, grid)

    with torch.no_grad():
        jobs = {
            "forward": lambda: model(images),
            "whole": lambda: audit(True),
            "plain": lambda: audit(False),
            "forward again": lambda: model(images),
        }
        times = least(jobs, seconds=60)
    forward = min(times["forward"], times["forward again"])
    print(f"{name}, 1 layer, 197 tokens, {IMAGES} images: forward {forward * 1e3:.0f} ms")
    print(f"  forward over forward, the noise: {times['forward again'] / times['forward']:.3f}")
    good = True
    for what, grid, limit in (("whole", True, whole_limit), ("plain", False, plain_limit)):
        spent = (times[what] - min(seconds[grid])) / forward
        good &= verdict(f"  {what} audit, forwards", spent, limit)
    return good


def main() -> bool:
    settle()
    return all([measured(*case) for case in CASES])


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
