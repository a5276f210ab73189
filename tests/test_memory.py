"""What loading costs in memory: at most 1.3 times the weights that are kept.

Whatever lies beside them in the file does not count.
"""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import crate_interp as ci
from conftest import FIXTURES
from reference import published_layout

MEMORY = """
import sys, torch
import crate_interp as ci
# not ru_maxrss, which begins at what the parent had when it forked
def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

ci.load(sys.argv[1])
before = peak()
dtype = getattr(torch, sys.argv[3])
model = ci.load(sys.argv[2], dtype=dtype, **eval(sys.argv[4]))
weights = sum(value.numel() * value.element_size() for value in model.parameters())
print((peak() - before) / weights, weights / 2**20)
"""
SMALL = FIXTURES / "crate_lm_overcomplete" / "ckpt-crate-12l-overparam-600000.pt"


def share(path, dtype="float32", **given):
    command = [sys.executable, "-c", MEMORY, SMALL, path, dtype, repr(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    share, size = map(float, done.stdout.split())
    assert size > 60, done.stdout
    return share


def language_model():
    """A CRATE-LM of 80 MB in its published layout."""
    cfg = ci.CrateConfig(
        family="crate-lm", d_model=512, n_layers=8, n_heads=8, n_ctx=64, d_vocab=16000
    )
    named = {
        "ln1": "prenorm_1",
        "ln2": "prenorm_2",
        "attn.u_proj": "attn.c_attn",
        "attn.out_proj": "attn.c_proj",
        "mlp": "ista",
    }
    weights = {}
    for name, value in ci.HookedCrateLM(cfg).state_dict().items():
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            stem, leaf = rest.rsplit(".", 1)
            value, leaf = (value.T.contiguous(), "weight") if stem == "mlp" else (value, leaf)
            weights[f"transformer.h.{layer}.{named[stem]}.{leaf}"] = value
        else:
            top = {"embed.weight": "wte.weight", "pos_embed": "wpe.weight"}.get(
                name, name.replace("ln_final", "ln_f")
            )
            weights[f"transformer.{top}"] = value
    return weights | {"lm_head.weight": weights["transformer.wte.weight"]}, {
        "n_head": 8,
        "block_size": 64,
    }


@pytest.mark.slow
@pytest.mark.parametrize("zipped", [True, False])
def test_a_training_dict_with_optimiser_state(zipped, tmp_path):
    """12 bytes per weight, as the public CRATE-LM has them, and a tied embedding."""
    weights, model_args = language_model()
    state = {
        key: {"exp_avg": torch.zeros_like(value) + 1, "exp_avg_sq": torch.zeros_like(value) + 2}
        for key, value in weights.items()
    }
    prefixed = {f"_orig_mod.{key}": value for key, value in weights.items()}
    torch.save(
        {"model": prefixed, "optimizer": state, "model_args": model_args},
        tmp_path / "ckpt.pt",
        _use_new_zipfile_serialization=zipped,
    )
    assert share(tmp_path / "ckpt.pt") < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "safetensors", "own folder"])
def test_plain_files(how, tmp_path):
    model = ci.HookedCrate(ci.CrateConfig(family="crate-alpha", d_model=512, n_layers=6, n_heads=8))
    weights = {name: value.contiguous() for name, value in published_layout(model).items()}
    path = tmp_path / "w"
    if how == "torch":
        torch.save(weights, path)
    if how == "safetensors":
        save_file(weights, path)
    if how == "own folder":
        path = model.save_pretrained(tmp_path / "own")
    assert share(path, **({} if how == "own folder" else {"n_heads": 8})) < 1.3
