"""Fine-tuning with Hugging Face's Trainer and with Lightning, and loading what they write."""

import json
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import crate_interp as ci
from conftest import fails, make, make_lm, refuses
from neighbours import ids, make_clip, make_mae, pictures
from selection import few

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


def same(got, model):
    assert set(got.state_dict()) == set(model.state_dict()) and got.cfg == model.cfg
    for name, value in model.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name


# --- forward ---


def test_labels_and_pixel_values_give_a_loss():
    model, images = make(), pictures(3)
    logits = model(images)
    out = model(pixel_values=images, labels=LABELS)
    assert torch.equal(out.logits, logits) and torch.equal(
        out.loss, F.cross_entropy(logits, LABELS)
    )
    assert torch.equal(model(images, labels=LABELS).loss, out.loss)
    alone = model(pixel_values=images)
    assert alone.loss is None and torch.equal(alone.logits, logits)
    part = model(images, labels=torch.tensor([3, -100, -100])).loss
    torch.testing.assert_close(part, F.cross_entropy(logits[:1], LABELS[:1]))


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_a_label_is_refused():
    model, images = make(), pictures(3)
    for labels, match in (
        (torch.tensor([0, 1, 11]), "labels are classes from 0 to 10"),
        (torch.tensor([-1, 1, 1]), "labels are classes from 0 to 10"),
        (torch.tensor([0.0, 1.0, 1.0]), "give a tensor of whole numbers"),
        (torch.tensor([0, 1]), r"labels=torch.int64 of shape \[2\]"),
    ):
        refuses(match, partial(model, images, labels=labels))
    refuses("labels need logits", partial(model, images, labels=LABELS, stop_at_layer=1))
    for given in (dict(), dict(images=images, pixel_values=images)):
        refuses("give the model one input", partial(model, **given))


# --- loading with config= ---


@pytest.mark.parametrize("build", few([make, make_lm, make_mae, make_clip], 2))
def test_a_state_dict_comes_back_by_its_config(build, tmp_path):
    model = trained(build=build)
    config = model.save_pretrained(tmp_path / "saved") / "config.json"
    path = lightning_file(model, tmp_path / "lit.ckpt", "net.backbone")
    for source in (model.state_dict(), path):
        for told in (model.cfg, model.cfg.to_dict(), config, str(config), config.parent):
            same(ci.load(source, config=told), model)
        same(ci.load(source, **model.cfg.to_dict()), model)


def test_numbers_of_numpy_are_read_as_numbers_and_nothing_else_is_run(tmp_path):
    model = trained()
    for dtype in ("f8", "f4", "i8", "b1"):
        number = {"score": np.ones(1, dtype)[0]}
        path = lightning_file(model, tmp_path / "lit.ckpt", hyper_parameters=number)
        same(ci.load(path, config=model.cfg), model)
    for strange in (np.str_("a"), SimpleNamespace(a=1)):
        path = lightning_file(model, tmp_path / "lit.ckpt", hyper_parameters={"a": strange})
        fails("its pickle .*nothing was run", path, config=model.cfg)


def test_what_lies_beside_the_model_is_left_out_with_a_warning(tmp_path):
    model = trained()
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    path = lightning_file(model, tmp_path / "a.ckpt", state_dict=state | {"loss.w": torch.ones(2)})
    with pytest.warns(UserWarning, match="tensors outside the model are left out: loss.w"):
        same(ci.load(path, config=model.cfg), model)
    twice = state | {f"teacher.{name}": value for name, value in model.state_dict().items()}
    path = lightning_file(model, tmp_path / "b.ckpt", state_dict=twice)
    several = "holds weights under 'state_dict.model' and 'state_dict.teacher': pass one"
    fails(several, path, config=model.cfg)


def test_wrong_and_missing_configs_are_told(tmp_path):
    model = trained()
    path = lightning_file(model, tmp_path / "lit.ckpt")
    fails(r"config.json next to it: put it there.*config=model.cfg\)", path)
    fails("n_heads=3 contradicts config=, which says 5", path, config=model.cfg, n_heads=3)
    fails("family='crate-alpha' contradicts", path, config=model.cfg, family="crate-alpha")
    same(ci.load(path, config=model.cfg, n_heads=5, family="crate"), model)
    fails("is no config of a hooked model", path, config="nowhere")
    fails("is no config of a hooked model", path, config={"d_model": 3})
    other = tmp_path / "config.json"
    other.write_text(json.dumps({"model_type": "vit"}))
    fails("is no config of a hooked model", path, config=other)
    less = {name: value for name, value in model.state_dict().items() if name != "ln_final.bias"}
    fails(r"keys missing \(1\): ln_final.bias", less, config=model.cfg)
    fails("keys not used", model.state_dict(), config=make(n_layers=2).cfg)
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
    same(ci.load(folder, config=models[1000].cfg), models[1000])
    same(ci.load(folder / "checkpoint-500", config=models[500].cfg), models[500])
    fails("checkpoint-1000.*no config.json next to it: put it", folder)
    models[90].save_pretrained(tmp_path / "first")
    (folder / "config.json").write_text((tmp_path / "first" / "config.json").read_text())
    same(ci.load(folder / "checkpoint-90"), models[90])
    (folder / "checkpoint-7").mkdir()  # without weights
    (tmp_path / "empty").mkdir()
    fails("has no config.json: give the weight file in it", tmp_path / "empty")


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vision", "language"])
def test_lightning(kind, tmp_path):
    with warnings.catch_warnings():
        # of Lightning about itself, its pytree and the number of workers, and that the model is
        # in eval mode, as ci.load leaves it
        warnings.simplefilter("ignore")
        import pytorch_lightning as pl

        class Tuned(pl.LightningModule):
            def __init__(self, hooked):
                super().__init__()
                self.hooked = hooked
                self.save_hyperparameters({"lr": np.float32(1e-2), "name": "tiny"})

            def training_step(self, batch, index):
                return (
                    self.hooked(batch[0], labels=batch[1]).loss
                    if kind == "vision"
                    else (self.hooked(batch[0], return_type="loss"))
                )

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), 1e-2)

        model = make() if kind == "vision" else make_lm("crate-lm")
        batch = pictures(6) if kind == "vision" else ids(6, 7)
        data = torch.utils.data.TensorDataset(batch, torch.arange(6))
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = pl.Trainer(max_steps=3, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        before = model(batch)
        trainer.fit(Tuned(model), torch.utils.data.DataLoader(data, batch_size=2))
        trainer.save_checkpoint(tmp_path / "lit.ckpt")
    model.eval()
    assert not torch.equal(model(batch), before)
    assert torch.equal(ci.load(tmp_path / "lit.ckpt", config=model.cfg)(batch), model(batch))
