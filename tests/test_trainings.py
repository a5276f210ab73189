"""The trainings of the tiny models: their pictures and rules, what they reach, and going on."""

import argparse
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import crate_interp as ci
from crate_interp.checkpoints.hub import ASSETS

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import train_tiny_induction as induction_demo
import train_tiny_lm as demo
import train_tiny_pictures as pictures_demo

from trainings import goes_on

SMALL = dict(layers=2, width=32, steps=5, lr=1e-3, decay=0.01, push=1.0, fade=1.0, pilot=None)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 3)
    monkeypatch.setattr(demo, "N_CTX", 16)


def settings(folder, **other):
    folder.mkdir(exist_ok=True)
    return argparse.Namespace(out=folder, **(SMALL | other))


IDS = np.random.default_rng(0).integers(1, 1024, 500)


def test_training_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    train = lambda name, **more: demo.train(settings(tmp_path / name, **more), IDS)  # noqa: E731
    whole, facts, _ = goes_on(monkeypatch, train, lambda name: train(name, push=0.0), 3)
    assert facts["steps"] == 5 and (tmp_path / "parts" / "steps" / "step-0.safetensors").exists()
    train("pilot", pilot=4)  # stops after four steps, and goes on
    for name, value in train("pilot")[0].state_dict().items():
        assert torch.equal(whole.state_dict()[name], value), name


def block(width, height, colour):
    return Image.new("RGBA", (width, height), (*colour, 255))


@pytest.fixture
def cutouts():
    """Two vendors of 7 categories: blocks of one colour, 3 and 2 of each."""
    return {
        label: [
            ("google", [block(29, 17 + n, (30 * label, 90, 60 * n)) for n in range(3)]),
            ("twitter", [block(13, 31, (200, 30 * label, 60 * n)) for n in range(2)]),
        ]
        for label in range(7)
    }


@pytest.fixture
def grounds():
    noise = np.random.default_rng(0).integers(0, 255, (97, 103), dtype=np.uint8)
    return [Image.fromarray(noise), Image.fromarray(np.dstack([noise] * 3))]


def picture_settings(folder, held_out=None):
    folder.mkdir(exist_ok=True)
    return argparse.Namespace(out=folder, held_out=held_out)


def test_masks_are_exact_and_sizes_are_those_asked_for(cutouts, grounds):
    test = pictures_demo.Test(cutouts, grounds, 70)
    low, high = pictures_demo.SHARE
    assert np.bincount(test.labels).tolist() == [10] * 7
    # every drawing of a category comes in turn
    assert len(set(test.drawings)) == 7 * 5
    for picture, mask, (label, drawing) in zip(
        test.pictures, test.masks, test.drawings, strict=True
    ):
        inside = np.asarray(mask) > 127
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        height, width = len(rows), len(columns)
        assert low * 64 - 1 <= max(height, width) <= high * 64 + 1
        assert inside.sum() >= 0.9 * height * width  # the object is a block
        every = [one for _, some in cutouts[label] for one in some]
        colour = np.asarray(every[drawing])[0, 0, :3]
        middle = np.asarray(picture)[rows[height // 2], columns[width // 2]]
        assert np.abs(middle.astype(int) - colour).max() <= 2


def test_training_goes_on_from_any_step(cutouts, grounds, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures_demo, "BATCH", 4)
    phases = (pictures_demo.Phase(3, 32, (0.6, 1.0)), pictures_demo.Phase(2, 64, (0.3, 0.6)))
    monkeypatch.setattr(pictures_demo, "PHASES", phases)
    monkeypatch.setattr(pictures_demo, "STEPS", 5)
    data = pictures_demo.Training(cutouts, grounds)
    train = lambda name, *more: pictures_demo.train(picture_settings(tmp_path / name, *more), data)  # noqa: E731
    _, _, seconds = goes_on(monkeypatch, train, lambda name: train(name, "clip"), 3)
    assert seconds > 0 and (tmp_path / "parts" / "steps" / "step-0.safetensors").exists()


HELD_OUT = "held out: 9, 14, 19"


def column(card, row):
    """The numbers of a row of the card's first table, by the names of the columns."""
    lines = [line for line in card.splitlines() if line.startswith("|")]
    names, values = (
        [cell.strip() for cell in next(line for line in lines if line.startswith(start)).split("|")]
        for start in ("| periods", f"| {row}")
    )
    return {name: float(value) for name, value in zip(names[2:-1], values[2:-1], strict=True)}


@pytest.mark.parametrize("name", ["crate-tiny-induction", "gpt-tiny-induction"])
def test_the_models_reach_what_their_cards_say(name):
    card = (ASSETS / name / "README.md").read_text()
    said = column(card, HELD_OUT)
    accuracy, error = induction_demo.sampled(ci.load(name), 128, seed=77)
    card_error = float(re.search(r"periods is (\d\.\d+)", " ".join(card.split()))[1])
    assert abs(accuracy - said["seed 0 (this model)"]) <= 4 * (error + card_error) + 0.0005
    untrained, _ = induction_demo.sampled(ci.load(name, revision="step-0"), 16, seed=77)
    assert untrained < 0.06 and abs(said["untrained"] - 1 / 32) < 0.01
    assert accuracy > said["last copy"] + 0.2 and said["shortest period"] > 0.999
