"""Folders of pictures are listed once, in the order and with the fingerprint of old."""

import hashlib
from pathlib import Path

import pytest

import crate_interp as ci
from conftest import PLAIN, make
from crate_interp.data.folder_listing import folder_samples, names_under
from crate_interp.data.samples import ImageReading
from gathered import CHUNKS, folder

ODD = [
    "a/y.png", "a-b/x.PNG", "a b/z.jpeg", "a.png", "b\n.png", "c/d/e.tif", "c/d.png", "\udcff.png",
]  # fmt: skip
LEFT_OUT = ["a/.hidden.png", ".git/a.png", "a/notes.txt", "png", "c/.png"]


@pytest.fixture
def odd(tmp_path):
    for name in (*ODD, *LEFT_OUT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * len(name))
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "linked.png").symlink_to(tmp_path / "c" / "d.png")
    (tmp_path / "to.png").symlink_to(tmp_path)
    return tmp_path


def test_names_come_in_the_order_of_paths(odd):
    names = list(names_under(odd))
    assert set(names) == {*ODD, "gone.png", "loop.png", "linked.png"}
    assert names == sorted(names, key=lambda name: Path(name).parts)


def test_the_fingerprint_is_of_names_and_sizes(odd):
    for name in ("gone.png", "loop.png"):
        (odd / name).unlink()
    lines = [
        name.encode("utf-8", "surrogateescape").replace(b"\n", b"\0")
        + f" {(odd / name).stat().st_size}".encode()
        for name in names_under(odd)
    ]
    wanted = hashlib.sha256(b"\n".join(lines)).hexdigest()
    samples = folder_samples(str(odd), ImageReading(lambda given: given))  # pyright: ignore
    assert samples.fingerprint == f"imagefolder:names-and-sizes:sha256:{wanted}"


def test_a_folder_without_pictures_and_a_bad_first(tmp_path):
    with pytest.raises(ValueError, match="has no images: no file ends in"):
        folder_samples(str(tmp_path), ImageReading(lambda given: given))  # pyright: ignore
    for name in ("a.heic", "b.HEIC", "c/d.svg", ".e.avif", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    match = (
        r".webp, .*Formats that are not read: 2 .heic, 1 .svg. Save these files as PNG or JPEG.$"
    )
    with pytest.raises(ValueError, match=match):
        folder_samples(str(tmp_path), ImageReading(lambda given: given))  # pyright: ignore
    for name in ("a.heic", "b.HEIC", "c/d.svg"):
        (tmp_path / name).unlink()
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="a.png': it is not a picture.*: skip_bad=True"):
        ci.sweep(make(**PLAIN), f"imagefolder:{tmp_path}", **CHUNKS)


def test_files_of_other_formats_are_counted_in_a_warning(tmp_path):
    root = folder(tmp_path / "in")
    before = folder_samples(str(root), ImageReading(lambda given: given))  # pyright: ignore
    for name in ("a/late.avif", "b/late.AVIF", "b/late.cr2", "a/notes.md"):
        (root / name).write_bytes(b"x")
    match = r"files in '.*in' are left out. Formats that are not read: 2 .avif, 1 .cr2. Save these"
    with pytest.warns(UserWarning, match=match) as told:
        samples = folder_samples(str(root), ImageReading(lambda given: given))  # pyright: ignore
    assert len(told) == 1 and samples.fingerprint == before.fingerprint


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (("train", "val"), "val"),
        (("Train", "TEST", "Validation"), "Validation"),
        (("dev", "train"), "dev"),
        (("train",), "train"),
        (("valid", "train"), "valid"),
    ],
)
def test_splits_are_no_labels(tmp_path, names, first):
    for name in names:
        (tmp_path / name / "cat").mkdir(parents=True)
        (tmp_path / name / "cat" / "a.png").write_bytes(b"x")
    holds = rf"splits? \({', '.join(sorted(names))}\), not folders of labels. Give one split: "
    with pytest.raises(ValueError, match=rf'{holds}"imagefolder:{tmp_path}/{first}"\.$'):
        folder_samples(str(tmp_path), ImageReading(lambda given: given))  # pyright: ignore
    inner = folder_samples(str(tmp_path / first), ImageReading(lambda given: given))  # pyright: ignore
    assert inner.labels == ["cat"]
    (tmp_path / "bus").mkdir()
    (tmp_path / "bus" / "a.png").write_bytes(b"x")  # "train" may be a class beside "bus"
    labels = folder_samples(str(tmp_path), ImageReading(lambda given: given)).labels  # pyright: ignore
    assert set(labels or ()) == {"bus", *names}
