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


ODD = {"broken.png": "No such file", "loop.png": "Too many levels", "empty.png": "is not a picture"}


def test_what_is_no_file_is_refused_by_its_name(model, tmp_path):
    refused("is a folder, pipe, socket or device, not a file", model.preprocess, tmp_path)
    refused(r"the image 'a\\x00b': .*embedded null", model.preprocess, "a\0b")
    refused("File name too long", model.preprocess, "a" * 5000)
    refused(r"the image 'a\\x1b\[2Jb': No such", model.preprocess, "a\x1b[2Jb")
    for place in ("odd", "voc/JPEGImages", "voc/SegmentationClass"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "odd" / "broken.png").symlink_to("nowhere.png")
    (tmp_path / "odd" / "loop.png").symlink_to("loop.png")
    (tmp_path / "odd" / "empty.png").touch()
    for name, match in ODD.items():
        odd = tmp_path / "odd" / name
        refused(f"cannot read the image '.*{name}': .*{match}", model.preprocess, odd)
        refused(f"cannot read the mask '.*{name}': .*{match}", model.preprocess_masks, odd)
        picture().quantize(8).save(tmp_path / "voc/SegmentationClass" / name)
        odd.rename(tmp_path / "voc/JPEGImages" / name)
        refused(f"the image '.*{name}': .*{match}", opened, model, f"voc:{tmp_path / 'voc'}")
        (tmp_path / "voc/JPEGImages" / name).rename(odd)
        (tmp_path / "voc/SegmentationClass" / name).unlink()
    refused("cannot read the image '.*broken.png'", opened, model, f"imagefolder:{tmp_path}/odd")
    refused("is not a folder", opened, model, f"imagefolder:{tmp_path}/odd/empty.png")


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


def test_classes_may_be_links(model, tmp_path):
    """Folders are renamed by links to suit the names of a model's classes."""
    for number in range(3):
        (tmp_path / f"0{number}").mkdir()
        picture().save(tmp_path / f"0{number}" / "a.png")
    named = tmp_path / "named"
    named.mkdir()
    for number, name in enumerate(("Trouser", "Bag", "Coat")):
        (named / name).symlink_to(tmp_path / f"0{number}")
    samples = opened(model, f"imagefolder:{named}")
    assert samples.n == 3 and sorted(samples.labels) == ["Bag", "Coat", "Trouser"]
    (named / "Coats").symlink_to(tmp_path / "02")
    refused("Coat' and .*Coats' are the same folder", opened, model, f"imagefolder:{named}")


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


def test_names_that_cannot_be_told_apart(model, tmp_path):
    for name in ("two blanks", "two  blanks"):
        (tmp_path / name).mkdir()
        picture().save(tmp_path / name / "a.png")
    refused(
        "two folders 'two blanks' differ in invisible characters",
        opened,
        model,
        f"imagefolder:{tmp_path}",
    )
