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


def test_the_interval_is_over_drawings():
    groups = [(0, 0)] * 50 + [(0, 1)] * 50
    low, high = demo.interval(np.array([1.0] * 50 + [0.0] * 50), groups)
    assert low == 0 and high == 1  # two drawings, one always right: hardly anything is known
    assert demo.interval(np.ones(100), groups) == (1.0, 1.0)


def test_steps_fall_into_phases():
    first, second, third = demo.PHASES
    assert demo.phase_of(first.steps - 1) is first
    assert demo.phase_of(first.steps) is second
    assert demo.phase_of(demo.STEPS - 1) is third
    with pytest.raises(ValueError, match="no such step"):
        demo.phase_of(demo.STEPS)


def test_the_learning_rate_rises_stays_and_falls_to_zero():
    rates = [demo.learning_rate(step) for step in range(demo.STEPS)]
    assert rates[demo.WARM - 1] == rates[-demo.FALL] == max(rates) == demo.LR
    assert sorted(rates[: demo.WARM]) == rates[: demo.WARM] and rates[0] > 0
    assert sorted(rates[-demo.FALL :], reverse=True) == rates[-demo.FALL :]
    assert 0 < rates[-1] < demo.LR / 1000


def test_a_drawing_is_shrunk_only_if_it_is_far_larger_than_the_picture():
    drawing = block(64, 16, (90, 120, 60))
    assert demo.shrunk(drawing, 32).size == (40, 10)
    assert demo.shrunk(drawing, 64).size == drawing.size


def test_small_pictures_lie_anywhere_on_the_grid():
    """A small picture has the tokens that its patches have on a whole picture."""
    model = demo.make_model().eval()
    small = torch.randn(7, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    where = demo.positions(small, 3)
    assert where.shape == (7, 1 + 9) and (where[:, 0] == 0).all() and len(where.unique(dim=0)) > 3
    whole, seen = torch.zeros(7, 3, 64, 64), []
    for image, picture, (_, corner, *_) in zip(whole, small, where.tolist(), strict=True):
        row, column = divmod(corner - 1, 16)
        image[:, 4 * row : 4 * row + 12, 4 * column : 4 * column + 12] = picture
    hook = ("blocks.0.hook_resid_pre", lambda z, hook: seen.append(z.clone()))
    with torch.no_grad(), model.hooks([hook]):
        demo.logits(model, small, 3)
        tokens = model(whole, stop_at_layer=0)
        assert torch.equal(demo.logits(model, whole, 0), model(whole))
    wanted = torch.stack([own[rows] for own, rows in zip(tokens, where, strict=True)])
    assert torch.allclose(seen[0], wanted, atol=1e-6)


def test_light_changes_the_colours_and_not_the_outline():
    cutout = block(29, 17, (90, 120, 60))
    cutout.putpixel((3, 3), (0, 0, 0, 0))
    shaded = np.asarray(demo.shaded(cutout, np.random.default_rng(0)))
    assert np.array_equal(shaded[..., 3], np.asarray(cutout)[..., 3])
    light = shaded[..., 0].astype(float)
    assert np.ptp(light) > 5 and not np.array_equal(shaded, np.asarray(cutout))
    # brighter along one way: the differences along an axis have one sign
    assert len(set(np.sign(light[-1, 9:] - light[-1, 8:-1])) - {0.0}) == 1


def test_muon_has_the_matrices_of_layers():
    model = demo.make_model()
    muon, adam = demo.optimizers_of(model)
    shapes = {tuple(value.shape) for group in muon.param_groups for value in group["params"]}
    counts = [sum(len(group["params"]) for group in one.param_groups) for one in (muon, adam)]
    assert shapes == {(192, 192)} and counts[0] == 18
    assert sum(counts) == len(list(model.parameters()))


def test_training_goes_on_from_any_step(cutouts, grounds, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 4)
    phases = (demo.Phase(3, 32, (0.6, 1.0)), demo.Phase(2, 64, (0.3, 0.6)))
    monkeypatch.setattr(demo, "PHASES", phases)
    monkeypatch.setattr(demo, "STEPS", 5)
    data = demo.Training(cutouts, grounds)
    whole, _ = demo.train(settings(tmp_path / "whole"), data)
    step = demo.one_step

    def stopped(model, optimizers, data, number):
        if number == 3:
            raise KeyboardInterrupt
        return step(model, optimizers, data, number)

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
