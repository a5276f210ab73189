"""A cache belongs to the model that made it, as that model was: nothing reads it with another."""

import copy
import dataclasses

import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm, refuses
from crate_interp.circuits import patching
from crate_interp.models.cache import CrateCache

SENTENCE = r"weights have changed since this cache was made.*another model: call model\."
WORDS = torch.randint(0, 47, (2, 13), generator=torch.Generator().manual_seed(5))
SMALL = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def images():
    model = make("crate-alpha")
    return model, model.run_with_cache(SMALL)[1]


@pytest.fixture(scope="module")
def words():
    model = make_lm("gpt-baseline")
    return model, model.run_with_cache(WORDS)[1]


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
TEXTS = {
    "head scores": lambda cache: ci.circuits.head_scores(cache, ci.circuits.repeat_targets(WORDS)),
    "explorer": lambda cache: ci.viz.explore(cache, WORDS),
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


@pytest.mark.parametrize("reader", TEXTS.values(), ids=TEXTS)
def test_readers_of_texts(words, reader):
    model, cache = words
    reader(given_to(cache, copy.deepcopy(model)))
    for other in (edited(model), model.fresh()):
        with pytest.raises(ValueError, match=SENTENCE):
            reader(given_to(cache, other))


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
