"""ci.bridge.load: folders and repos of transformers run no code, and what is refused."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

import crate_interp as ci
from conftest import FIXTURES, refuses
from crate_interp.bridge import loading
from crate_interp.bridge.adapter import build
from crate_interp.cli.request import Request
from crate_interp.models.text.tokenizer import to_json
from foreign import inputs, network

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


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def refused(match, folder):
    assert len(refuses(match, lambda: ci.bridge.load(folder), ci.CheckpointError)) < 1500


def changed(folder, kind="vit", file="config.json", **values):
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))
    return folder


@pytest.mark.parametrize("name", ["../w.safetensors", "/w.safetensors", "sly.bin", [1]])
def test_an_index_names_safetensors_beside_it(name, tmp_path, monkeypatch):
    folder = tmp_path / "vit"
    saved("vit", folder)
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "w.safetensors")
    keys = load_file(tmp_path / "w.safetensors")
    (folder / "sly.bin").write_bytes(pickle.dumps(Evil()))
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    refused(r"expected \.safetensors files in the same folder", folder)
    assert not os.path.exists("pwned")


@pytest.mark.parametrize(
    "values, match",
    [
        (dict(intermediate_size=26), "cannot be loaded"),
        (dict(num_hidden_layers="2"), "cannot be loaded"),
        (dict(quantization_config={"quant_method": "x"}), "quantization_config"),
        (dict(num_attention_heads=0), "ZeroDivisionError"),
        (dict(num_attention_heads="x"), "expected int, got str"),
        (dict(id2label="x"), "AttributeError"),
    ],
)
def test_configs_are_refused_in_a_line(values, match, tmp_path):
    saved("vit", tmp_path)
    refused(match, changed(tmp_path, **values))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_no_attention_comes_from_the_hub(name, tmp_path):
    saved("vit", tmp_path)
    read = loading._network(changed(tmp_path, **{name: "kernels-community/evil"}), torch.float32)
    assert read.config._attn_implementation == "eager"


def test_tokenizers_are_checked_before_the_library_sees_them(tmp_path, monkeypatch):
    good = json.loads(to_json(ci.load(FIXTURES / "nanochat_crate_alpha").tokenizer))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, space]}
    slow = {"type": "Split", "behavior": "Isolated", "invert": False}
    longer = space | {"content": "a" * 16}
    folder = tmp_path / "gpt2"
    saved("gpt2", folder)
    for part, admitted in (
        ({"normalizer": llama}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [longer] * 8}}, False),
        ({"normalizer": space | {"pattern": {"Regex": " "}}}, False),
        ({"pre_tokenizer": slow | {"pattern": {"Regex": "(a+)+$"}}}, False),
    ):
        (folder / "tokenizer.json").write_text(json.dumps(good | part))
        if admitted:
            assert loading._tokenizer(folder).encode("The cat") != []
            continue
        with monkeypatch.context() as patched, pytest.warns(UserWarning, match="is left out"):
            patched.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", pytest.fail)
            assert loading._tokenizer(folder) is None
