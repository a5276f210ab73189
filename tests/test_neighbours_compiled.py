"""Hooks on compiled models: they fire, whenever they came, and the model says what it costs."""

import pytest
import torch

from conftest import make
from neighbours import pictures

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
