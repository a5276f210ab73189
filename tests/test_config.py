"""CrateConfig: its kinds, defaults, JSON, and what it says of values it cannot use."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest

import crate_interp as ci
from conftest import refuses
from crate_interp.config import FAMILIES, TextConfig, VisionConfig
from crate_interp.config.fields import FIELDS

BASE = dict(family="crate", d_model=32, n_layers=2, n_heads=4)


def test_defaults_of_the_families():
    crate, alpha = ci.CrateConfig(**BASE), ci.CrateConfig(**BASE | {"family": "crate-alpha"})
    assert (crate.d_head, crate.d_mlp, crate.ln_eps, crate.ln_final_eps) == (8, 32, 1e-5, 1e-5)
    assert (alpha.d_head, alpha.d_mlp, alpha.ln_eps, alpha.ln_final_eps) == (8, 128, 1e-6, 1e-5)
    assert (crate.eta, crate.lambd, crate.variant, crate.pool, crate.interpolate_pos) == (
        0.1,
        0.1,
        "crate",
        "cls",
        False,
    )
    assert crate.image_size == (224, 224) and crate.grid == (14, 14) and crate.n_ctx == 197


def test_json_round_trip():
    cfg = ci.CrateConfig(
        **BASE,
        image_size=(16, 48),
        patch_size=[16, 8],
        mean=[0.1] * 3,
        std=(0.2,) * 3,
        resize=[16, 48],
    )
    again = ci.CrateConfig.from_dict(json.loads(json.dumps(cfg.to_dict())))
    assert again == cfg and hash(again) == hash(cfg) and again.patch_size == (16, 8)
    with pytest.raises(ValueError, match=r"no field 'n_head'. Did you mean n_heads"):
        ci.CrateConfig.from_dict(cfg.to_dict() | {"n_head": 3})


def smallest(family):
    """The least that a config of a family needs."""
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


def test_json_of_the_embedded_models_is_read_and_written_alike():
    paths = sorted((Path(ci.__file__).parent / "assets").glob("*/config.json"))
    assert len(paths) >= 3
    for path in paths:
        stored = json.loads(path.read_text())["config"]  # lacks the fields that are newer than it
        written = ci.CrateConfig.from_dict(stored).to_dict()
        assert json.dumps({name: written[name] for name in written if name in stored}) == (
            json.dumps(stored)
        )


def test_fields_of_another_kind():
    with pytest.raises(ValueError) as caught:
        ci.CrateConfig(**BASE, text_d_model=8)
    assert str(caught.value) == (
        "text_d_model: models of family 'crate' have no such field; leave it out."
    )
    refuses("softcap: models of family 'crate'", lambda: ci.CrateConfig(**BASE, softcap=None))
    refuses("no field 'n_head'. Did you mean n_heads", lambda: VisionConfig(**BASE, n_head=8))
    refuses("family='crate' needs CrateConfig", lambda: TextConfig(**BASE))
    assert not hasattr(smallest("crate-lm"), "image_size")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(family="crat"), "family='crat' is none of crate, crate-alpha, .* Did you mean crate"),
        (dict(variant="x"), "variant='x' is none of crate, c, n, t, fix, identity"),
        (dict(pool="max"), "pool='max' is none of cls, mean"),
        (dict(n_heads=3), "n_heads=3 must divide d_model=32: change it, or give d_head"),
        (dict(n_layers=0), "n_layers=0: give a whole number of at least 1"),
        (dict(eta=-0.1), "eta=-0.1: give a finite number of at least 0"),
        (
            dict(image_size=30),
            r"image_size=\(30, 30\), patch_size=\(16, 16\): .* must be multiples",
        ),
        (dict(patch_size="16"), "patch_size='16': give an int, or"),
        (dict(d_mlp=64), "d_mlp=64: the dictionary is square"),
        (dict(variant="t", d_head=5), "variant='t': n_heads"),
        (dict(mean=(0.1,)), "mean and std go together"),
        (dict(mean=(0.1,), std=(0.1,)), "give a number for each of 3 channels"),
        (dict(mean=0.1, std=0.1), "give a number for each of 3 channels"),
        (dict(mean=[51.0] * 3, std=[9.0] * 3), "divide both by 255"),
        (dict(labels=("a",)), "1 labels for n_classes=1000"),
        (dict(labels=[1] * 1000), "labels: 1 is no name"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_values_that_cannot_be_used(change, message):
    refuses(message, lambda: ci.CrateConfig(**BASE | change))


def test_settings_are_read_as_people_write_them():
    from crate_interp.cli.request import config_fields

    pairs = ["image_size=(28, 28)", "crop=[28, 28]", "mean=(.5,)", "eta=.1", "model_name=(a, b)"]
    assert config_fields(pairs) == {
        "image_size": (28, 28), "crop": [28, 28], "mean": (0.5,), "eta": 0.1,
        "model_name": "(a, b)",
    }  # fmt: skip
