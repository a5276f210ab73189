"""Prints how many files and functions of ours three calls enter once they are warm.

That is what a reader walks through. Lambdas and comprehensions do not count.
Usage: python tests/walks.py
"""

import sys
from pathlib import Path
from tempfile import mkdtemp

import crate_hooks
import crate_interp as ci

ROOTS = tuple(str(Path(str(module.__file__)).parent) for module in (ci, crate_hooks))
SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 2, "image_size": 28, "patch_size": 7}
LOOK = {"channels": 1, "n_classes": 10, "mean": 0.3, "std": 0.3}
MODEL = ci.HookedCrate(ci.CrateConfig(family="crate", **SMALL, **LOOK)).eval()
FEW = {"data": "embedded:fashion", "limit": 2, "progress": False}


def load():
    ci.load("crate-tiny-fashion")


def sweep():
    ci.viz.layers(ci.sweep(MODEL, **FEW), "compression.rate_mid")


def audit():
    ci.viz.audit_page(ci.audit(MODEL, untrained=1, lasso_tokens=2, **FEW), mkdtemp())


def walk(act) -> tuple[int, int]:
    """Returns how many files and functions a call enters the second time."""
    act()
    entered = set()

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOTS) and code.co_name[0] != "<":
            entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return len({file for file, _ in entered}), len(entered)


if __name__ == "__main__":
    for act in (load, sweep, audit):
        sys.stdout.write(f"{act.__name__} {' '.join(map(str, walk(act)))}\n")
