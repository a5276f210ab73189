"""The networks of pairs.py and planted.py: cards, training, verdicts, a layer built to order."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from scipy import stats
from transformers import ViTForImageClassification

import crate_interp as ci

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import pair_measures
import pair_verdicts
import pairs
import planted as demo
import train_pairs
from pair_verdicts import Interval
from planted_defects import DEFECTS

from segments import rectangles_and_noise
from selection import few
from trainings import goes_on

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


def test_the_untrained_twin_is_the_start_of_the_training(monkeypatch):
    network = pair_measures.Network("crate", 0, False, "")
    assert pairs.digest(pair_measures.load(network)) == pairs.facts_of("crate", 0)["start"]
    monkeypatch.setattr(pair_measures, "facts_of", lambda *_: {"start": "another"})
    with pytest.raises(SystemExit, match="seed 0 does not give the crate here"):
        pair_measures.load(network)


@pytest.fixture
def data():
    return train_pairs.Pasted(*rectangles_and_noise(12, width=140))


@pytest.mark.parametrize("kind", few(pairs.KINDS))
def test_training_goes_on_from_any_step(kind, data, tmp_path, monkeypatch):
    monkeypatch.setattr(train_pairs, "BATCH", 4)
    shown = data.tensors(12, "")

    def train(name, epochs=2):
        return train_pairs.train(kind, 3, shown, epochs, 1e-3, tmp_path / name)

    whole, facts, again = goes_on(monkeypatch, train, lambda name: train(name, 3), 1)
    start = pairs.make_model(kind, 3)
    assert facts["start"] == again["start"] == pairs.digest(start) != pairs.digest(whole)


def test_the_stored_search_is_of_the_grid_and_both_kinds_had_one_budget():
    found = json.loads(pairs.SEARCH.read_text())
    grids = [set(found[kind]["accuracies"]) for kind in pairs.KINDS]
    assert grids == [{f"{rate:g}" for rate in train_pairs.GRID}] * 2
    for kind in pairs.KINDS:
        means = {rate: sum(each) for rate, each in found[kind]["accuracies"].items()}
        assert f"{found[kind]['rate']:g}" == max(means, key=lambda rate: means[rate])
        assert {len(each) for each in found[kind]["accuracies"].values()} == {3}
        assert found[kind]["steps"] == train_pairs.STEPS and found[kind]["inside"]


def test_intervals_are_students_and_welchs():
    a, b = np.array([1.0, 2.0, 4.0, 3.0, 2.5]), np.array([0.5, 0.1, 0.7, 0.2, 0.6])
    own, found = pair_verdicts.mean_interval(a), pair_verdicts.welch(a, b)
    half = stats.t.ppf(0.975, 4) * np.sqrt(a.var(ddof=1) / 5)
    assert (own.low, own.high) == pytest.approx((a.mean() - half, a.mean() + half))
    theirs = stats.ttest_ind(a, b, equal_var=False)
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    same = pair_verdicts.welch([1.0, 1.0], [2.0, 2.0])  # no spread is no test
    assert same.value == -1 and np.isnan([same.low, same.high, same.p]).all()


UP, DOWN, NONE = Interval(2, 1, 3, 0.01), Interval(-2, -3, -1, 0.01), Interval(0.1, -1, 1.2, 0.8)


@pytest.mark.parametrize(
    ("gains", "excess", "holds", "whose"),
    [
        ((UP, NONE), UP, True, "CRATE"),
        ((UP, DOWN), UP, True, "CRATE"),
        ((UP, NONE), UP, False, "undecided"),
        ((NONE, UP), DOWN, True, "the ViT"),
        ((NONE, UP), DOWN, False, "undecided"),
        ((UP, UP), UP, True, "more to CRATE"),
        ((UP, UP), DOWN, True, "more to the ViT"),
        ((UP, UP), NONE, False, "both"),
        ((NONE, DOWN), UP, True, "neither"),
        ((DOWN, DOWN), UP, True, "neither"),
    ],
)
def test_a_verdict_follows_from_the_gains_and_the_way_wanted(gains, excess, holds, whose):
    assert pair_verdicts.verdict(1, gains, excess, holds) == whose
    turned = [Interval(-one.value, -one.high, -one.low, one.p) for one in (*gains, excess)]
    assert pair_verdicts.verdict(-1, (turned[0], turned[1]), turned[2], holds) == whose


@pytest.fixture(scope="module")
def ideal():
    return demo.ideal(n=7)


# ---- the layer


def test_the_update_is_mssa_less_a_share_of_the_stream(ideal):
    with ideal.working():
        _, cache = ideal.model.run_with_cache(ideal.images)
    for layer, block in enumerate(ideal.model.blocks):
        z = cache["resid_pre", layer][3].double()
        centred = z - z.mean(dim=-1, keepdim=True)
        y = centred / centred.square().mean(dim=-1, keepdim=True).sqrt()
        wanted = -demo.SHRINK * centred
        for u in block.attn.U.double():
            code = y @ u
            pattern = (code @ code.T / 3**0.5).softmax(dim=-1)
            wanted += demo.WRITE * demo.SIZE * pattern @ code @ u.T
        update = (cache["resid_mid", layer] - cache["resid_pre", layer])[3].double()
        torch.testing.assert_close(update, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("eps", [*demo.ALL_EPS, demo.EPS])
def test_the_ideal_compresses_in_every_frame(ideal, layer, eps):
    for frame, found in demo.compression(ideal, eps, layer).items():
        assert found["change"] < -1e-6 and found["excess"] < -1e-6, (frame, found)
        assert found["cosine"] >= 0.49 and found["step_low"] > 0, (frame, found)


# ---- the defects


def cells(claims):
    return {(claim, frame) for claim, frames in claims.items() for frame in frames}


@pytest.mark.parametrize("name", ["", *DEFECTS])
def test_a_defect_breaks_its_claims_and_no_other(name):
    planted = demo.ideal(n_layers=1)
    wanted, unsure, lost = set(), set(), False
    if name:
        defect = DEFECTS[name]
        defect.change(planted)
        wanted, unsure = cells(defect.breaks), cells(defect.unsure)
        lost = "overlap" in defect.breaks
    found = set()
    for frame, numbers in demo.compression(planted, demo.EPS).items():
        kept = {
            "compresses": numbers["change"] < -1e-6,
            "excess": numbers["excess"] < -1e-6,
            "gradient": numbers["cosine"] >= 0.5,
            "step": numbers["step_low"] > 1e-6 and numbers["step_high"] < 2,
        }
        found |= {(claim, frame) for claim, word in kept.items() if not word}
    assert not wanted & unsure and found - unsure == wanted
    u = planted.model.blocks[0].attn.U.double()
    assert (demo.matched_overlap(u, planted.v) < 0.5) == lost
