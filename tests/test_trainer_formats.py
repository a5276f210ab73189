"""Weight files as trainers write them: the bits of the plain file, or one sentence."""

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import crate_interp as ci
from conftest import HEADS, make, make_lm, refuses, same_model
from conftest import fails as refused_with
from crate_interp.checkpoints.state_dicts import LeftOutWarning, rename_function
from neighbours import ids, make_clip, make_mae, pictures
from reference import published_layout
from selection import few

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
            same_model(ci.load(one, **GIVEN, **given), model)
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


# ------------------------------------------------------------------ what is no part of the model


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


def test_two_sets_of_equal_standing_are_refused(tmp_path):
    fails(
        "under 'student' and 'teacher': pass one of them as a state dict",
        under("student.") | under("teacher.", AVERAGED),
    )
    fails("under 'a' and 'b': pass one of them as a state dict", {"a": WEIGHTS, "b": AVERAGED})
    both = under("student.") | under("teacher.", AVERAGED)
    loads(both, tmp_path, "are left out: teacher.", rename=r"s/^student\.//")
    loads(both, tmp_path, "left out: student.", OTHER, rename=r"s/^teacher\.//")
    same_model(ci.load({"a": WEIGHTS, "b": WEIGHTS}, **GIVEN), MODEL)  # one dict by two names


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
            same_model(ci.load(source, **GIVEN), MODEL)
    name = mapped["n_averaged"]
    index.write_text(json.dumps({"weight_map": {**mapped, "n_averaged": f"../a/{name}"}}))
    fails(rf"names '../a/{name}': expected {suffix} files in the same folder", folder)
    index.write_text(json.dumps({"weight_map": {}}))
    fails("has no weight_map: it is not a weight index", folder)
    index.write_text(json.dumps({"weight_map": mapped}))
    (folder / name).unlink()
    fails(f"{name} is not a readable checkpoint", folder)


@pytest.fixture
def fork():
    model = make()
    weights = {fork_of(key): value for key, value in published_layout(model).items()}
    return model, weights | {"extra.counter": torch.zeros(3).long()}


def fork_of(key):
    return f"net.{key.replace('transformer', 'encoder')}"


def back(key):
    if key.startswith("extra."):
        return None
    return key.removeprefix("net.").replace("encoder", "transformer")


def test_a_fork_loads(fork, tmp_path):
    model, weights = fork
    images = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(0))
    torch.save(weights, tmp_path / "fork.pth")
    for source in (weights, tmp_path / "fork.pth"):
        with pytest.raises(ci.CheckpointError, match=r"nearest here: net\.encoder\.layers\.0"):
            ci.load(source, **GIVEN)
        assert torch.equal(ci.load(source, rename=back, **GIVEN)(images), model(images))


def test_it_is_strict(fork):
    _, weights = fork
    weights["extra.counter"] = torch.zeros(3)
    with pytest.raises(ci.CheckpointError, match=r"keys not used \(1\): extra.counter"):
        ci.load(weights, rename=lambda key: back(key) or key, **GIVEN)
    with pytest.raises(ci.CheckpointError, match="rename leaves out every tensor of the"):
        ci.load(weights, rename=lambda key: None, **GIVEN)
    with pytest.raises(ci.CheckpointError, match=r"'.*' and '.*' get the same name, 'x'"):
        ci.load(weights, rename=lambda key: "x", **GIVEN)
    for option in ({"rename": back}, {"weights": "ema"}):
        with pytest.raises(ci.CheckpointError, match="has no meaning for a saved model"):
            ci.load("crate-tiny-fashion", **option)


def test_a_text_as_in_sed(fork, tmp_path):
    """A key of which nothing remains is left out."""
    model, weights = fork
    for text in ("s/extra.*|encoder/transformer/", "s,encoder,transformer,g"):
        kept = {key: value for key, value in weights.items() if "extra" not in key}
        loaded = ci.load(kept, rename=text, **GIVEN)
        assert torch.equal(loaded.pos_embed, model.pos_embed)
    assert rename_function(r"s/^(\w+)\.(\w+)/\2.\1/")("a.b.c") == "b.a.c"
    assert rename_function("s/a/b/")("aa") == "ba" and rename_function("s/a/b/g")("aa") == "bb"
    assert rename_function("s/^extra.*//")("extra.counter") is None
    for text in ("", "s", "net.", "s/a/b", "s/a/b/c", "y/a/b/", "s//b/", "s/a/b/g/", "saabaca"):
        with pytest.raises(ci.CheckpointError, match="write s/PATTERN/REPLACEMENT/, such as 's/"):
            ci.load(weights, rename=text, **GIVEN)


LABELS = torch.tensor([3, 7, 0])


def trained(seed=1, build=make):
    """A model that differs from `build()` in every parameter."""
    model = build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.01 * torch.randn(value.shape, generator=generator)
    return model


def lightning_file(model, path, attribute="model", **more):
    """Writes what Lightning's Trainer.save_checkpoint writes."""
    state = {f"{attribute}.{name}": value for name, value in model.state_dict().items()}
    held = {
        "epoch": 1,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": state,
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [torch.optim.AdamW(model.parameters()).state_dict()],
        "hyper_parameters": {"lr": np.float64(1e-3), "seed": np.int64(7), "on": np.bool_(True)},
    }
    torch.save(held | more, path)
    return path


# --- forward ---


def test_labels_and_pixel_values_give_a_loss():
    model, images = make(), pictures(3)
    logits = model(images)
    out = model(pixel_values=images, labels=LABELS)
    assert torch.equal(out.logits, logits)
    assert torch.equal(out.loss, F.cross_entropy(logits, LABELS))
    assert torch.equal(model(images, labels=LABELS).loss, out.loss)
    alone = model(pixel_values=images)
    assert alone.loss is None and torch.equal(alone.logits, logits)
    part = model(images, labels=torch.tensor([3, -100, -100])).loss
    torch.testing.assert_close(part, F.cross_entropy(logits[:1], LABELS[:1]))


# --- loading with config= ---


@pytest.mark.parametrize("build", few([make, make_lm, make_mae, make_clip], 2))
def test_a_state_dict_comes_back_by_its_config(build, tmp_path):
    model = trained(build=build)
    config = model.save_pretrained(tmp_path / "saved") / "config.json"
    path = lightning_file(model, tmp_path / "lit.ckpt", "net.backbone")
    for source in (model.state_dict(), path):
        for told in (model.cfg, model.cfg.to_dict(), config, str(config), config.parent):
            same_model(ci.load(source, config=told), model)
        same_model(ci.load(source, **model.cfg.to_dict()), model)


def test_wrong_and_missing_configs_are_told(tmp_path):
    model = trained()
    path = lightning_file(model, tmp_path / "lit.ckpt")
    refused_with(r"config.json next to it: put it there.*config=model.cfg\)", path)
    refused_with("n_heads=3 contradicts config=, which says 5", path, config=model.cfg, n_heads=3)
    refused_with("is not a config of a hooked model", path, config={"d_model": 3})
    refused_with("keys not used", model.state_dict(), config=make(n_layers=2).cfg)
    with pytest.raises(ci.CheckpointError, match="tensors, too few for 1000000000"):
        ci.load(path, config=model.cfg.to_dict() | {"n_layers": 10**9})


# --- trainers ---


def trainer_folder(folder, models, configs=()):
    from safetensors.torch import save_file

    for step, model in models.items():
        place = folder / f"checkpoint-{step}"
        place.mkdir(parents=True)
        save_file(model.state_dict(), place / "model.safetensors", metadata={"format": "pt"})
        (place / "training_args.bin").write_bytes(b"\x80\x04cos\nsystem\n")  # never opened
    return folder


def test_the_last_step_of_a_trainer_is_taken(tmp_path):
    models = {step: trained(step) for step in (500, 1000, 90)}
    folder = trainer_folder(tmp_path / "run", models)
    same_model(ci.load(folder, config=models[1000].cfg), models[1000])
    same_model(ci.load(folder / "checkpoint-500", config=models[500].cfg), models[500])
    refused_with("checkpoint-1000.*no config.json next to it: put it", folder)
    models[90].save_pretrained(tmp_path / "first")
    (folder / "config.json").write_text((tmp_path / "first" / "config.json").read_text())
    same_model(ci.load(folder / "checkpoint-90"), models[90])
    (folder / "checkpoint-7").mkdir()  # without weights
    (tmp_path / "empty").mkdir()
    refused_with("has no config.json: give the weight file in it", tmp_path / "empty")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vision", "language"])
def test_a_hugging_face_trainer(kind, tmp_path):
    import transformers

    if kind == "vision":
        model, batch = make(), pictures(2)
        data = [{"pixel_values": pictures(1, seed=i)[0], "labels": i} for i in range(8)]
    else:
        model, batch = make_lm("crate-lm"), ids(2, 7)
        rows = [ids(7, seed=i) for i in range(8)]
        data = [{"input_ids": row, "labels": row, "attention_mask": row * 0 + 1} for row in rows]
    before = model(batch)
    options = dict(max_steps=3, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2)
    quiet = dict(report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False)
    args = transformers.TrainingArguments(str(tmp_path / "run"), **options, **quiet)
    trainer = transformers.Trainer(model, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    wanted = trainer.evaluate()["eval_loss"]
    model.eval()
    assert not torch.equal(model(batch), before)
    again = ci.load(tmp_path / "run", config=model.cfg)
    assert torch.equal(again(batch), model(batch))
    keys = {name: torch.stack([torch.as_tensor(row[name]) for row in data]) for name in data[0]}
    assert abs(again(**keys).loss.item() - wanted) < 1e-4
    trainer.save_model(str(tmp_path / "final"))
    assert torch.equal(ci.load(tmp_path / "final", config=model.cfg)(batch), model(batch))
