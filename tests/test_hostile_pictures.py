"""Pictures of strangers: formats that start programs, and damaged files."""

import io
import re
from contextlib import suppress

import hypothesis
import hypothesis.strategies as st
import pytest
from PIL import EpsImagePlugin, Image

from crate_interp.core import pictures
from strangers import (
    EPS,
    NAMES,
    cell,
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
