"""Bridges over hooked models, and saved folders as models of transformers: the model's numbers."""

from importlib.metadata import entry_points

import pytest
import torch
import torch.nn.functional as F
from transformer_lens import benchmarks
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
)

import crate_interp as ci
from command import python
from conftest import LAYERS, make, make_lm, refuses
from crate_interp.bridge.adapter import ARCHITECTURES, CrateAdapter
from neighbours import (
    EVERY,
    FEW,
    FEW_TEXT,
    VISION,
    input_of,
    make_clip,
    make_mae,
    metric,
    model_of,
    pair,
)
from selection import few_of


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


AUTO = {"crate_vision": AutoModelForImageClassification, "crate_text": AutoModelForCausalLM}


@pytest.fixture(scope="module", autouse=True)
def registered():
    ci.bridge.register()
    ci.bridge.register()  # a second time changes nothing


def loaded(model, folder, auto=None):
    model.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    auto = AUTO[config.model_type] if auto is None else auto
    found, told = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told  # every weight was there, and none was left over
    return config, found, ci.load(folder, dtype=model.cfg.dtype)


@pytest.mark.parametrize("name", few_of(EVERY, ["crate-lm"]))
def test_a_folder_is_an_auto_model(name, tmp_path):
    model, x = model_of(name), input_of(name)
    config, found, wanted = loaded(model, tmp_path)
    assert torch.equal(found(x).logits, wanted(x))
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(x).logits, wanted(x))
    assert found.model.cfg.to_dict() == wanted.cfg.to_dict()
    assert (found.model.cfg.device, found.model.cfg.dtype) == (wanted.cfg.device, torch.float32)
    assert (config.hidden_size, config.num_hidden_layers) == (model.cfg.d_model, 3)
    assert config.architectures == [type(found).__name__]
    assert f'"model_type": "{config.model_type}"' in repr(config)
    options = {"pixel_values" if name in VISION else "input_ids": x}
    labels = x.new_tensor([3, 5]).long() if name in VISION else x
    logits = wanted(x)
    loss = F.cross_entropy(logits, labels) if name in VISION else wanted(x, return_type="loss")
    assert torch.allclose(found(**options, labels=labels).loss, loss)
    # and back: transformers' save_pretrained writes what ci.load reads
    found.save_pretrained(tmp_path / "again")
    again = ci.load(tmp_path / "again")
    assert torch.equal(again(x), wanted(x))
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.slow
def test_frozen_tied_and_half_precision_weights(tmp_path):
    for number, over in enumerate(
        (dict(variant="fix"), dict(variant="c"), dict(variant="identity", d_head=1, d_model=5))
    ):
        _, found, wanted = loaded(make("crate", **over), tmp_path / str(number))
        frozen = [value.requires_grad for value in found.model.parameters()]
        assert frozen == [value.requires_grad for value in wanted.parameters()]
        assert torch.equal(found(input_of("crate")).logits, wanted(input_of("crate")))
    half = make_lm("gpt-baseline").half()
    _, found, wanted = loaded(half, tmp_path / "half")
    assert found.model.cfg.dtype == torch.float16
    tokens = input_of("gpt-baseline")
    assert torch.equal(found(tokens).logits, wanted(tokens))
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    assert torch.equal(wide(tokens).logits, ci.load(tmp_path / "half")(tokens))


@pytest.mark.slow
def test_labels_and_models_without_logits(tmp_path):
    labels = [f"class {index}" for index in range(11)]
    config, _, _ = loaded(make(labels=labels), tmp_path / "named")
    assert [config.id2label[index] for index in range(11)] == labels
    images, noise = torch.randn(2, 3, 6, 20), torch.rand(2, 12)
    _, found, wanted = loaded(make_mae(), tmp_path / "mae", AutoModel)
    assert torch.equal(found(images, noise).pred, wanted(images, noise).pred)
    assert not found.model.pos_embed.requires_grad
    _, found, wanted = loaded(make_clip(), tmp_path / "clip", AutoModel)
    given = (images, torch.randint(11, (2, 7)))
    for one, other in zip(found(*given), wanted(*given), strict=True):
        assert torch.equal(one, other)


def test_the_tokenizer_of_a_folder(tmp_path):
    model = ci.load("crate-tiny-lm")
    model.save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    text = "The cat sat on a mat."
    assert found(text)["input_ids"] == model.to_tokens(text, prepend_bos=False)[0].tolist()
    assert found.decode(found(text)["input_ids"]) == text
    assert found.bos_token == found.eos_token == found.pad_token == "<|bos|>"
    with pytest.warns(UserWarning, match="text holds"):
        assert found("<|bos|>")["input_ids"] == model.to_tokens("<|bos|>", False)[0].tolist()
    assert len(found("<|bos|>")["input_ids"]) > 1
    assert found("<|bos|>", split_special_tokens=False)["input_ids"] == [found.bos_token_id]
    short, long = found(["The cat", "The cat sat on"], padding=True)["attention_mask"]
    assert len(short) == sum(long) > sum(short) == len(found("The cat")["input_ids"])


@pytest.mark.parametrize("name", ["crate", pytest.param("crate-lm", marks=pytest.mark.slow)])
def test_a_bridge_over_the_transformers_model(name, tmp_path):
    model, x = model_of(name), input_of(name)
    config, found, wanted = loaded(model, tmp_path)
    bridge = build_bridge_from_module(found, type(found).__name__, hf_config=config)
    assert torch.equal(bridge(x), wanted(x))
    _, ours = wanted.run_with_cache(x)
    _, theirs = bridge.run_with_cache(x)
    assert all(torch.equal(theirs[point], value) for point, value in ours.items())
    assert all(bridge.hook_dict[point].name == point for point in ours)
    stream = wanted(x, stop_at_layer=1)
    assert torch.equal(bridge(x, stop_at_layer=1), stream)
    if name == "crate-lm":
        assert torch.equal(bridge(stream, start_at_layer=1), wanted(x))


@pytest.fixture(scope="module")
def written():
    model = ci.load("crate-tiny-lm")
    return model, ci.to_bridge(model)


@pytest.mark.slow
def test_text_goes_in_as_it_goes_into_the_model(written):
    model, bridge = written
    core = model.tokenizer
    ids = core("The cat sat", add_special_tokens=False)["input_ids"]
    assert bridge.to_tokens("The cat sat").tolist() == [[core.bos_token_id, *ids]]
    assert bridge.to_tokens("The cat sat", prepend_bos=False).tolist() == [ids]
    tokens = bridge.to_tokens("The cat sat")
    assert torch.equal(bridge("The cat sat"), model(tokens))
    assert core.split_special_tokens and bridge.tokenizer is not core


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "logits_equivalence", "loss_equivalence", "forward_hooks", "critical_forward_hooks",
        "gated_hooks_fire", "hook_functionality", "hook_registry", "backward_hooks",
        "critical_backward_hooks", "gradient_computation", "generation", "activation_cache",
        "run_with_cache",
    ],
)  # fmt: skip
def test_transformerlens_verifies_it(written, name):
    """The checks of verify_models that need no model from the Hub and no folded weights."""
    check = getattr(benchmarks, f"benchmark_{name}")
    needs = {"test_text": "The cat sat on the mat"} if name != "hook_registry" else {}
    found = check(written[1], **needs)
    assert found.passed, found
    missed = (found.details or {}).get("didnt_fire", [])
    gated = ("hook_result", "_input", "hook_attn_in", "hook_mlp_in")
    assert all(point.endswith(gated) for point in missed), missed
