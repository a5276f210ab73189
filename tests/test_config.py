"""Configs: kinds, JSON, refused values, and settings that only a default gave."""

import copy
import dataclasses
import json
import pickle
import pkgutil
import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

import crate_interp
import crate_interp as ci
from command import run
from conftest import make
from crate_interp.config import FAMILIES
from crate_interp.config.base import FIELDS
from crate_interp.config.families import UNTESTABLE
from crate_interp.models.weights import model_digest
from crate_interp.results.result import Result
from crate_interp.results.result_files import near_chance
from reference import published_layout
from test_keys import layout


@cache
def result_kinds():
    """Returns the class of each kind of result, by the name of the kind."""
    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(crate_interp.__path__, "crate_interp.")
        if not module.name.endswith("__main__")
    ]
    values = [value for module in modules for value in vars(module).values()]
    classes = [one for one in values if isinstance(one, type) and issubclass(one, Result)]
    return {one.KIND: one for one in classes if one.KIND}


README = (Path(__file__).parent.parent / "README.md").read_text()
NORMS, PICTURES = ("ln_eps", "ln_final_eps"), ("mean", "std", "resize", "crop")
NAMES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat"]  # as in the README
STEP, FLAGS = ("eta", "lambd"), re.DOTALL | re.MULTILINE
# family -> all settings of its models that no tensor can contradict
ALL = {
    "crate": (*STEP, *NORMS, "variant", "pool", *PICTURES),
    "crate-alpha": (*STEP, *NORMS, "variant", "pool", *PICTURES),
    "crate-mae": (*STEP, *NORMS, *PICTURES),
    "crate-lm": (*STEP, *NORMS),
    "crate-lm-vanilla": (*STEP, *NORMS),
    "gpt-baseline": NORMS,
    "nanochat-crate": (*NORMS, "window"),
    "clipa": (*STEP, *NORMS, *PICTURES),
}


@pytest.mark.parametrize("family", ALL)
def test_what_only_a_default_gave_is_listed(family, capsys):
    tensors, given = layout(family)
    model = ci.load(tensors, family=family.removesuffix("-vanilla"), **given)
    wanted = tuple(name for name in ALL[family] if name not in given)
    assert model.cfg.assumed == wanted and set(wanted) <= set(UNTESTABLE)
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if "assumed" in line]
    assert all(re.search(rf"\b{name}\b", line) for name in wanted)
    marked = [name for name in wanted if getattr(model.cfg, name) is not None]
    assert model.cfg._repr_html_().count("<mark>") == len(marked)
    for name in wanted:
        value = getattr(model.cfg, name)
        assert value is None or f"{name} {value}" in line
    if family == "clipa":
        assert model.visual.cfg.assumed == wanted and set(model.text.cfg.assumed) == set(NORMS)


def test_each_source_of_a_setting_counts(tmp_path, monkeypatch, capsys):
    model = make("crate", eta=0.5, lambd=0.02)
    tensors, given = layout("crate")
    every = {name: getattr(model.cfg, name) for name in ("eta", "lambd", *NORMS, "variant", "pool")}
    every |= dict(mean=[0.5] * 3, std=[0.5] * 3, resize=6, crop=6)
    capsys.readouterr()
    assert ci.load(tensors, **given, **every).cfg.assumed == ()
    assert "assumed" not in capsys.readouterr().err
    # a file in the table of models has the settings of its authors
    path = tmp_path / "listed.pth"
    torch.save(tensors, path)
    monkeypatch.setattr("crate_interp.checkpoints.hub.of_digest", lambda path: {"family": "crate"})
    assert ci.load(path, **given).cfg.assumed == ()
    # the names of a hooked model, with a part of its config
    whole = model.cfg.to_dict()
    short = {name: whole[name] for name in ("d_model", "n_layers", "n_heads", "d_head")}
    short |= {"n_classes": 11, "image_size": [6, 20], "patch_size": [2, 5], "family": "crate"}
    part = ci.load(model.state_dict(), config=short | {"eta": 0.5})
    assert part.cfg.assumed == tuple(name for name in ALL["crate"] if name != "eta")
    assert ci.load(model.state_dict(), config=model.cfg).cfg.assumed == ()
    for name in ("crate-tiny-fashion", "crate-tiny-lm"):
        assert ci.load(name).cfg.assumed == ()


def test_a_folder_keeps_the_list_and_an_argument_shortens_it(tmp_path):
    tensors, given = layout("crate")
    torch.save(tensors, tmp_path / "a.pth")
    loaded = ci.convert(tmp_path / "a.pth", tmp_path / "mine", family="crate", eta=0.1, **given)
    wanted = [name for name in ALL["crate"] if name != "eta"]
    stored = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert stored["config"]["assumed"] == wanted
    again = ci.load(tmp_path / "mine", lambd=0.1)
    assert list(again.cfg.assumed) == wanted[1:]
    sure = ci.load(tensors, family="crate", eta=0.1, lambd=0.1, pool="cls", **given)
    assert sure.cfg.assumed != again.cfg.assumed
    sure.cfg.set_model_name(loaded.cfg.model_name)
    assert model_digest(again) == model_digest(sure)  # the same network
    with pytest.raises(ValueError, match="assumed='n_heads'"):
        ci.CrateConfig.from_dict(loaded.cfg.to_dict() | {"assumed": ["n_heads"]})


@pytest.mark.parametrize("name", result_kinds())
def test_headlines_of_every_kind_end_with_it(name, monkeypatch):
    config = ci.CrateConfig(family="crate", d_model=15, n_layers=2, n_heads=3).to_dict()
    config["assumed"] = ["eta", "lambd", "pool"]
    kind = result_kinds()[name]
    result = object.__new__(kind)
    object.__setattr__(result, "meta", {"config": config})
    monkeypatch.setattr(kind, "finding", lambda self: "Found.")
    monkeypatch.setattr(kind, "warning", lambda self: "", raising=False)
    assert result.headline() == "Found. Assumed: eta 0.1, lambd 0.1."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A CRATE of step .5 and lambda .02 as its trainer saved it, its accuracy, and its pictures."""
    place = tmp_path_factory.mktemp("trained")
    data = ci.data.embedded("fashion").filter(lambda row: row["label"] < 5)
    labels = torch.tensor(data["label"])
    for number, (image, label) in enumerate(zip(data["image"], data["label"], strict=True)):
        folder = place / "photos" / NAMES[label]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.png")
    cfg = ci.CrateConfig(
        family="crate", d_model=32, n_layers=2, n_heads=4, image_size=28, patch_size=7, channels=1,
        n_classes=5, eta=0.5, lambd=0.02, mean=[0.286], std=[0.353],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ci.HookedCrate(cfg)
    images = model.preprocess(data["image"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(50):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
    state = {"state_dict": published_layout(model.eval()), "epoch": 50}
    torch.save(state, place / "model_best.pth.tar")
    return place, accuracy


def readme_commands():
    """The lines of the README for a checkpoint of one's own, as lists of words."""
    (block,) = re.findall(r"^(crate-interp convert.*?)^```$", README, FLAGS)
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_lines_of_the_readme_give_the_trained_accuracy(checkpoint, monkeypatch, count):
    place, accuracy = checkpoint
    monkeypatch.chdir(place)
    assert accuracy > 0.95 and len(readme_commands()) == 3
    for words in readme_commands()[(place / "mine").exists() : count]:
        done = run(*words)
        assert done.returncode == 0, done.stderr
    out = place / "runs" / "ablate-mine"
    result = ci.HeadAblation.load(next(path.parent for path in out.parent.rglob("heads.parquet")))
    assert result.table()["base"].iloc[0] == pytest.approx(accuracy, abs=0.01)
    assert "Assumed" not in result.headline() and not near_chance(result.meta, accuracy)
    # without eta and lambd, the same lines give another network, and say so
    bare = ci.load("model_best.pth.tar", n_heads=4, channels=1, mean=0.286, std=0.353, labels=NAMES)
    poor = ci.ablate_heads(bare, "imagefolder:photos", metric="accuracy", progress=False)
    assert poor.table()["base"].iloc[0] < 0.4
    assert poor.headline().endswith("Assumed: eta 0.1, lambd 0.1.")
    assert "eta, lambd" in poor.caution() and "20.0\u00a0% by chance" in poor.caution()


BASE = dict(family="crate", d_model=32, n_layers=2, n_heads=4)


def test_json_round_trip():
    sizes = dict(image_size=(16, 48), patch_size=[16, 8], resize=[16, 48])
    cfg = ci.CrateConfig(**BASE, **sizes, mean=[0.1] * 3, std=(0.2,) * 3)
    again = ci.CrateConfig.from_dict(json.loads(json.dumps(cfg.to_dict())))
    assert again == cfg and hash(again) == hash(cfg) and again.patch_size == (16, 8)
    with pytest.raises(ValueError, match=r"no field 'n_head'. Did you mean n_heads"):
        ci.CrateConfig.from_dict(cfg.to_dict() | {"n_head": 3})


def smallest(family):
    text = dict(n_ctx=5, d_vocab=7)
    clip = dict(d_embed=6, text_d_model=12, text_n_layers=2, text_n_heads=3)
    more = {"text": text, "clip": text | clip}.get(FAMILIES[family]["kind"], {})
    return ci.CrateConfig(**BASE | {"family": family} | more)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_class_of_its_kind(family):
    cfg = smallest(family)
    key = f"bridged {cfg.kind}" if FAMILIES[family].get("bridged") else cfg.kind
    assert type(cfg) is ci.CrateConfig.classes[key] and isinstance(cfg, ci.CrateConfig)
    assert cfg.kind == FAMILIES[family]["kind"]
    copies = [copy.copy(cfg), copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))]
    copies += [dataclasses.replace(cfg), ci.CrateConfig.from_dict(cfg.to_dict())]
    for each in copies:
        assert each == cfg and hash(each) == hash(cfg) and repr(each) == repr(cfg)
        assert type(each) is type(cfg)
    assert dataclasses.replace(cfg, n_layers=3).n_layers == 3
    assert list(cfg.to_dict()) == [name for name in FIELDS if name in cfg.to_dict()]
    rows = {f"<code>{name}</code>" for name, value in cfg.to_dict().items() if value is not None}
    assert rows <= set(re.findall("<code>.*?</code>", cfg._repr_html_()))


def test_json_of_the_embedded_models_is_read_and_written_alike():
    paths = sorted((Path(ci.__file__).parent / "assets").glob("*/config.json"))
    assert len(paths) >= 3
    for path in paths:
        stored = json.loads(path.read_text())["config"]  # lacks the fields that are newer than it
        written = ci.CrateConfig.from_dict(stored).to_dict()
        assert json.dumps({name: written[name] for name in written if name in stored}) == (
            json.dumps(stored)
        )
