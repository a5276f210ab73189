"""ci.bridge.load: folders and repos of transformers, pictures, and what is refused."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

import crate_interp as ci
from conftest import refuses
from crate_interp.bridge.hooked_to_bridge import build
from crate_interp.bridge.loading import BLACK_BOXES, preprocessing
from crate_interp.cli.request import Request
from foreign import _IMAGES, inputs, network

PICTURES = {
    "size": {"height": 15, "width": 15}, "resample": 3, "do_resize": True, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.2, 0.3, 0.4],
}  # fmt: skip


def saved(kind, folder, pictures=None):
    net = network(kind, dtype=torch.float32)
    net.save_pretrained(folder)
    if pictures is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return net


def test_a_folder_of_transformers(tmp_path):
    net = saved("vit", tmp_path / "a-vit", PICTURES)
    model = ci.bridge.load(tmp_path / "a-vit", subspaces="key", dtype=torch.float64)
    x = inputs("vit")
    torch.testing.assert_close(model(x), net.double()(pixel_values=x).logits)
    cfg = model.cfg
    assert (cfg.model_name, cfg.subspaces, cfg.interpolation) == ("a-vit", "key", "bicubic")
    assert (cfg.resize, cfg.mean, cfg.std) == ((15, 15), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    asked = Request(config=["subspaces=query"])
    assert asked.load(str(tmp_path / "a-vit")).cfg.n_special == 1
    with pytest.raises(ci.CheckpointError, match="revision='main' has no meaning for the folder"):
        ci.bridge.load(tmp_path / "a-vit", revision="main")
    with pytest.raises(ci.CheckpointError, match="n_heads=3 contradicts the bridge"):
        ci.bridge.load(tmp_path / "a-vit", n_heads=3)


def test_a_crate_goes_to_ci_load(tmp_path):
    from conftest import make

    model = make()
    model.save_pretrained(tmp_path / "crate")
    again = ci.bridge.load(tmp_path / "crate")
    assert type(again) is ci.HookedCrate and again.cfg == model.cfg
    for source in (tmp_path / "nowhere", "no-such-model"):
        refuses("is no file, no folder, no", partial(ci.bridge.load, source), ci.CheckpointError)


def test_pickles_and_missing_weights_are_refused(tmp_path):
    folder = tmp_path / "vit"
    saved("vit", folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    refuses("pickled weights are not read", lambda: ci.bridge.load(folder), ci.CheckpointError)
    lost = [name for name in state if "layers.1" in name or "layer.1" in name][0]
    kept = {name: value for name, value in state.items() if name != lost}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ci.CheckpointError, match="do not fit ViTForImageClassification: missing"):
        ci.bridge.load(folder)


def test_code_of_a_folder_is_never_run(tmp_path):
    folder = tmp_path / "vit"
    saved("vit", folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "sly.Sly", "AutoConfig": "sly.SlyConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "sly.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert ci.bridge.load(folder).cfg.architecture == "ViTForImageClassification"
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("deit", "dinov2", "registers", "gpt2", "llama"))
def test_every_known_kind_is_loaded(kind, tmp_path):
    net = saved(kind, tmp_path / kind)
    model = ci.bridge.load(tmp_path / kind, dtype=torch.float64)
    x = inputs(kind)
    out = net.double()(**{"input_ids" if kind in ("gpt2", "llama") else "pixel_values": x})
    wanted = out.logits if hasattr(out, "logits") else out.last_hidden_state[:, 0]
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("MistralForCausalLM", "Qwen2ForCausalLM"))
def test_what_the_table_names_beside(name, tmp_path):
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=13, vocab_size=31, max_position_embeddings=13,
    )  # fmt: skip
    getattr(transformers, name)(config).save_pretrained(tmp_path / "lm")
    assert name in BLACK_BOXES[config.model_type]
    model = ci.bridge.load(tmp_path / "lm")
    assert model(torch.arange(5)[None]).shape == (1, 5, 31)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, pictures",
    [
        ("ViTImageProcessorPil", PICTURES),
        (
            "BitImageProcessorPil",
            PICTURES
            | {
                "size": {"shortest_edge": 18},
                "do_center_crop": True,
                "crop_size": {"height": 10, "width": 10},
            },
        ),
    ],
)
def test_pictures_become_what_transformers_makes_of_them(name, pictures, tmp_path):
    saved("dinov2", tmp_path / "net", pictures)
    model = ci.bridge.load(tmp_path / "net")
    rng = np.random.default_rng(0)
    shown = [Image.fromarray(rng.integers(0, 255, (23, 37, 3), dtype=np.uint8)) for _ in range(3)]
    theirs = getattr(transformers, name)(**pictures)(shown, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(model.preprocess(shown), theirs, rtol=0, atol=1e-6)
    size = 10 if "crop_size" in pictures else 15
    assert model.cfg.image_size == (size, size) and model(model.preprocess(shown)).shape == (3, 22)


def test_what_a_preprocessor_says(tmp_path):
    def read(**changed):
        values = {name: value for name, value in (PICTURES | changed).items() if value is not None}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
        return preprocessing(tmp_path, object())

    assert read(size=17)["resize"] == (17, 17) and read(do_resize=False).get("resize") is None
    assert read(do_normalize=False)["mean"] == [0.0] * 3
    assert "mean" not in read(image_mean=None)
    for changed in (dict(do_rescale=False), dict(rescale_factor=1 / 127.5)):
        refuses("does not scale pictures to", partial(read, **changed), ci.CheckpointError)
    assert preprocessing(tmp_path / "nowhere", object()) == {}


@pytest.mark.slow
def test_a_repo_on_the_hub(hub, tmp_path):
    net = saved("vit", tmp_path / "vit", PICTURES)
    files = {path.name: path.read_bytes() for path in (tmp_path / "vit").iterdir()}
    hub.repo("someone/a-vit").commit(files | {"pytorch_model.bin": b"never asked for"})
    model = ci.bridge.load("someone/a-vit")
    x = inputs("vit", dtype=torch.float32)
    torch.testing.assert_close(model(x), net(pixel_values=x).logits)
    assert model.cfg.model_name == "someone/a-vit" and model.cfg.mean == (0.4, 0.5, 0.6)
    hub.repo("someone/pickled").commit(
        {"config.json": files["config.json"], "pytorch_model.bin": b"never asked for"}
    )
    with pytest.raises(ci.CheckpointError, match="pickled weights are not read"):
        ci.bridge.load("someone/pickled")
    assert not [path for path in hub.sent("GET") if "pytorch_model" in str(path)]


def test_layers_that_the_config_leaves_out_are_not_left_out_in_silence(tmp_path):
    saved("gpt2", tmp_path / "two")
    path = tmp_path / "two" / "config.json"
    config = json.loads(path.read_text())
    assert config["n_layer"] > 1
    path.write_text(json.dumps(config | {"n_layer": 1}))
    with pytest.raises(ci.CheckpointError, match=r"does not read these keys.*\['.*h\.1\."):
        ci.bridge.load(tmp_path / "two")


def rewritten(folder, architectures="as it is", **tensors):
    """Changes the class that a folder names, and adds tensors to its file."""
    path, weights = folder / "config.json", folder / "model.safetensors"
    if architectures != "as it is":
        config = json.loads(path.read_text()) | {"architectures": architectures}
        path.write_text(json.dumps(config))
    save_file(load_file(weights) | tensors, weights, metadata={"format": "pt"})


def test_a_class_of_its_own_is_refused_and_no_head_is_dropped(tmp_path):
    folder = tmp_path / "vit"
    saved("vit", folder)
    for named in (["MyViT"], "MyViT", ["ViTForImageClassification", "ViTModel"], [[1]]):
        rewritten(folder, named)
        with pytest.raises(ci.CheckpointError, match="known are ViTForImageClassification, ViTMod"):
            ci.bridge.load(folder)
    for named in (["ViTModel"], [], None):  # the class without a head
        rewritten(folder, named)
        refuses(r"ViTModel does not read these", lambda: ci.bridge.load(folder), ci.CheckpointError)


def test_a_distilled_classifier_is_refused(tmp_path):
    values, folder = _IMAGES | {"intermediate_size": 13}, tmp_path / "deit"
    net = transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**values))
    net.save_pretrained(folder)
    with pytest.raises(ci.CheckpointError, match="WithTeacher'.*known are DeiTForImageClassificat"):
        ci.bridge.load(folder)
    rewritten(folder, None)
    with pytest.raises(ci.CheckpointError, match="DeiTModel does not read.*distillation_classif"):
        ci.bridge.load(folder)


def test_keys_on_which_no_output_depends_may_stay_unread(tmp_path):
    folder = tmp_path / "vit"
    net = saved("vit", folder)
    rewritten(folder, **{"vit.pooler.dense.weight": torch.ones(22, 22)})
    rewritten(folder, **{"vit.embeddings.mask_token": torch.ones(1, 1, 22)})
    x = inputs("vit", dtype=torch.float32)
    torch.testing.assert_close(ci.bridge.load(folder)(x), net(pixel_values=x).logits)
    rewritten(folder, **{"vit.embeddings.another_token": torch.ones(1, 1, 22)})
    with pytest.raises(ci.CheckpointError, match=r"keys of .*'vit.embeddings.another_token'"):
        ci.bridge.load(folder)


@pytest.mark.parametrize("pooler", [True, False])
def test_a_network_without_a_head_has_features(pooler, tmp_path):
    """A pooler is left out, since no output depends on it."""
    config = transformers.ViTConfig(**_IMAGES, intermediate_size=13)
    net = transformers.ViTModel(config, add_pooling_layer=pooler).eval()
    net.save_pretrained(tmp_path / "vit")
    model, x = ci.bridge.load(tmp_path / "vit"), inputs("vit", dtype=torch.float32)
    assert not model.has_logits and model.network.pooler is None
    torch.testing.assert_close(model(x), net(x).last_hidden_state[:, 0])


@pytest.mark.parametrize("name", ["ViT", "Dinov2"])
def test_a_classifier_of_no_labels_has_features(name, tmp_path):
    config = getattr(transformers, f"{name}Config")(**_IMAGES | {"num_labels": 0})
    net = getattr(transformers, f"{name}ForImageClassification")(config).eval()
    net.save_pretrained(tmp_path / "net")
    model, x = ci.bridge.load(tmp_path / "net"), inputs("vit", dtype=torch.float32)
    assert not model.has_logits and model.cfg.n_classes == 22
    body = net.vit if name == "ViT" else net.dinov2
    torch.testing.assert_close(model(x), body(x).last_hidden_state[:, 0])
    refuses("unembed", lambda: model.unembed, AttributeError)


def with_setting(kind, **setting):
    """A network of a kind with another setting in its config; equal weights."""
    plain = network(kind, dtype=torch.float32)
    config = type(plain.config)(**{**plain.config.to_dict(), **setting})
    config._attn_implementation = "eager"
    other = type(plain)(config).eval().requires_grad_(False)
    other.load_state_dict(plain.state_dict(), strict=False)
    return other


SETTINGS = {
    "every layer its own scale": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "another activation": ("gpt2", {"activation_function": "relu"}),
    "another epsilon": ("gpt2", {"layer_norm_epsilon": 0.3}),
    "no biases": ("vit", {"qkv_bias": False}),
    "slower rotations": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 97.0}},
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_is_known_gives_the_numbers_of_transformers(case, tmp_path):
    kind, setting = SETTINGS[case]
    net = with_setting(kind, **setting)
    net.save_pretrained(tmp_path)
    given = inputs(kind, dtype=torch.float32)
    wanted = net(given).logits
    assert not torch.allclose(wanted, network(kind, dtype=torch.float32)(given).logits, atol=1e-3)
    assert torch.allclose(ci.bridge.load(tmp_path)(given), wanted, atol=1e-5)


def test_a_setting_that_the_adapter_ignores_is_refused(tmp_path):
    net = with_setting("gpt2", scale_attn_weights=False)
    net.save_pretrained(tmp_path)
    refuses("another function", lambda: ci.bridge.load(tmp_path), ci.CheckpointError)
    refuses("another function", lambda: ci.from_bridge(build(net)))


PLACES = {
    "the embedding": lambda bridge: bridge.embed,
    "layer 1": lambda bridge: bridge.blocks[1].attn.q,
    "what follows the last layer": lambda bridge: bridge.unembed,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_bridge_that_differs_at_any_place_is_refused(place):
    bridge = build(network("gpt2", dtype=torch.float32))
    ci.from_bridge(bridge)
    PLACES[place](bridge).hook_out.add_hook(lambda value, hook: 3 * value)
    refuses("another function", lambda: ci.from_bridge(bridge))
    bridge.reset_hooks()
    ci.from_bridge(bridge)


def test_the_networks_own_parts_leave_the_bridge_as_it_was():
    bridge = build(network("gpt2", dtype=torch.float32))
    before = {name: id(module) for name, module in bridge.named_modules()}
    tokens = inputs("gpt2")
    wanted = bridge(tokens)
    model = ci.from_bridge(bridge)
    assert {name: id(module) for name, module in bridge.named_modules()} == before
    assert torch.equal(model(tokens), wanted)
