"""Pictures of strangers: formats that start programs, bombs, and damaged files."""

import io
import re
import subprocess
import sys
import zlib
from contextlib import suppress

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageFile, TiffImagePlugin, WebPImagePlugin

from conftest import PLAIN, make
from crate_interp.core import checks, pictures
from crate_interp.models.image_inputs import pad_to_patch
from strangers import (
    EPS,
    NAMES,
    cell,
    file_of,
    opened,
    picture,
    png_with,
    refused,
    small,
    table,
    tiff_with_tiles,
)  # fmt: skip
from test_boundaries import HERE, sources


@pytest.fixture(scope="module")
def model():
    return small()


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
    no = "cannot read the .*: it is not a picture in one of the formats PNG, JPEG"
    refused(no, model.preprocess, folder / "b" / "b.png")
    refused(no, model.preprocess_masks, str(folder / "b" / "b.png"))
    refused(no, opened(model, f"imagefolder:{folder}").read, 0, 2)
    refused(no, opened, model, f"voc:{tmp_path / 'voc'}")
    refused(no, opened, model, f"cutouts:{tmp_path / 'stamps'}")
    refused(no, opened, model, table([cell(EPS)]))
    good = file_of(picture(), "PNG")
    rows = table([cell(good)], mask=[cell(EPS)], thumbnail=[cell(EPS)])
    samples = opened(model, rows)  # other columns are not even looked at
    refused(no, samples.masks, 0, 1)
    with Image.open(folder / "b" / "b.png") as image:
        refused(r"an image was opened .* format EPS.*convert\('RGB'\)", model.preprocess, image)
        assert not started
        with suppress(Exception):
            image.load()  # what it would have come to
        assert started


@pytest.mark.parametrize("form", ["ICO", "TGA", "PCX", "DDS", "SGI", "JPEG2000", "DIB", "AVIF"])
def test_other_formats_are_refused_whatever_the_name(model, tmp_path, form):
    (tmp_path / "a.png").write_bytes(file_of(Image.new("RGB", (20, 16)), form))
    refused("'.*a.png': it is not a picture in one", model.preprocess, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        refused(f"file of format {form}, but only PNG, JPEG", model.preprocess, image)
        assert model.preprocess(image.convert("RGB")).shape == (1, 3, 6, 7)


@pytest.mark.parametrize("form", [*NAMES, "MPO"])
def test_the_first_of_several_pictures_is_read(model, tmp_path, form):
    path = tmp_path / NAMES.get(form, "a.jpg")
    several = {} if form in ("JPEG", "BMP", "PPM") else {"save_all": True}
    rest = [Image.new("RGB", (31, 23), (index, 0, 0)) for index in range(60)]
    picture().quantize(200).convert("RGB").save(path, form, append_images=rest, **several)
    with Image.open(path) as image:
        assert (getattr(image, "n_frames", 1) > 10) == bool(several)
        first = np.array(image.convert("RGB"))
    assert torch.equal(model.preprocess(path), model.preprocess(Image.fromarray(first)))


@pytest.fixture
def nothing_is_decoded(monkeypatch):
    def load(image, *given):
        raise AssertionError("pixels were decoded")

    for kind in (ImageFile.ImageFile, WebPImagePlugin.WebPImageFile, TiffImagePlugin.TiffImageFile):
        monkeypatch.setattr(kind, "load", load)


@pytest.mark.parametrize("form", NAMES)
def test_too_many_pixels_are_refused_before_they_are_decoded(
    model, tmp_path, form, monkeypatch, nothing_is_decoded
):
    monkeypatch.setattr(checks, "MOST_PIXELS", 599)
    path = tmp_path / NAMES[form]
    path.write_bytes(file_of(Image.new("RGB", (30, 20)), form))
    match = "is 20 x 30, which is too large: a picture may have at most 599 pixels"
    refused(match, model.preprocess, path)
    refused(match, opened, model, f"imagefolder:{tmp_path}")
    refused(match, opened, model, table([cell(path.read_bytes())]))
    with Image.open(path) as image:
        refused(match, model.preprocess, image)
    monkeypatch.setattr(checks, "MOST_PIXELS", 600)
    with pytest.raises((AssertionError, ValueError), match="pixels were decoded"):
        model.preprocess(path)


def test_bombs_inside_of_small_pictures(model):
    assert model.preprocess(pictures.decoded(png_with(), "x")).shape == (1, 3, 6, 7)
    text = b"a\0\0" + zlib.compress(bytes(64 << 20))
    for name in (b"zTXt", b"iCCP"):
        with suppress(ValueError):  # a profile is left out, a text is refused
            assert len(pictures.decoded(png_with((name, text)), "x").info) == 0
    assert pictures.decoded(tiff_with_tiles(16), "x").size == (16, 16)
    refused("a tile of x is 32,768 x 32,768, which", pictures.decoded, tiff_with_tiles(32768), "x")
    # refused by Pillow's own limits, which are above ours, without a warning
    for size in ((13_300, 13_300), (60_000, 60_000), (9_000, 10_000)):
        refused("cannot read x: Image size", pictures.decoded, png_with(size=size), "x")
    refused("x is 7,000 x 8,000, which is too", pictures.decoded, png_with(size=(8000, 7000)), "x")


def test_jpeg_files_of_many_scans(tmp_path):
    """Each repeats all pixels: 75 kB of them would keep a processor busy for a minute."""
    whole = file_of(picture(), "JPEG", progressive=True)
    few, last = whole.count(b"\xff\xda"), whole[whole.rindex(b"\xff\xda") : -2]
    assert few > 5

    def scans(count):
        return whole[:-2] + last * (count - few) + whole[-2:]

    most = pictures.MOST_SCANS
    assert pictures.decoded(scans(most), "x").size == (31, 23)
    refused(
        "cannot read x: a JPEG file of more than 100 scans", pictures.decoded, scans(most + 1), "x"
    )
    (tmp_path / "a.jpg").write_bytes(scans(most + 1))
    refused("a.jpg': a JPEG file of more", pictures.loaded, tmp_path / "a.jpg")
    with Image.open(tmp_path / "a.jpg") as image:
        refused("cannot read an image: a JPEG file of more", pictures.loaded, image)
    chance = b"\xff\xda" * 1000  # in what a camera appends, and in the data of a segment
    comment = b"\xff\xfe" + (len(chance) + 2).to_bytes(2, "big") + chance
    assert pictures.decoded(whole + chance, "x").size == (31, 23)
    assert pictures.decoded(whole[:2] + comment + whole[2:], "x").size == (31, 23)


BOMBS = """
import resource, sys
import numpy as np, torch
from PIL import Image
sys.path.insert(0, sys.argv[1])
from conftest import PLAIN, make
from strangers import opened
import crate_interp as ci

model = make(resize=7, crop=(6, 7), image_size=(6, 7), patch_size=(2, 7), **PLAIN)
made = lambda **sizes: make(image_size=(6, 20), patch_size=(2, 5), **sizes, **PLAIN)
thin = Image.new("L", (1, 100_000))
(path,) = sys.argv[2:]
used = int(next(row for row in open("/proc/self/status") if row.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + (300 << 20),) * 2)
attacks = {
    "a file": lambda: model.preprocess(path),
    "a folder": lambda: opened(model, "imagefolder:" + path.rpartition("/")[0]),
    "both sides": lambda: made(resize=[40_000, 40_000], crop=[6, 20]),
    "one side": lambda: made(resize=40_000, crop=[6, 20]),
    "crop": lambda: made(crop=[40_000, 40_000]),
    "image size": lambda: ci.CrateConfig(family="crate", d_model=4, n_layers=1, n_heads=1,
                                         image_size=70_000, patch_size=70_000),
    "thin": lambda: made(resize=224, crop=[6, 20]).preprocess(thin),
    "half-way": lambda: made(resize=[2, 40_000], crop=[2, 20]).preprocess(thin),
    "masks": lambda: made(resize=[2, 40_000], crop=[2, 20]).preprocess_masks(thin),
    "arrays": lambda: made(resize=[2, 40_000], crop=[2, 20]).preprocess(
        np.zeros((1, 3, 100_000, 1), np.uint8)),
    "padding": lambda: ci.models.image_inputs.pad_to_patch(torch.zeros(1, 1, 2, 2), 40_000),
}
import crate_interp.models.image_inputs
for name, attack in attacks.items():
    try:
        attack()
    except ValueError as error:
        assert "which is too large" in str(error) or "Image size" in str(error), (name, error)
    else:
        raise AssertionError(name)
print(len(attacks))
"""


@pytest.mark.slow
def test_bombs_take_no_memory(tmp_path):
    """Each is refused under a limit that the first copy of its pixels would break."""
    (tmp_path / "a.png").write_bytes(png_with(size=(13_300, 13_300)))
    command = [sys.executable, "-c", BOMBS, str(HERE), str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "11", done.stderr


@hypothesis.given(
    size=st.tuples(st.integers(1, 900), st.integers(1, 900)),
    resize=st.one_of(st.integers(1, 60), st.tuples(st.integers(1, 60), st.integers(1, 60))),
)
def test_no_step_takes_more_pixels_than_the_limit(size, resize):
    """Pillow widens the rows of a picture first, and then makes the columns as high as asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "MOST_PIXELS", 10_000)
        steps, resized = [], Image.Image.resize

        def counted(image, size, how):
            steps.append((image.size, size))
            return resized(image, size, how)

        patch.setattr(Image.Image, "resize", counted)
        with suppress(ValueError):
            make(resize=resize, interpolate_pos=True, **PLAIN).preprocess(Image.new("L", size))
    for (width, height), (wider, higher) in steps:
        assert max(width * height, wider * height, wider * higher) <= 10_000


def test_patches_have_a_limit(monkeypatch):
    monkeypatch.setattr(checks, "MOST_PATCHES", 24)
    free = make(interpolate_pos=True, **PLAIN)
    assert free.preprocess(Image.new("L", (20, 12))).shape == (1, 3, 12, 20)
    refused("an image is 14 x 20, which is 28 patches", free.preprocess, Image.new("L", (20, 14)))
    monkeypatch.setattr(checks, "MOST_PIXELS", 36)
    assert pad_to_patch(torch.zeros(1, 5, 5), 6).shape == (1, 6, 6)
    refused("a padded image is 7 x 7, which is too", pad_to_patch, torch.zeros(1, 5, 5), 7)


@hypothesis.given(st.sampled_from(sorted(NAMES)), st.data())
def test_damaged_files_are_a_picture_or_one_line(form, data):
    good = bytearray(file_of(picture(), form))
    for _ in range(data.draw(st.integers(1, 6))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    broken = bytes(good[: data.draw(st.integers(1, len(good)))])
    try:
        image = pictures.decoded(broken, "x")
        assert image.width * image.height <= checks.MOST_PIXELS
        assert pictures.header(io.BytesIO(broken), "x")[1] == image.size
    except ValueError as error:
        assert str(error).startswith("cannot read x: ") or "is too large" in str(error)
        assert str(error).isprintable()
