"""What is kept of a model's weights: measured once, and anew after every kind of edit."""

import copy
from functools import partial

import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.models.weight_cache import model_digest


def model(dtype=torch.float32):
    torch.manual_seed(0)
    cfg = ci.CrateConfig(
        family="crate", d_model=15, n_layers=2, n_heads=3, image_size=14, patch_size=7, channels=1
    )
    return ci.HookedCrate(cfg).eval().to(dtype)


def replaced(own):
    own.blocks[1].attn.u_proj.weight = torch.nn.Parameter(
        2 * own.blocks[1].attn.u_proj.weight.detach()
    )


def swapped(own):
    """Two rows change places: every sum over all of the weight stays."""
    weight = own.blocks[0].attn.u_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]].clone()


def through_a_view(own):
    own.blocks[0].attn.u_proj.weight.detach().numpy()[3, 2] += 1


def in_place(own):
    with torch.no_grad():
        own.blocks[0].attn.u_proj.weight.mul_(1.5)


EDITS = {
    "in place": in_place,
    "through .data": lambda own: own.blocks[0].attn.u_proj.weight.data.mul_(1.5),
    "through a view": through_a_view,
    "swapped rows": swapped,
    "another tensor": replaced,
    "load_state_dict": lambda own: own.load_state_dict(
        {name: value + 0.125 for name, value in own.state_dict().items()}
    ),
    "to another dtype": lambda own: own.to(torch.float64),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_edit_gives_new_numbers(edit):
    own = model()
    images = torch.randn(2, 1, 14, 14, generator=torch.Generator().manual_seed(1))
    before = ci.probe(own.run_with_cache(images)[1])
    edit(own)
    after = ci.probe(own.run_with_cache(images.to(own.cfg.dtype))[1])
    fresh = copy.deepcopy(own)  # of which nothing is kept
    wanted = ci.probe(fresh.run_with_cache(images.to(own.cfg.dtype))[1])
    assert after.meta["model_digest"] == model_digest(own) != before.meta["model_digest"]
    assert after.table("weights").equals(wanted.table("weights"))
    assert not after.table("weights")["value"].equals(before.table("weights")["value"])


def wide(dtype=torch.float32):
    return make("crate-alpha", n_layers=2, d_model=67, d_head=13).to(dtype)


def readers(own, images, folder):
    """Readers of activations and folders: each refuses those of another model."""
    points = [f"blocks.{layer}.mlp.hook_post" for layer in (0, 1)]
    quiet, cache = {"progress": False}, own.run_with_cache(images)[1]
    stored = ci.store(own, images, points=points, out=folder / "store", **quiet)
    folders = {
        "sweep": partial(ci.sweep, probes="sparsity"),
        "atoms": ci.atoms,
        "store": partial(ci.store, points=points),
    }
    return {
        name: partial(verb, own, images, out=folder / name, **quiet)
        for name, verb in folders.items()
    } | {
        "a probe on the store": lambda: ci.sweep(own, stored, probes="sparsity", **quiet),
        "a probe on the cache": lambda: ci.probe(cache),
    }


def test_every_reader_notices_an_edit_that_no_sum_shows(tmp_path):
    own, images = wide(), torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(7))
    calls = readers(own, images, tmp_path)
    for call in calls.values():
        call()
    swapped(own)
    for name, call in calls.items():
        with pytest.raises(ValueError, match="weights|another|model"):
            pytest.fail(f"{name} took another model: {call()}")
