"""Pictures are turned as their EXIF orientation says, and masks lie on them as they are then."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import PLAIN, make
from crate_interp.core import pictures
from strangers import NAMES, PIXELS, cell, exif_of, file_of, opened, refused, table

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
