"""The training of the pairs: one budget for both kinds, the same pictures, and going on."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import pairs
import train_pairs as demo

from segments import rectangles_and_noise
from selection import few
from trainings import goes_on


@pytest.fixture
def data():
    return demo.Pasted(*rectangles_and_noise(12, width=140))


def test_a_batch_depends_on_step_and_seed_alone_and_an_epoch_shows_each_once(data, monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 4)
    images, _ = data.tensors(12, "")
    numbers = torch.arange(12)
    first = demo.batch_of(images, numbers, 5, 1)
    torch.manual_seed(99)
    again = demo.batch_of(images, numbers, 5, 1)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    epoch = torch.cat([demo.batch_of(images, numbers, step, 1)[1] for step in (3, 4, 5)])
    assert sorted(epoch.tolist()) == list(range(12))
    other = torch.cat([demo.batch_of(images, numbers, step, 2)[1] for step in (3, 4, 5)])
    assert other.tolist() != epoch.tolist()
    for image, number in zip(*first, strict=True):
        assert any(torch.equal(image, shown) for shown in (images[number], images[number].flip(-1)))


@pytest.mark.parametrize("kind", few(pairs.KINDS))
def test_training_goes_on_from_any_step(kind, data, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 4)
    shown = data.tensors(12, "")

    def train(name, epochs=2):
        return demo.train(kind, 3, shown, epochs, 1e-3, tmp_path / f"{name}.pt")

    whole, facts, again = goes_on(monkeypatch, demo, train, lambda name: train(name, 3), 1)
    start = pairs.make_model(kind, 3)
    assert facts["start"] == again["start"] == pairs.digest(start) != pairs.digest(whole)


def test_both_kinds_have_one_budget():
    crate, vit = (pairs.make_model(kind, 0) for kind in pairs.KINDS)
    assert abs(pairs.n_params(vit) / pairs.n_params(crate) - 1) < 0.01
    assert crate.cfg.n_layers == vit.config.num_hidden_layers == pairs.LAYERS
    assert crate.cfg.n_heads == vit.config.num_attention_heads == pairs.HEADS
    tokens = vit.vit.embeddings.position_embeddings.shape[1]
    assert crate.pos_embed.shape[-2] == tokens == 65
    # a head spans as large a share of the stream, so that chance overlap is the same
    assert crate.cfg.d_head / crate.cfg.d_model == 1 / vit.config.num_attention_heads
    assert (
        pairs.digest(crate)
        == pairs.digest(pairs.make_model("crate", 0))
        != pairs.digest(pairs.make_model("crate", 1))
    )


def test_the_stored_search_is_of_the_grid_and_both_kinds_had_one_budget():
    found = json.loads(pairs.SEARCH.read_text())
    grids = [set(found[kind]["accuracies"]) for kind in pairs.KINDS]
    assert grids == [{f"{rate:g}" for rate in demo.GRID}] * 2
    for kind in pairs.KINDS:
        means = {rate: sum(each) for rate, each in found[kind]["accuracies"].items()}
        assert f"{found[kind]['rate']:g}" == max(means, key=lambda rate: means[rate])
        assert {len(each) for each in found[kind]["accuracies"].values()} == {3}
        assert found[kind]["steps"] == demo.STEPS and found[kind]["inside"]
