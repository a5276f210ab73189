"""Saved folders as models of transformers, and TransformerLens tools on a bridge."""

import pytest
import torch
import torch.nn.functional as F
from transformer_lens import benchmarks
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import crate_interp as ci
from bridged import EVERY, VISION, input_of, make_clip, make_mae, model_of
from conftest import make, make_lm

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


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "crate-lm" else pytest.mark.slow) for name in EVERY],
)
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
    given = (images, torch.randint(11, (2, 5)))
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
    model.to_tokens("a")
    if not isinstance(model.tokenizer, PreTrainedTokenizerBase):
        held = model.tokenizer
        core = type(held.core).from_str(held.to_json())
        options = dict(split_special_tokens=True, eos_token="<|bos|>")
        model.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<|bos|>", **options
        )
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
