"""Folders of strangers: pipes and devices called pictures, links, and odd names."""

import os
import re
from pathlib import Path

import pytest

import crate_interp as ci
from crate_interp.data.folder_listing import pictures_under
from strangers import file_of, opened, picture, refused, small


@pytest.fixture(scope="module")
def model():
    return small()


def test_links_are_followed_but_not_in_a_circle(model, tmp_path):
    """A link is the work of whoever unpacked the folder: the Hub's cache is made of them."""
    for place in ("inside", "outside"):
        (tmp_path / place).mkdir()
        picture().save(tmp_path / place / f"{place}.png")
    (tmp_path / "inside" / "link.png").symlink_to(tmp_path / "outside" / "outside.png")
    (tmp_path / "inside" / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "inside" / "round").symlink_to(tmp_path / "inside")
    names = [path.name for path in pictures_under(tmp_path / "inside")]
    assert names == ["outside.png", "inside.png", "link.png"]
    assert opened(model, f"imagefolder:{tmp_path / 'inside'}").n == 3
    (tmp_path / "outside" / "up").symlink_to(tmp_path)  # which holds both folders
    assert [path.name for path in pictures_under(tmp_path / "inside")] == names


@pytest.mark.parametrize(
    "name", [b"\xff\xfe", b"new\nline", b"\x1b[2J", "\u202egnp".encode(), b"two  blanks", b"'"]
)
@pytest.mark.filterwarnings("ignore:files in .* are left out")  # a.eps
def test_odd_names_are_read_and_stray_files_are_skipped(model, tmp_path, name):
    home = os.path.join(os.fsencode(tmp_path), b"data")
    for place in (b"plain", name, b"folder.png", b".hidden", b"a" * 200, b"__MACOSX"):
        os.makedirs(os.path.join(home, place))
    good = file_of(picture(), "PNG")
    for place in (b"plain/a.png", name + b"/" + name + b".png", b".hidden/b.png"):
        Path(os.fsdecode(os.path.join(home, place))).write_bytes(good)
    strays = [b".DS_Store", b"Thumbs.db", b"notes.txt", b"plain/._a.png", b"__MACOSX/._a.png"]
    strays += [b"plain/empty", b"plain/a.PNG.part", b"plain/a.eps", b"plain/" + name]
    for stray in strays:
        Path(os.fsdecode(os.path.join(home, stray))).write_bytes(b"")
    samples = opened(model, f"imagefolder:{os.fsdecode(home)}")
    assert samples.n == 2 and set(samples.labels) > {"plain"}
    assert all(label.isprintable() and label.encode() for label in samples.labels)
    assert re.fullmatch(r"imagefolder:spread:names-and-sizes:sha256:\w{64}", samples.fingerprint)
    result = ci.sweep(model, samples, probes=["sparsity"], progress=False)
    result.save(tmp_path / "result")
    again = ci.SweepResult.load(tmp_path / "result").samples()
    assert set(again["label"]) == set(samples.labels)
    bad = Path(os.fsdecode(os.path.join(home, b"plain", b"z" + name + b".jpg")))
    bad.write_bytes(b"no picture")
    read = opened(model, f"imagefolder:{os.fsdecode(home)}").read
    refused("cannot read the image '.*plain/.*.jpg': it is no", read, 0, 3)
