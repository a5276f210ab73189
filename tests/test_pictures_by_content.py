"""Pictures replaced by others of the same size: a run notes contents, and compares them."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import crate_interp as ci
from conftest import PLAIN, make, refuses
from crate_interp.core import files as core_files
from crate_interp.data import open_data
from crate_interp.data.samples import Notes, noting, table_of
from gathered import same
from selection import few

COUNT, SIZE = 11, 4096  # pictures, and the bytes of each file
MODEL = dict(PLAIN, n_layers=2, labels=tuple("abcdefghijk"))

RUN = dict(batch_size=2, chunk_size=5, progress=False)

QUICK = dict(RUN, controls=0, probes="sparsity")


def draw(path, seed):
    """Saves a picture as a file of SIZE bytes: what follows its end is not decoded."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 20, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes().ljust(SIZE, b"\0"))


def replace(path, seed=99, times=True):
    """Replaces a picture by another of the same size, and with the same time of modification."""
    before = path.stat()
    draw(path, seed)
    if times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def folder(root, suffix=".png", count=COUNT):
    for number in range(count):
        (root / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        draw(root / "ab"[number % 2] / f"{number:02}{suffix}", number)
    return root


HELD = "the content is not what the run in"


@pytest.fixture(scope="module")
def model():
    return make(**MODEL)


@pytest.mark.parametrize(
    "suffix", few([".bmp", ".png", ".jpg", ".webp", ".tiff", ".gif", ".ppm"], 3)
)
def test_another_picture_of_the_same_size_is_noticed(model, tmp_path, suffix):
    root, out = folder(tmp_path / "in", suffix, 3), tmp_path / "out"
    source, path = f"imagefolder:{root}", root / "b" / f"01{suffix}"
    wanted = ci.sweep(model, source, out=out, **QUICK)
    before = path.read_bytes()
    for times in (True, False):
        replace(path, times=times)
        with pytest.raises(
            ValueError, match=rf"^'b/01{suffix}' in .*in': {HELD} .*out' has measured"
        ):
            ci.sweep(model, source, out=out, **QUICK)
    path.write_bytes(before)
    same(ci.sweep(model, source, out=out, **QUICK), wanted)


# --- notes ---


PREPROCESS = make(**MODEL).preprocess


CHANGES = ("touch", "rewrite", "copy", "other", "longer", "shorter", "gone", "folder", "link")


def change(path, how):
    data = path.read_bytes()
    if how == "touch":
        os.utime(path, ns=(5, 5))
    elif how == "rewrite":
        path.write_bytes(data)
    elif how == "copy":
        (path.parent / "copy").write_bytes(data)
        os.replace(path.parent / "copy", path)
    elif how == "other":
        replace(path, seed=len(path.name) + 50)
    elif how in ("longer", "shorter"):
        path.write_bytes(data + b"\0" if how == "longer" else data[:-1])
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        if how == "link":
            path.symlink_to(".other.bmp")
    return how in ("other", "longer", "shorter", "folder", "link")


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 4), st.sampled_from(CHANGES), max_size=3))
def test_only_other_content_counts(tmp_path_factory, changes):
    root = tmp_path_factory.mktemp("p")
    for number, name in enumerate(("0", "1", "2", "3", "4", ".other")):
        draw(root / f"{name}.bmp", number)
    samples, notes = open_data(f"imagefolder:{root}", PREPROCESS), Notes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_files, "STEP", 0)
        noting(samples, notes).read(0, 5)
    table, files = table_of(notes), samples.files
    wanted = [f"{n}.bmp" for n, how in sorted(changes.items()) if change(root / f"{n}.bmp", how)]
    assert files.changed(table) == wanted


@pytest.mark.parametrize("name", ["../out.png", "/etc/hostname", "a/../../out.png"])
def test_a_forged_note_does_not_lead_out(tmp_path, name):
    samples = open_data(f"imagefolder:{folder(tmp_path / 'in', count=2)}", PREPROCESS)
    table = table_of({(0, False, name): core_files.Content(b"", core_files.Stamp(1, 2, 3))})
    refuses("not inside", lambda: samples.files.changed(table))
