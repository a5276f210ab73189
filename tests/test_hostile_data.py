"""Pictures, folders and tables of strangers: no program starts, no named file is opened.

Pictures are turned as their EXIF orientation says, and masks lie on them as they are then.
"""

import io
import os
import re
from contextlib import suppress
from pathlib import Path

import datasets
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

import crate_interp as ci
from conftest import PLAIN, make
from crate_interp.core import pictures
from crate_interp.data.folder_listing import names_under
from strangers import (
    EPS,
    NAMES,
    PIXELS,
    cell,
    exif_of,
    file_of,
    opened,
    picture,
    refused,
    small,
    table,
)  # fmt: skip
from test_boundaries import HERE, sources


@pytest.fixture(scope="module")
def model():
    return small()


# --- pictures ---


def test_every_file_is_opened_by_the_names_of_formats():
    """All pictures go through one call, and it says which decoders may start."""
    calls = [
        (path.name, call)
        for path in [*sources(), *(HERE.parent / "demos").glob("*.py")]
        for call in re.findall(r"\bImage\.open\((.*)", path.read_text())
    ]
    assert sorted(name for name, _ in calls) == ["drawings.py", "pictures.py"]
    assert all("formats=" in call for _, call in calls)
    assert not {"EPS", "WMF", "FITS", "IM", "HDF5", "GRIB", "BUFR"} & set(pictures.FORMATS)


@pytest.fixture
def started(monkeypatch):
    """What Pillow would start Ghostscript for."""
    calls = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **more: calls.append(given))
    return calls


def test_no_picture_starts_a_program(model, tmp_path, started):
    folder = tmp_path / "photos"
    for place in ("photos/b", "voc/JPEGImages", "voc/SegmentationClass", "stamps/backgrounds"):
        (tmp_path / place).mkdir(parents=True)
    picture().save(folder / "a.png")
    picture().save(tmp_path / "voc/JPEGImages/b.png")
    for place in ("photos/b", "voc/SegmentationClass", "stamps", "stamps/backgrounds"):
        (tmp_path / place / "b.png").write_bytes(EPS)
    stamp = Image.new("RGBA", (20, 20))
    stamp.paste("red", (0, 0, 10, 20))
    stamp.save(tmp_path / "stamps" / "object.png")
    no = "cannot read the .*: it is not a picture in PNG, JPEG"
    refused(no, model.preprocess, folder / "b" / "b.png")
    refused(no, model.preprocess_masks, str(folder / "b" / "b.png"))
    refused(no, opened(model, f"imagefolder:{folder}").read, 0, 2)
    refused(no, opened(model, f"voc:{tmp_path / 'voc'}").masks, 0, 1)
    refused(no, opened, model, f"cutouts:{tmp_path / 'stamps'}")
    refused(no, opened, model, table([cell(EPS)]))
    good = file_of(picture(), "PNG")
    rows = table([cell(good)], mask=[cell(EPS)], thumbnail=[cell(EPS)])
    samples = opened(model, rows)  # other columns are not even looked at
    refused(no, samples.masks, 0, 1)
    with Image.open(folder / "b" / "b.png") as image:
        refused(r"an image is of format EPS.*convert\('RGB'\)", model.preprocess, image)
        assert not started
        with suppress(Exception):
            image.load()  # what it would have come to
        assert started


@hypothesis.given(st.sampled_from(sorted(NAMES)), st.data())
def test_damaged_files_are_a_picture_or_one_line(form, data):
    good = bytearray(file_of(picture(), form))
    for _ in range(data.draw(st.integers(1, 6))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    broken = bytes(good[: data.draw(st.integers(1, len(good)))])
    try:
        image = pictures.decoded(broken, "x")
        assert pictures.header(io.BytesIO(broken), "x")[1] == image.size
    except ValueError as error:
        assert str(error).startswith("cannot read x: ")
        assert str(error).isprintable()


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


# --- folders ---


def test_links_are_followed_but_not_in_a_circle(model, tmp_path):
    """A link is the work of whoever unpacked the folder: the Hub's cache is made of them."""
    for place in ("inside", "outside"):
        (tmp_path / place).mkdir()
        picture().save(tmp_path / place / f"{place}.png")
    (tmp_path / "inside" / "link.png").symlink_to(tmp_path / "outside" / "outside.png")
    (tmp_path / "inside" / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "inside" / "round").symlink_to(tmp_path / "inside")
    names = [Path(name).name for name in names_under(tmp_path / "inside")]
    assert names == ["outside.png", "inside.png", "link.png"]
    assert opened(model, f"imagefolder:{tmp_path / 'inside'}").n == 3
    (tmp_path / "outside" / "up").symlink_to(tmp_path)  # which holds both folders
    assert [Path(name).name for name in names_under(tmp_path / "inside")] == names


@pytest.mark.parametrize("name", [b"\xff\xfe", b"new\nline", b"\x1b[2J", "\u202egnp".encode()])
def test_odd_names_are_read_and_stray_files_are_skipped(model, tmp_path, name):
    home = os.path.join(os.fsencode(tmp_path), b"data")
    for place in (b"plain", name, b"folder.png", b".hidden", b"__MACOSX"):
        os.makedirs(os.path.join(home, place))
    good = file_of(picture(), "PNG")
    for place in (b"plain/a.png", name + b"/" + name + b".png", b".hidden/b.png"):
        Path(os.fsdecode(os.path.join(home, place))).write_bytes(good)
    for stray in (b".DS_Store", b"notes.txt", b"plain/._a.png", b"__MACOSX/._a.png", b"plain/x"):
        Path(os.fsdecode(os.path.join(home, stray))).write_bytes(b"")
    samples = opened(model, f"imagefolder:{os.fsdecode(home)}")
    assert samples.n == 2 and set(samples.labels) > {"plain"}
    assert all(label.isprintable() and label.encode() for label in samples.labels)
    result = ci.sweep(model, samples, probes=["sparsity"], progress=False)
    again = ci.SweepResult.load(result.save(tmp_path / "result")).samples()
    assert set(again["label"]) == set(samples.labels)


# --- tables ---


def test_no_file_that_a_table_names_is_opened(model, tmp_path):
    picture().save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    good = cell(file_of(picture(), "PNG"))
    there = (tmp_path / "a.png", tmp_path / "pipe.png", "/etc/passwd")
    far = ("https://127.0.0.1/a.png", "hf://datasets/x/y/a.png", "zip://a::/b.zip")
    for path in (*there, *far):
        named = {"bytes": None, "path": str(path)}
        match = "the image of sample 0 is the name of a file, '.*', which is not opened"
        refused(match, opened, model, table([named, good]))
        refused(match, opened, model, table([named], feature=datasets.Image(decode=False)))
        stream = table([named]).to_iterable_dataset()
        with pytest.raises(ValueError, match=match):
            ci.sweep(model, stream, skip_bad=True, progress=False)
        samples = opened(model, table([good, named]))  # the error names the sample
        refused("the image of sample 1 is the name of a file", samples.read, 0, 2)
        masks = opened(model, table([good], mask=[named]))
        refused("the mask of sample 0 is the name of a file", masks.masks, 0, 1)
    with_both = {"bytes": good["bytes"], "path": str(tmp_path / "pipe.png")}
    assert opened(model, table([with_both])).read(0, 1).shape == (1, 3, 6, 7)
