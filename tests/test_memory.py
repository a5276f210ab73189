"""What loading costs in memory: at most 1.3 times the weights that are kept.

Whatever lies beside them in the file does not count.
"""

import subprocess
import sys

import pytest
import torch

from conftest import FIXTURES
from published import published

MEMORY = """
import sys, torch
import crate_interp as ci
# not ru_maxrss, which begins at what the parent had when it forked
def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

ci.load(sys.argv[1])
before = peak()
model = ci.load(sys.argv[2], n_heads=8)
weights = sum(value.numel() * value.element_size() for value in model.parameters())
print((peak() - before) / weights, weights / 2**20)
"""
SMALL = FIXTURES / "crate_lm_overcomplete" / "ckpt-crate-12l-overparam-600000.pt"


@pytest.mark.slow
@pytest.mark.parametrize("zipped", [True, False])
def test_a_training_dict_with_optimiser_state(zipped, tmp_path):
    """12 bytes per weight, as the public CRATE-LM has them, and a tied embedding."""
    weights = published("crate-lm", n_layers=8, d=512, h=8, p=64, m=4096)
    state = {
        key: {"exp_avg": torch.zeros_like(value) + 1, "exp_avg_sq": torch.zeros_like(value) + 2}
        for key, value in weights.items()
    }
    content = {"model": {f"_orig_mod.{key}": value for key, value in weights.items()}}
    path = tmp_path / "ckpt.pt"
    torch.save(content | {"optimizer": state}, path, _use_new_zipfile_serialization=zipped)
    command = [sys.executable, "-c", MEMORY, SMALL, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    share, size = map(float, done.stdout.split())
    assert share < 1.3 and size > 60, done.stdout
