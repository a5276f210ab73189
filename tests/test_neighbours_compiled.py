"""Hooks on compiled models: they fire, whenever they came, and the model says what it costs."""

import copy

import pytest
import torch

from conftest import make
from neighbours import ids, make_clip, pictures

pytestmark = pytest.mark.usefixtures("unchecked")  # the type checks themselves cannot be traced
POINT = "blocks.1.hook_attn_out"
SAYS = "this model was compiled with torch.compile"


def zero(tensor, hook):
    return torch.zeros_like(tensor)


class Counting:
    """A backend that counts what it compiles and leaves it as it is."""

    def __init__(self):
        self.times = 0
        torch._dynamo.reset()

    def __call__(self, graph, inputs):
        self.times += 1
        return graph


@pytest.fixture
def counting():
    yield Counting()
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_hook_added_later_fires_and_the_model_says_so_once(counting):
    model, images = make(n_layers=2), pictures(2)
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    model.add_hook("blocks.0.hook_resid_pre", lambda tensor, hook: None)  # not compiled: no word
    model.reset_hooks()
    plain = compiled(images)
    with pytest.warns(UserWarning, match=SAYS):
        compiled.add_hook(POINT, zero)
    hooked = compiled(images)
    assert torch.equal(hooked, model(images)) and not torch.equal(hooked, plain)
    compiled.add_hook("blocks.0.hook_attn_out", zero)  # said already: a warning would be an error
    assert not torch.equal(compiled(images), hooked)
    compiled.reset_hooks()
    times = counting.times
    assert torch.equal(compiled(images), plain) and counting.times == times


@pytest.mark.slow
def test_hooks_of_a_context_fire_and_go(counting):
    model, images = make(), pictures(2)
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    plain = compiled(images)
    with compiled.hooks(fwd_hooks=[(POINT, zero)]):
        assert torch.equal(compiled(images), model(images))
        assert not torch.equal(compiled(images), plain)
    assert torch.equal(compiled(images), plain) and counting.times == 2


@pytest.mark.slow
def test_a_hook_that_was_there_first_can_be_removed(counting):
    model, images = make(), pictures(2)
    plain = model(images)
    model.add_hook(POINT, zero)
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    assert not torch.equal(compiled(images), plain)
    model.reset_hooks()
    assert torch.equal(compiled(images), plain)


@pytest.mark.slow
def test_caches_and_patches_of_a_compiled_model_need_no_compiling(counting):
    model, images = make(), pictures(2)
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    plain = compiled(images)
    out, cache = compiled.run_with_cache(images)
    assert torch.equal(out, plain) and set(cache) == set(model.run_with_cache(images)[1])
    patched = compiled.run_with_hooks(images, fwd_hooks=[(POINT, zero)])
    assert torch.equal(patched, model.run_with_hooks(images, fwd_hooks=[(POINT, zero)]))
    assert not torch.equal(patched, plain) and counting.times == 1


@pytest.mark.slow
def test_a_model_compiled_in_place_runs_plainly_while_it_has_hooks(counting):
    model, images = make(), pictures(2)
    plain = model(images)
    model.compile(fullgraph=True, backend=counting)
    assert torch.equal(model(images), plain) and counting.times == 1
    _, cache = model.run_with_cache(images)
    assert torch.equal(cache["blocks.2.hook_resid_post"], make()(images, stop_at_layer=3))
    with model.hooks(fwd_hooks=[(POINT, zero)]):
        assert not torch.equal(model(images), plain)
    assert torch.equal(model(images), plain) and counting.times == 1


@pytest.mark.slow
def test_hooks_on_a_tower_reach_the_compiled_clip_and_back(counting):
    clip, images, tokens = make_clip(), pictures(2), ids(2, 7)
    compiled = torch.compile(clip, backend=counting)
    tower = torch.compile(clip.visual, backend=counting)
    plain, features = compiled(images, tokens), tower(images)
    with clip.visual.hooks(fwd_hooks=[(POINT, zero)]):
        assert not torch.equal(compiled(images, tokens), plain)
        assert not torch.equal(tower(images), features)
    with clip.hooks(fwd_hooks=[(f"visual.{POINT}", zero)]):
        assert not torch.equal(tower(images), features)
    assert torch.equal(compiled(images, tokens), plain) and torch.equal(tower(images), features)


def test_without_compiling_nothing_is_said_and_copies_are_independent():
    model, images = make(), pictures(2)
    other = copy.deepcopy(model)
    other.add_hook(POINT, zero)
    assert not torch.equal(other(images), model(images))
    assert model._hook_state[0] == "" and other._hook_state[0] == "1"
