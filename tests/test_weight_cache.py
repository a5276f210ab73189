"""What is kept of a model's weights: measured once, and anew after every kind of edit."""

import copy
import gc
import weakref

import pytest
import torch

import crate_interp as ci
from crate_interp.models import weight_cache as module
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


def test_unchanged_weights_are_measured_once_and_others_probes_each_time(monkeypatch):
    own, seen = model(), []

    def measure(block, acts):
        seen.append(block)
        return {"norm": block.attn.W_O.norm()}

    mine = ci.Probe("mine", (), measure, {"norm": ("", 0.0, None, "")})
    _, cache = own.run_with_cache(torch.zeros(1, 1, 14, 14))
    first = ci.probe(cache, ["alignment", mine])
    for name in ("model_digest", "on_weights"):
        where = "runs.provenance" if name == "model_digest" else "run"
        monkeypatch.setattr(f"crate_interp.sweeps.{where}.{name}", _counted(name, where))
    _CALLS.clear()
    again = ci.probe(cache, ["alignment", mine])
    assert again.table("weights").equals(first.table("weights")) and len(first.table("weights"))
    assert again.meta["model_digest"] == first.meta["model_digest"]
    assert _CALLS == ["on_weights"] * 2 and len(seen) == 4  # a user's own, in each of two layers


_CALLS: list[str] = []


def _counted(name, where):
    import importlib

    real = getattr(importlib.import_module(f"crate_interp.sweeps.{where}"), name)

    def call(*given):
        _CALLS.append(name)
        return real(*given)

    return call


def test_a_model_that_is_gone_leaves_nothing_behind():
    own = model()
    ci.probe(own.run_with_cache(torch.zeros(1, 1, 14, 14))[1])
    assert own in module._KEPT
    gc.collect()  # models of other tests may go now
    count, gone = len(module._KEPT), weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None and len(module._KEPT) == count - 1
