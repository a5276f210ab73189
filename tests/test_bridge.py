"""A bridge over a hooked model: logits, activations, edits and gradients are the model's."""

from importlib.metadata import entry_points

import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

import crate_interp as ci
from bridged import EVERY, FEW, FEW_TEXT, VISION, input_of, metric, model_of, pair
from command import python
from conftest import LAYERS, refuses
from crate_interp.bridge.adapter import ARCHITECTURES, CrateAdapter


@pytest.mark.parametrize("name", EVERY)
def test_logits_and_activations_are_the_models(name):
    model, bridge, x = pair(name)
    assert isinstance(bridge, TransformerBridge)
    assert torch.equal(bridge(x), model(x))
    logits, ours = model.run_with_cache(x)
    same, theirs = bridge.run_with_cache(x)
    assert torch.equal(same, logits)
    for point, value in ours.items():
        assert torch.equal(theirs[point], value), point
    for point in ours:
        assert bridge.hook_dict[point].name == point
    # no point has two names, whatever it is asked for by
    names = {id(point): point.name for point in bridge.hook_dict.values()}
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("name", FEW)
def test_edits_and_gradients_are_the_models(name):
    model, bridge, x = pair(name)
    points = ["blocks.1.hook_resid_pre", "blocks.1.attn.hook_pattern", "blocks.2.mlp.hook_post"]

    def halve(value, hook):
        assert hook.name in points
        return value / 2

    hooks = [(point, halve) for point in points]
    edited = model.run_with_hooks(x, fwd_hooks=hooks)
    assert not torch.equal(edited, model(x))
    assert torch.equal(bridge.run_with_hooks(x, fwd_hooks=hooks), edited)
    other = bridge.run_with_hooks(x, fwd_hooks=[("blocks.1.hook_in", halve)])
    own = model.run_with_hooks(x, fwd_hooks=[("blocks.1.hook_resid_pre", halve)])
    assert torch.equal(other, own)

    grads = {"model": {}, "bridge": {}}
    for key, one in (("model", model), ("bridge", bridge)):

        def keep(grad, hook, kept=grads[key]):
            kept[hook.name] = grad.clone()

        with one.hooks(bwd_hooks=[(point, keep) for point in points]):
            metric(one(x)).backward()
    assert set(grads["model"]) == set(points)
    for point in points:
        assert torch.equal(grads["bridge"][point], grads["model"][point])
    theirs = dict(bridge.named_parameters())
    assert len(theirs) == len(list(model.parameters()))
    own = [value.grad for value in model.parameters()]
    for value, wanted in zip(bridge.parameters(), own, strict=True):
        assert (wanted is None and value.grad is None) or torch.equal(value.grad, wanted)


@pytest.mark.parametrize("name", FEW)
def test_the_model_is_left_alone(name):
    model = model_of(name)
    model.add_perma_hook("blocks.0.hook_resid_pre", lambda value, hook: None)

    def state():
        return {
            "weights": {key: value.clone() for key, value in model.state_dict().items()},
            "names": {key: point.name for key, point in model.hook_dict.items()},
            "modules": [(key, type(module)) for key, module in model.named_modules()],
            "cfg": (model.cfg.to_dict(), model.cfg.dtype, model.cfg.device),
            "hooks": [len(point.fwd_hooks) for point in model.hook_dict.values()],
            "fields": sorted(model.__dict__),
            "modes": [module.training for module in model.modules()],
        }

    before = state()
    bridge = ci.to_bridge(model)
    bridge.run_with_cache(input_of(name))
    bridge.set_use_attn_result(True)
    bridge.train()
    with torch.no_grad():
        for value in bridge.parameters():
            value.zero_()
    after = state()
    assert list(after["weights"]) == list(before["weights"])
    for key, value in before["weights"].items():
        assert torch.equal(after["weights"][key], value), key
    assert {**after, "weights": 0} == {**before, "weights": 0}


@pytest.mark.parametrize("name", FEW)
def test_stop_and_start_at_a_layer(name):
    model, bridge, x = pair(name)
    for layer in range(-LAYERS, LAYERS):
        wanted = model(x, stop_at_layer=layer)
        assert torch.equal(bridge(x, stop_at_layer=layer), wanted)
        assert torch.equal(bridge.run_with_cache(x, stop_at_layer=layer)[0], wanted)
    stream = torch.randn(2, 5, model.cfg.d_model)
    if name in VISION:
        refuses("vision", lambda: bridge(stream, start_at_layer=1), NotImplementedError)
        return
    wanted = model(stream, start_at_layer=LAYERS - 1)
    assert torch.equal(bridge(stream, start_at_layer=LAYERS - 1), wanted)
    if name == "nanochat-crate":  # later layers add the embedding
        refuses("x0_lambdas", lambda: bridge(stream, start_at_layer=0))
    else:
        assert torch.equal(bridge(stream, start_at_layer=1), model(stream, start_at_layer=1))


@pytest.mark.parametrize("name", FEW_TEXT)
def test_vectors_in_place_of_tokens_losses_and_generation(name):
    model, bridge, x = pair(name)
    assert torch.equal(bridge(model.embed(x)), model(x))
    assert torch.allclose(bridge(x, return_type="loss"), model(x, return_type="loss"))
    options = dict(do_sample=False, verbose=False, stop_at_eos=False)
    written = bridge.generate(x, max_new_tokens=4, **options)
    for _ in range(4):
        x = torch.cat([x, model(x)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(written, x)


@pytest.mark.parametrize("name", FEW)
def test_switches_reach_the_copy(name):
    model, bridge, x = pair(name)
    with pytest.raises(ValueError, match="use_attn_result"):
        bridge.add_hook("blocks.0.attn.hook_result", lambda value, hook: None)
    for one in (model, bridge):
        one.set_use_attn_result(True)
        one.set_use_split_qkv_input(True)
    _, ours = model.run_with_cache(x)
    _, theirs = bridge.run_with_cache(x)
    for point in ("blocks.1.attn.hook_result", "blocks.1.attn.hook_k_input"):
        assert torch.equal(theirs[point], ours[point])
    bridge.cfg.use_split_qkv_input = False
    assert not bridge.original_model.cfg.use_split_qkv_input
    assert ci.to_bridge(model).cfg.use_attn_result


@pytest.mark.parametrize("name", FEW)
def test_weights_by_transformerlens_names(name):
    model, bridge, _ = pair(name)
    for weight in ("W_Q", "W_K", "W_V", "W_O", "b_O", "W_U", "b_U", "W_E"):
        assert torch.equal(getattr(bridge, weight), getattr(model, weight)), weight
    if name != "nanochat-crate":
        assert torch.equal(bridge.W_pos, model.W_pos)
    params = bridge.tl_parameters()
    if "ista" in model.cfg.sparse_step:  # no decoder: left out, not filled with zeros
        assert not any(".mlp." in key for key in params)
    else:
        assert torch.equal(params["blocks.1.mlp.W_out"], model.blocks[1].mlp.W_out)
    if name == "gpt-baseline":
        attn, mlp = model.blocks[1].attn, model.blocks[1].mlp
        biases = attn.qkv_proj.bias.view(3, model.cfg.n_heads, model.cfg.d_head)
        for role, bias in zip("QKV", biases, strict=True):
            assert torch.equal(params[f"blocks.1.attn.b_{role}"], bias)
        assert torch.equal(params["blocks.1.mlp.b_in"], mlp.fc_in.bias)
    if name == "nanochat-crate":
        assert torch.equal(params["blocks.1.mlp.b_in"], -model.blocks[1].mlp.threshold)


def test_the_installed_package_names_the_adapter():
    found = entry_points(group="transformer_lens.architectures")
    ours = {one.name: one for one in found if one.value.startswith("crate_interp.")}
    assert set(ours) == set(ARCHITECTURES)
    assert all(one.load() is CrateAdapter for one in ours.values())


ALONE = """
import sys, torch, transformer_lens
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
assert not any(name.startswith("crate_interp") for name in sys.modules)
cfg = TransformerBridgeConfig(
    d_model=8, d_head=4, n_layers=1, n_ctx=5, n_heads=2, architecture="HookedCrateLM"
)
adapter = ArchitectureAdapterFactory.select_architecture_adapter(cfg)
assert type(adapter).__module__ == "crate_interp.bridge.adapter", adapter
assert "crate_interp.checkpoints.load" not in sys.modules  # cheap, no more than it needs
assert "sklearn" not in sys.modules and "matplotlib" not in sys.modules

import crate_interp as ci
from transformer_lens.model_bridge.sources import build_bridge_from_module
size = dict(d_model=8, d_head=4, n_layers=1, n_ctx=5, n_heads=2, d_vocab=11)
model = ci.HookedCrateLM(ci.CrateConfig(family="crate-lm", **size)).eval()
tokens = torch.tensor([[1, 2, 3]])
wanted = model(tokens)
bridge = build_bridge_from_module(model, "HookedCrateLM", tl_config=cfg)
assert torch.equal(bridge(tokens), wanted)
print("found")
"""


@pytest.mark.slow
def test_a_process_that_imports_transformerlens_alone_finds_the_adapter():
    run = python(ALONE)
    assert run.stdout == "found\n", run.stderr
