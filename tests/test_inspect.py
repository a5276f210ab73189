"""`crate-interp inspect`: the layout, where each setting comes from, and what is left out."""

import argparse
import json

import torch

from command import run
from conftest import D_MODEL, HEADS, make
from published import GIVEN, published
from reference import published_layout


def test_inspect_says_where_each_setting_comes_from(tmp_path):
    square = make("crate-alpha", image_size=(4, 10), patch_size=(2, 5))
    torch.save(published_layout(square), tmp_path / "w.pth")
    done = run("inspect", tmp_path / "w.pth", "--config", f"n_heads={HEADS}", "--config", "eta=0.2")
    assert done.returncode == 0, done.stderr
    for line in (
        "layout: crate-alpha",
        f"n_heads = {HEADS}  (argument)",
        "eta = 0.2  (argument)",
        f"d_model = {D_MODEL}  (tensors)",
        "lambd = 0.1  (assumed: published default)",
        'sparse_step = "odl"  (published default)',
        "image_size = [4, 10]  (a guess: the number of patches is a square)",
    ):
        assert line in done.stdout, line
    args = argparse.Namespace(norm_pix_loss=True)
    torch.save({"model": published("crate-mae", d=30), "args": args}, tmp_path / "mae.pth")
    given = GIVEN["crate-mae"].items()
    options = [f"--config={name}={json.dumps(value)}" for name, value in given]
    done = run("inspect", tmp_path / "mae.pth", *options)
    assert "norm_pix_loss = true  (file)" in done.stdout, done.stderr
    done = run("inspect", "crate-tiny-fashion")
    assert "layout: folder saved by crate_interp" in done.stdout
    assert "eta = 0.1  (config)" in done.stdout and done.stdout.endswith("left out:\n  nothing\n")


def test_inspect_names_what_is_left_out_and_refuses_what_does_not_fit(tmp_path):
    weights, path = published_layout(make("crate-alpha")), tmp_path / "w.pth"
    given = (path, "--config", f"n_heads={HEADS}", "--config", "image_size=[6, 20]")
    torch.save(weights | {"n_averaged": torch.tensor(3)}, path)
    assert "left out: n_averaged" in run("inspect", *given).stdout
    torch.save(weights | {"transformer.odd": torch.ones(3)}, path)
    done = run("inspect", *given)
    assert done.returncode == 2 and "keys not used (1): transformer.odd" in done.stderr
    assert "settings:" in done.stdout
