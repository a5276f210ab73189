"""Folders of transformers run no code of theirs, and are refused in a line."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file

import crate_interp as ci
from conftest import FIXTURES, refuses
from crate_interp.bridge import loading
from crate_interp.models.text.tokenizer import to_json
from test_foreign_loading import PICTURES, saved


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


@pytest.mark.parametrize(
    "values, match",
    [
        (dict(rescale_factor=10**400), "cannot be loaded: OverflowError"),
        (dict(rescale_factor="x"), "cannot be loaded: ValueError"),
        (dict(resample=[1]), "cannot be loaded: TypeError"),
    ],
)
def test_preprocessors_are_refused_in_a_line(values, match, tmp_path):
    saved("vit", tmp_path, PICTURES)
    refused(match, changed(tmp_path, file="preprocessor_config.json", **values))


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
