"""The shipped networks of pairs.py: what their cards state is what the weights do."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import ViTForImageClassification

import crate_interp as ci

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import pair_measures
import pairs

from selection import few

ALL = [(kind, seed) for kind in pairs.KINDS for seed in pairs.SEEDS]
ALL += [(kind, seed) for kind in pairs.FAMILY for seed in pairs.SHIPPED]
SHIPPED = [which for which in ALL if (pairs.WEIGHTS / pairs.name_of(*which)).is_dir()]
EVERY = pytest.mark.parametrize(("kind", "seed"), SHIPPED)
LIMIT = 13_300_000  # bytes, of the weights that the demos ship
# steps of embedded models, and the model of cutouts: another 26 MB
STEPS = ("crate-tiny-lm", "crate-tiny-pictures", "crate-tiny-cutouts")


def folder(kind, seed):
    return pairs.WEIGHTS / pairs.name_of(kind, seed)


def test_every_network_is_there_and_all_fit():
    assert SHIPPED == ALL
    folders = [path for path in pairs.WEIGHTS.iterdir() if path.name not in STEPS]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT


def test_the_budget_is_one():
    facts = [pairs.facts_of(*which) for which in SHIPPED]
    assert len({one["steps"] for one in facts}) == 1
    for kind in (*pairs.KINDS, *pairs.FAMILY):
        assert len({(one["params"], one["lr"]) for one in facts if one["kind"] == kind}) == 1
    sizes = {one["kind"]: one["params"] for one in facts}
    assert sizes["crate"] / sizes["vit"] == pytest.approx(1, abs=0.01)
    assert max(sizes.values()) / min(sizes.values()) < 1.012


@EVERY
def test_the_card_states_what_training_json_states(kind, seed):
    facts, card = pairs.facts_of(kind, seed), (folder(kind, seed) / "README.md").read_text()
    assert (facts["kind"], facts["seed"]) == (kind, seed)
    for name in ("test", "sample", "held_out", "untrained"):
        assert f"{facts[name]:.2%}" in card, name
    assert f"{facts['params']:,} parameters" in card and f"{facts['steps']:,} steps" in card
    assert re.search(rf"learning rate {facts['lr']:g} \(cosine", card)
    assert facts["test"] > facts["untrained"] + 0.1 and facts["test"] > 0.2  # chance is 0.1
    with safe_open(folder(kind, seed) / "model.safetensors", "pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {value.dtype for value in tensors} == {torch.float16}
    assert sum(value.numel() for value in tensors) == facts["params"]


@EVERY
def test_the_seed_gives_the_start_of_the_training(kind, seed):
    assert pairs.digest(pairs.make_model(kind, seed)) == pairs.facts_of(kind, seed)["start"]


@pytest.mark.parametrize("kind", few((*pairs.KINDS, *pairs.FAMILY), 2))
def test_one_of_each_answers_as_its_card_says(kind):
    """Each read by its own library."""
    if kind != "vit":
        model = ci.load(str(folder(kind, 0)))
    else:
        model = ViTForImageClassification.from_pretrained(folder(kind, 0)).eval()
    data = pair_measures.sample()
    assert len(data) == 256 and next(model.parameters()).dtype == torch.float32
    images = np.stack([np.asarray(image) for image in data["image"]]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        answers = pairs.logits(model, torch.from_numpy(images)).argmax(-1)
    check_share(answers, kind, 0, data)


def check_share(answers, kind, seed, data):
    """The accuracy on the shipped sample is the one that training.json states."""
    share = (answers == torch.tensor(data["label"])).float().mean().item()
    assert share == pytest.approx(pairs.facts_of(kind, seed)["sample"])
