"""The training of crate-tiny-pictures: its composites, its test, and going on from any step."""

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import train_tiny_pictures as demo

from trainings import goes_on


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


def settings(folder, held_out=None):
    folder.mkdir(exist_ok=True)
    return argparse.Namespace(out=folder, held_out=held_out)


def test_a_batch_depends_on_its_step_alone(cutouts, grounds):
    data = demo.Training(cutouts, grounds)
    images, labels = data.batch(3)
    again, same = demo.Training(cutouts, grounds).batch(3)
    assert torch.equal(images, again) and torch.equal(labels, same)
    assert images.shape == (demo.BATCH, 3, 32, 32) and set(labels.tolist()) <= set(range(7))
    assert not torch.equal(images, data.batch(4)[0])


def test_masks_are_exact_and_sizes_are_those_asked_for(cutouts, grounds):
    test = demo.Test(cutouts, grounds, 70)
    low, high = demo.SHARE
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
    monkeypatch.setattr(demo, "BATCH", 4)
    phases = (demo.Phase(3, 32, (0.6, 1.0)), demo.Phase(2, 64, (0.3, 0.6)))
    monkeypatch.setattr(demo, "PHASES", phases)
    monkeypatch.setattr(demo, "STEPS", 5)
    data = demo.Training(cutouts, grounds)
    train = lambda name, *more: demo.train(settings(tmp_path / name, *more), data)  # noqa: E731
    _, _, seconds = goes_on(monkeypatch, demo, train, lambda name: train(name, "clip"), 3)
    assert seconds > 0 and (tmp_path / "parts" / "steps" / "step-0.safetensors").exists()
