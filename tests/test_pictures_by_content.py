"""Pictures replaced by others of the same size: a run notes contents, and compares them."""

import hashlib
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make
from crate_interp.core import files as core_files
from crate_interp.data import open_data
from crate_interp.data.picture_contents import Notes, noting, table_of
from crate_interp.questions.chunks import _opened
from gathered import same
from padded_pictures import COUNT, MODEL, QUICK, RUN, SIZE, draw, folder, mask, replace, voc
from selection import few

HELD = "the content is not what the run in"


@pytest.fixture(scope="module")
def model():
    return make(**MODEL)


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    """A folder, and a finished sweep of it."""
    root = tmp_path_factory.mktemp("kept")
    ci.sweep(model, f"imagefolder:{folder(root / 'in')}", out=root / "out", **QUICK)
    return root


@pytest.fixture
def ran(kept, tmp_path):
    """A copy of `kept` that a test may change."""
    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    return tmp_path


def noted(out):
    """Every table of notes in a folder, by the pass."""
    files = (out / "chunks").glob("*+*.parquet")
    return {path.name.partition("-0000")[0]: _opened(path)[1]["pictures"] for path in files}


def digest(path):
    return hashlib.sha256(path.read_bytes()).digest()


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


VERBS = {
    "sweep": (ci.sweep, dict(controls=2)),
    "audit": (ci.audit, dict(untrained=1, grid=False)),
    "store": (ci.store, dict(points="blocks.0.hook_resid_mid")),
}


@pytest.mark.parametrize("verb", few(VERBS, 2))
def test_every_verb_notes_what_it_read(model, ran, verb):
    function, more = VERBS[verb]
    root, out = ran / "in", ran / verb
    more = dict(more, out=out, limit=8, **RUN)
    function(model, f"imagefolder:{root}", **more)
    stages = noted(out)
    for stage, table in stages.items():
        names = [file.decode() for file in table["file"]]
        assert [digest(root / name) for name in names] == table["sha256"].tolist()
        sizes = [SIZE] * len(names)
        assert table["size"].tolist() == sizes and not table["mask"].any()
        assert stage == "few" or set(range(8)) <= set(table["sample"]) <= set(range(COUNT))
    replace(root / "b" / "05.png")
    with pytest.raises(ValueError, match=rf"^'b/05.png' in .*{HELD}"):
        function(model, f"imagefolder:{root}", **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["SegmentationClass", pytest.param("JPEGImages", marks=pytest.mark.slow)]
)
def test_masks_are_noted_too(model, tmp_path, part):
    root, out = voc(tmp_path / "in"), tmp_path / "out"
    more = dict(untrained=1, out=out, **RUN)
    result = ci.segment(model, f"voc:{root}", **more)
    (entry,) = result.meta["data"]
    assert len({entry["content"], entry["mask_content"]}) == 2
    table = noted(out)["segment"]
    assert sorted(table[table["mask"]]["file"])[0] == b"SegmentationClass/00.bmp"
    mask(root / part / "03.bmp", 99) if part != "JPEGImages" else replace(root / part / "03.bmp")
    with pytest.raises(ValueError, match=rf"^'{part}/03.bmp' in .*{HELD}"):
        ci.segment(model, f"voc:{root}", **more)


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
    with pytest.raises(ValueError, match="is not inside"):
        samples.files.changed(table)
