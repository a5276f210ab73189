"""What is kept of a model's weights, and caches that another model may not read."""

import copy
import dataclasses

import pytest
import torch

import crate_interp as ci
from conftest import make, refuses
from crate_interp.circuits import patching
from crate_interp.models.cache import CrateCache
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


SENTENCE = r"weights have changed since this cache was made.*another model: call model\."
SMALL = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def images():
    model = make("crate-alpha")
    return model, model.run_with_cache(SMALL)[1]


def metric(logits):
    return logits[..., 3].mean()


IMAGES = {
    "probe": lambda cache: ci.probe(cache, "sparsity"),
    "lens table": lambda cache: ci.circuits.logit_lens(cache),
    "attribution": lambda cache: ci.circuits.logit_attribution(cache, 3),
    "head results": lambda cache: cache.stack_head_results(),
    "neurons": lambda cache: cache.stack_neuron_results(-1),
    "decomposition": lambda cache: cache.get_full_resid_decomposition(),
    "last norm": lambda cache: cache.accumulated_resid(apply_ln=True),
    "maps": lambda cache: ci.maps.attention(cache, 1),
    "rollout": lambda cache: ci.maps.rollout(cache),
    "page of attention": lambda cache: ci.viz.attention(cache, 1),
    "explorer": lambda cache: ci.viz.explore(cache, SMALL),
    "patching": lambda cache: patching.get_act_patch_resid_mid(cache.model, SMALL, cache, metric),
}


def edited(model):
    own = copy.deepcopy(model)
    own.blocks[1].attn.W_O.data[0, 1, 2] += 0.5
    own.blocks[1].mlp.W_out.data[3, 4] += 0.5
    return own


def reconfigured(model):
    own = copy.deepcopy(model)
    own.cfg = dataclasses.replace(own.cfg, ln_eps=1e-2)
    return own


OTHERS = {
    "an edited copy": edited,
    "another config": reconfigured,
    "an untrained twin": lambda model: model.fresh(),
    "half precision": lambda model: copy.deepcopy(model).to(torch.bfloat16),
    "no model of ours": lambda model: torch.nn.Linear(2, 3),
}


def given_to(cache, other):
    own = copy.copy(cache)
    own.model = other
    return own


@pytest.mark.parametrize("reader", IMAGES.values(), ids=IMAGES)
def test_readers_of_images(images, reader):
    model, cache = images
    twin = copy.deepcopy(model)
    reader(given_to(cache, twin))  # equal weights
    for other in (edited(model), model.fresh()):
        with pytest.raises(ValueError, match=SENTENCE):
            reader(given_to(cache, other))
    with torch.no_grad():
        twin.blocks[0].attn.W_O.data.mul_(1.01)
    refuses(SENTENCE, lambda: reader(given_to(cache, twin)))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_every_other_model(images, other):
    model, cache = images
    makes = (
        given_to, lambda cache, other: CrateCache(cache.cache_dict, other),
        lambda cache, other: given_to(cache.apply_slice_to_batch_dim([1]), other),
        lambda cache, other: given_to(cache.alone(0), other),
    )  # fmt: skip
    for make_cache in makes:
        make_cache(cache, model).check_weights()
        with pytest.raises(ValueError, match=SENTENCE):
            make_cache(cache, other(model)).check_weights()


def test_a_plain_dict_is_taken_as_it_is(images):
    """It is the way to patch from another model on purpose."""
    model, cache = images
    other = model.fresh().eval()
    sweep = patching.get_act_patch_attn_head_out_all_pos
    assert sweep(other, SMALL, dict(cache), metric).shape == (3, 5)
    refuses(SENTENCE, lambda: sweep(other, SMALL, cache, metric))
