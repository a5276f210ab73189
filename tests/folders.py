"""What tests of saved folders share."""

import torch

import crate_interp as ci
from conftest import make


def files_of(folder):
    """Name -> content of every file below a folder."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def two_sweeps():
    """Returns the results of two models on the same data."""
    data = torch.randn(5, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    options = dict(probes="sparsity", controls=0, progress=False)
    return [
        ci.sweep(make(seed=seed, model_name=f"model-{seed}"), data, **options) for seed in (0, 1)
    ]


def leftovers(folder):
    """Returns the files and folders that only a process that died leaves behind."""
    return sorted(path for path in folder.rglob(".*") if path.name != ".")
