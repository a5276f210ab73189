"""The folders of save_pretrained: round trip, bad ones, and the steps of a training in one."""

import shutil

import torch

import crate_interp as ci
from conftest import make
from test_load import equal, fails


def test_own_folder_round_trip(model, tmp_path, images):
    model = make(
        model.cfg.family,
        labels=[f"c{i}" for i in range(11)],
        mean=[0.1] * 3,
        std=[0.2] * 3,
        resize=8,
        crop=[6, 20],
    )
    folder = model.save_pretrained(tmp_path / "mine")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    loaded = ci.load(folder)
    equal(loaded, model)
    assert torch.equal(loaded(images), model(images))
    equal(
        ci.load(str(folder), interpolate_pos=True, eta=0.2),
        make(**model.cfg.to_dict() | {"interpolate_pos": True, "eta": 0.2}),
    )
    fails(r"n_heads=7 contradicts .*config.json, which says 5", folder, n_heads=7)
    fails("has no meaning for", folder, revision="step-0")
    (folder / "README.md").write_text("my words")
    model.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "my words"


def test_bad_folders(tmp_path, model):
    fails("has no config.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    fails("was not written by crate_interp", tmp_path)
    (tmp_path / "config.json").write_text("{")
    fails("is not readable JSON", tmp_path)
    (tmp_path / "config.json").write_text('{"library": "crate_interp", "format": 2}')
    fails("has format 2; this version reads format 1", tmp_path)
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"n_layers": 3', '"n_layers": 2'))
    fails(r"keys not used \(\d+\): blocks.2", tmp_path)
    (tmp_path / "config.json").write_text(text.replace('"n_heads"', '"heads"'))
    fails("no field 'heads'. Did you mean n_heads", tmp_path)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").unlink()
    fails("is missing: the folder has a config but no weights", tmp_path)


def test_steps_along_a_training(tmp_path):
    model = make("crate")
    folder = model.save_pretrained(tmp_path / "mine")
    weights = folder / "model.safetensors"
    (folder / "steps").mkdir()
    fails("mine has no revision 'step-0': it has no steps", folder, revision="step-0")
    for step in (10, 2):
        shutil.copy(weights, folder / "steps" / f"step-{step}.safetensors")
    equal(ci.load(folder, revision="step-10"), model)
    fails("has no revision '../model': give one of step-2, step-10, or None", folder,
          revision="../model")  # fmt: skip
    weights.rename(tmp_path / "weights")
    fails("has no model.safetensors: give revision='step-2', or another of step-2, step-10", folder)
