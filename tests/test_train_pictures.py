"""The training of crate-tiny-pictures: its composites, its test, and going on from any step."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import drawings
import train_tiny_pictures as demo


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
    assert images.shape == (demo.BATCH, 3, 64, 64) and set(labels.tolist()) <= set(range(7))
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


def test_the_interval_is_over_drawings():
    groups = [(0, 0)] * 50 + [(0, 1)] * 50
    low, high = demo.interval(np.array([1.0] * 50 + [0.0] * 50), groups)
    assert low == 0 and high == 1  # two drawings, one always right: hardly anything is known
    assert demo.interval(np.ones(100), groups) == (1.0, 1.0)


def test_steps_fall_into_phases():
    first, second = demo.PHASES
    assert demo.phase_of(first.steps - 1) == (first, first.steps - 1)
    assert demo.phase_of(first.steps) == (second, 0) and demo.STEPS == first.steps + second.steps
    with pytest.raises(ValueError, match="no such step"):
        demo.phase_of(demo.STEPS)


def test_layers_see_cls_and_the_kept_patches(cutouts, grounds):
    model = demo.make_model().eval()
    images = demo.normalised(np.array(demo.Test(cutouts, grounds, 7).pictures[:1]))
    with torch.no_grad():
        whole = model(images)
        assert torch.equal(demo.logits(model, images, demo.PATCHES, 0), whole)
        seen = []
        hook = ("blocks.0.hook_resid_pre", lambda z, hook: seen.append(z.clone()))
        with model.hooks([hook]):
            demo.logits(model, images, 5, 3)
        tokens = model(images, stop_at_layer=0)[0]
    assert seen[0].shape == (1, 6, 192) and torch.equal(seen[0][0, 0], tokens[0])
    places = [int((tokens == one).all(dim=1).nonzero()) for one in seen[0][0]]
    assert len(set(places)) == 6


def test_training_goes_on_from_any_step(cutouts, grounds, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 4)
    sizes = (0.3, 0.6)
    phases = (demo.Phase(3, 1e-3, 1, 1.0, sizes), demo.Phase(2, 1e-3, 1, 2.0, sizes))
    monkeypatch.setattr(demo, "PHASES", phases)
    monkeypatch.setattr(demo, "STEPS", 5)
    data = demo.Training(cutouts, grounds)
    whole, _ = demo.train(settings(tmp_path / "whole"), data)
    step = demo.one_step

    def stopped(model, optimizer, data, number):
        if number == 3:
            raise KeyboardInterrupt
        return step(model, optimizer, data, number)

    monkeypatch.setattr(demo, "one_step", stopped)
    with pytest.raises(SystemExit, match="stopped after 3 steps"):
        demo.train(settings(tmp_path / "parts"), data)
    monkeypatch.setattr(demo, "one_step", step)
    parts, seconds = demo.train(settings(tmp_path / "parts"), data)
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
    assert seconds > 0 and (tmp_path / "parts" / "steps" / "step-0.safetensors").exists()
    with pytest.raises(SystemExit, match="other settings"):
        demo.train(settings(tmp_path / "parts", "clip"), data)


def test_drawings_are_read_by_category(tmp_path):
    with pytest.raises(SystemExit, match=r"(?s)emoji.json is missing.*npm pack"):
        drawings.read("google", tmp_path)
    rows = [
        {"short_name": "dog", "subcategory": "animal-mammal", "image": "1f436.png",
         "unified": "1F436"},
        {"short_name": "anchor", "subcategory": "transport-water", "image": "2693.png",
         "unified": "2693"},
        {"short_name": "heart", "subcategory": "heart", "image": "2764.png", "unified": "2764"},
    ]  # fmt: skip
    package = tmp_path / "google" / "package"
    (package / "img" / "google" / "64").mkdir(parents=True)
    (package / "emoji.json").write_text(json.dumps(rows))
    for row in rows:
        picture = Image.new("RGBA", (64, 64))
        picture.paste(block(20, 10, (9, 99, 199)), (30, 40))
        picture.save(package / "img" / "google" / "64" / row["image"])
    ((label, name, cutout),) = drawings.read("google", tmp_path)
    assert (drawings.LABELS[label], name, cutout.size) == ("animal", "dog", (20, 10))
    assert not set(drawings.SUBCATEGORIES) - set(drawings.LABELS)
    with pytest.raises(SystemExit, match="clip"):
        drawings.read("clip", tmp_path)


def test_backgrounds_of_training_and_test_share_no_column(tmp_path):
    folder = tmp_path / "skimage" / "data"
    folder.mkdir(parents=True)
    for name in drawings.BACKGROUNDS:
        columns = np.tile(np.arange(0, 200, 2, dtype=np.uint8), (100, 1))
        Image.fromarray(columns).save(folder / Path(name).with_suffix(".png").name)
        (folder / Path(name).with_suffix(".png").name).rename(folder / name)
    left, right = (drawings.backgrounds(tmp_path, test=test) for test in (False, True))
    for a, b in zip(left, right, strict=True):
        assert a.width + b.width == 100 and np.asarray(a).max() < np.asarray(b).min()
