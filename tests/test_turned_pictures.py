"""Pictures are turned as their EXIF orientation says, and masks lie on them as they are then."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import PLAIN, make
from crate_interp.core import pictures
from strangers import NAMES, PIXELS, cell, exif_of, file_of, opened, picture, refused, table

TURNS = {
    1: lambda x: x, 2: lambda x: x[:, ::-1], 3: lambda x: x[::-1, ::-1], 4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1), 6: lambda x: x.swapaxes(0, 1)[:, ::-1],
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1), 8: lambda x: x.swapaxes(0, 1)[::-1],
}  # fmt: skip


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF", "JPEG"])
def test_pictures_are_turned_upright(tmp_path, form, orientation):
    model = make(image_size=(23, 31), patch_size=(23, 31), resize=(23, 31), **PLAIN)
    path = tmp_path / NAMES[form]
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 90}}.get(form, {})
    stored = Image.fromarray(PIXELS)
    stored.save(path, exif=exif_of(orientation), **options)
    if form == "JPEG":  # what is stored is not what was given
        stored = Image.open(io.BytesIO(file_of(stored, "JPEG", **options)))
    upright = Image.fromarray(np.ascontiguousarray(TURNS[orientation](np.array(stored))))
    assert pictures.header(path, "x") == ("RGB", upright.size)
    shown = model.preprocess(upright)
    assert torch.equal(model.preprocess(path), shown)
    with Image.open(path) as image:
        assert torch.equal(model.preprocess(image), shown)
    assert torch.equal(opened(model, table([cell(path.read_bytes())])).read(0, 1), shown)
    assert torch.equal(opened(model, f"imagefolder:{tmp_path}").read(0, 1), shown)


def test_masks_lie_on_turned_pictures(tmp_path):
    model = make(image_size=(31, 23), patch_size=(31, 23), **PLAIN)
    for place in ("JPEGImages", "SegmentationClass"):
        (tmp_path / place).mkdir()
    upright = np.zeros((31, 23), np.uint8)
    upright[3:9, 2:20] = 7
    stored = Image.fromarray(np.ascontiguousarray(upright.swapaxes(0, 1)[::-1]))
    image, mask = tmp_path / "JPEGImages/a.png", tmp_path / "SegmentationClass/a.png"
    stored.convert("RGB").save(image, exif=exif_of(6))
    Image.fromarray(upright).save(mask)
    samples = opened(model, f"voc:{tmp_path}")
    assert torch.equal(samples.masks(0, 1)[0], torch.from_numpy(upright))
    assert torch.equal((samples.read(0, 1)[0, 0] * 255).round(), torch.from_numpy(upright))
    rows = table([cell(image.read_bytes())], mask=[cell(mask.read_bytes())])
    assert torch.equal(opened(model, rows).masks(0, 1)[0], torch.from_numpy(upright))
    stored.save(mask, exif=exif_of(6))  # a mask that is turned with its picture
    assert torch.equal(opened(model, f"voc:{tmp_path}").masks(0, 1), samples.masks(0, 1))
    stored.save(mask)
    refused("'a' is 23 x 31, but its image is 31 x 23", opened, model, f"voc:{tmp_path}")


def test_cutouts_are_turned_once(tmp_path):
    model = make(image_size=224, patch_size=32, **PLAIN)
    (tmp_path / "backgrounds").mkdir()
    rows = np.linspace(255, 0, 60).astype(np.uint8)  # from white to black, when it is upright
    stored = Image.fromarray(np.ascontiguousarray(np.tile(rows[:, None], (1, 60))[::-1, ::-1]))
    stored.save(tmp_path / "backgrounds/a.png", exif=exif_of(3))
    thing = np.zeros((40, 40, 4), np.uint8)
    thing[5:35, 5:20] = (255, 0, 0, 255)  # red at the left
    thing[5:35, 20:35] = (0, 0, 255, 255)
    turned = Image.fromarray(np.ascontiguousarray(thing[::-1, ::-1]))
    turned.save(tmp_path / "thing.png", exif=exif_of(3))
    samples = opened(model, f"cutouts:{tmp_path}")
    shown, mask = samples.read(0, 1)[0], samples.masks(0, 1)[0] == 1
    left = np.where((shown[0] - shown[2]).numpy() > 0.9)[1].mean()
    right = np.where((shown[2] - shown[0]).numpy() > 0.9)[1].mean()
    assert left < right
    grey = shown.mean(0).where(~mask, torch.nan)
    assert grey[0].nanmean() > grey[-1].nanmean() + 0.2


def raw_exif(kind, value):
    """EXIF data whose orientation has this type and these four bytes."""
    entry = bytes([0x12, 1, kind, 0, 1, 0, 0, 0]) + value
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + bytes(4)


def test_damaged_exif_is_left_aside():
    six = b"\x06\0\0\0"
    assert decoded(raw_exif(3, six)).size == (23, 31)
    odd = [(3, bytes(4)), (3, b"\x09\0\0\0"), (4, b"\xff" * 4), (5, b"\xff\0\0\0")]
    for kind, value in [*odd, (2, b"6\0\0\0"), (7, six), (99, six)]:
        assert decoded(raw_exif(kind, value)).size == (31, 23)
    whole = raw_exif(3, six)
    for stop in range(1, len(whole) - 8):
        assert decoded(whole[:stop]).size == (31, 23)
    assert decoded(b"\xff" * 99).size == (31, 23)


def decoded(exif):
    return pictures.decoded(file_of(picture(), "PNG", exif=exif), "x")
