"""Weight files as trainers write them: the bits of the plain file, or one sentence of refusal."""

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import crate_interp as ci
from conftest import HEADS, make, make_lm, refuses
from crate_interp.checkpoints.state_dicts import LeftOutWarning
from published import published
from reference import published_layout

GIVEN = {"n_heads": HEADS, "patch_size": (2, 5), "image_size": (6, 20)}
MODEL, OTHER = make(n_layers=2), make(n_layers=2, seed=1)
WEIGHTS, AVERAGED = published_layout(MODEL), published_layout(OTHER)


def under(prefix, weights=WEIGHTS):
    return {f"{prefix}{key}": value for key, value in weights.items()}


def inside(word, weights=WEIGHTS):
    """The word of a wrapper of every layer, and one around the model."""
    wrapped = {
        key.replace("transformer.layers.", "transformer.layers.@").replace("@0.", f"0.{word}.")
        .replace("@1.", f"1.{word}."): value
        for key, value in weights.items()
    }  # fmt: skip
    return under(f"{word}.", wrapped)


def same(got, model=MODEL):
    assert got.cfg == model.cfg
    for name, value in model.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name


def loads(source, folder, told="", model=MODEL, flat=True, **given):
    """Loads a dict or module in memory, as a torch file and, if it is flat, as safetensors."""
    sources = [source, folder / "w.pth"]
    content = source.state_dict() if isinstance(source, torch.nn.Module) else source
    torch.save(content, sources[1])
    if flat:
        sources.append(folder / "w.safetensors")
        copied = {key: value.detach().clone().contiguous() for key, value in content.items()}
        save_file(copied, sources[2])
    for one in sources:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            same(ci.load(one, **GIVEN, **given), model)
        lines = [str(line.message) for line in caught if line.category is LeftOutWarning]
        assert len(lines) == bool(told) and all(told in line for line in lines), lines
        assert all("\n" not in line for line in lines)


def fails(match, source, **given):
    refuses(match, lambda: ci.load(source, **{**GIVEN, **given}), ci.CheckpointError)


# ------------------------------------------------------------------ words around the names


@pytest.mark.parametrize(
    "word", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"]
)
def test_words_of_wrappers(word, tmp_path):
    loads(under("module.", inside(word)), tmp_path)


@pytest.mark.parametrize("prefix", ["model.", "net.", "backbone.module.", "anything.encoder."])
def test_one_prefix(prefix, tmp_path):
    loads(under(prefix), tmp_path)
    beside = {"criterion.weight": torch.ones(3), "train_acc.tp": torch.ones(5).long()}
    named = "tensors outside the model are left out: criterion.weight, train_acc.tp."
    loads(under(prefix) | beside, tmp_path, named)


@pytest.mark.parametrize("key", ["state_dict", "module", "net", "any"])
def test_one_level_down(key, tmp_path):
    """Scores, an optimiser's state by number, plain values: none of it is a set of weights."""
    beside = {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
        "best": {"acc": torch.tensor(0.5)},
        "acc": torch.tensor(0.5),
        "score": np.float64(0.5),
        "seen": np.int64(3),
        "out": Path("runs/a"),
        "args": argparse.Namespace(out=Path("/runs"), lr=np.float32(0.5), names=["a"]),
        "epoch": 3,
        "none": None,
    }
    loads(beside | {key: WEIGHTS}, tmp_path, flat=False)


def test_other_layouts_and_names_of_our_own(tmp_path):
    alpha, lm = make("crate-alpha", n_layers=2), make_lm("crate-lm")
    given = {name: GIVEN[name] for name in ("n_heads", "image_size")}
    wrapped = under("net.", inside("_orig_mod", published_layout(alpha)))
    torch.save({"weights": wrapped, "args": argparse.Namespace(n_head=7)}, tmp_path / "a.pth")
    same(ci.load(tmp_path / "a.pth", **given), alpha)
    own = {f"module.lm.{key}": value for key, value in lm.state_dict().items()}
    torch.save({"module": own | {"module.n_averaged": torch.tensor(3)}}, tmp_path / "b.pth")
    with pytest.warns(LeftOutWarning, match="outside the model are left out: n_averaged"):
        same(ci.load(tmp_path / "b.pth", config=lm.cfg), lm)


# ------------------------------------------------------------------ what is no part of the model


def test_counters_and_losses_are_named(tmp_path):
    counters = {"n_averaged": torch.tensor(3), "acc.tp": torch.ones(5).int()}
    named = "integer tensors that are no weights are left out: "
    loads(WEIGHTS | counters, tmp_path, named)
    with pytest.warns(LeftOutWarning, match="n_averaged, acc.tp.$"):
        ci.load(WEIGHTS | counters, **GIVEN)
    loss = {f"{word}.weight": torch.ones(3) for word in ("criterion", "loss_fn", "aux_loss")}
    loads(WEIGHTS | loss, tmp_path, "tensors of a loss are left out: ")
    with pytest.warns(LeftOutWarning, match="criterion.weight, loss_fn.weight, aux_loss.weight.$"):
        ci.load(WEIGHTS | loss, **GIVEN)


def test_strictness_stays(tmp_path):
    """A key of the model's own modules, or of an unknown one, is not left out."""
    for key in ("transformer.layers.1.0.fn.gate", "mlp_head.2.weight", "adapter.weight"):
        fails(rf"keys not used \(1\): {key}", WEIGHTS | {key: torch.ones(3)})
    key = "transformer.layers.1.0.fn.count"
    fails(f"{key} is torch.int64; expected", WEIGHTS | {key: torch.tensor(1)})
    less = {key: value for key, value in under("net.").items() if "mlp_head" not in key}
    outside = {"mlp_head.1.weight": torch.ones(3)}
    fails("Before that, tensors outside the model are left out: mlp_head", less | outside)


# ------------------------------------------------------------------ several sets of weights


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema", "ema", "ema.module."])
def test_averaged_weights_beside_plain_ones(key, tmp_path):
    prefix = key.endswith(".")
    both = WEIGHTS | under(key, AVERAGED) if prefix else {"model": WEIGHTS, key: AVERAGED}
    named = f"the averaged weights under '{key.rstrip('.')}' are left out (weights='ema' takes"
    loads(both, tmp_path, named, flat=prefix)
    loads(both, tmp_path, model=OTHER, weights="ema", flat=prefix)
    alone = under(key, AVERAGED) if prefix else {key: AVERAGED}
    named = f"the averaged weights under '{key.rstrip('.')}' are taken: there are no others."
    loads(alone, tmp_path, named, model=OTHER, flat=prefix)


def test_weights_is_checked(tmp_path):
    fails("holds no averaged weights: leave out weights='ema'", WEIGHTS, weights="ema")
    fails("weights='emma' is none of ema. Did you mean ema", WEIGHTS, weights="emma")


def test_two_sets_of_equal_standing_are_refused(tmp_path):
    fails(
        "under 'student' and 'teacher': pass one of them as a state dict",
        under("student.") | under("teacher.", AVERAGED),
    )
    fails("under 'a' and 'b': pass one of them as a state dict", {"a": WEIGHTS, "b": AVERAGED})
    both = under("student.") | under("teacher.", AVERAGED)
    loads(both, tmp_path, "are left out: teacher.", rename=r"s/^student\.//")
    loads(both, tmp_path, "left out: student.", OTHER, rename=r"s/^teacher\.//")
    same(ci.load({"a": WEIGHTS, "b": WEIGHTS}, **GIVEN))  # one dict by two names


# ------------------------------------------------------------------ weights in several files


def sharded(folder, suffix=".safetensors", weights=WEIGHTS):
    """Writes weights in two files with their index, as Hugging Face's libraries do."""
    folder.mkdir()
    keys, stem = list(weights), "model" if suffix == ".safetensors" else "pytorch_model"
    mapped = {key: f"{stem}-{1 + number % 2}-of-2{suffix}" for number, key in enumerate(keys)}
    for name in set(mapped.values()):
        part = {key: weights[key].contiguous() for key in keys if mapped[key] == name}
        if suffix == ".safetensors":
            save_file(part, folder / name)
        else:
            torch.save(part, folder / name)
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": mapped}))
    return folder, index, mapped


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_sharded_folders(suffix, tmp_path):
    extra = {"n_averaged": torch.tensor(3)}
    folder, index, mapped = sharded(tmp_path / "a", suffix, under("model.") | extra)
    for source in (folder, index):
        with pytest.warns(LeftOutWarning, match="outside the model are left out: n_averag"):
            same(ci.load(source, **GIVEN))
    name = mapped["n_averaged"]
    index.write_text(json.dumps({"weight_map": {**mapped, "n_averaged": f"../a/{name}"}}))
    fails(rf"names '../a/{name}': expected {suffix} files in the same folder", folder)
    index.write_text(json.dumps({"weight_map": {}}))
    fails("has no weight_map: it is no index", folder)
    index.write_text(json.dumps({"weight_map": mapped}))
    (folder / name).unlink()
    fails(f"{name} is not a readable checkpoint", folder)


def test_what_a_training_dict_says(tmp_path):
    gpt = published("gpt-baseline", h=4, p=8, d=32, m=128)
    said = dict(n_layer=2, n_head=4, n_embd=32, block_size=13, bias=True, vocab_size=47)
    whole = {"model": gpt, "model_args": said}
    assert ci.load(whole).cfg.n_heads == 4  # in memory as on disk
    refuses("n_heads=8 contradicts the", lambda: ci.load(whole, n_heads=8), ci.CheckpointError)
    bare = {key: value for key, value in gpt.items() if not key.endswith("bias")}
    with pytest.raises(ci.CheckpointError, match="bias=True contradicts the tensors"):
        ci.load({"model": bare, "model_args": said})
