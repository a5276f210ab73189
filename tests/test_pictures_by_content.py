"""Pictures replaced by others of the same size: a run notes contents, and compares them."""

import hashlib
import os
import shutil

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import crate_interp as ci
from conftest import make
from crate_interp.core import file_reading
from crate_interp.data import picture_contents
from crate_interp.sweeps.ledgers.ledger import Ledger
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
    """Every table of notes in a folder, by the stage."""
    ledger, found = Ledger(out), {}
    for stage, count in ledger.lengths().items():
        entries = ledger.entries(stage)
        tables = [ledger.read(stage, chunk, entries)["pictures"] for chunk in range(count)]
        found[stage] = pd.concat(tables, ignore_index=True)
    return found


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
        with pytest.raises(ValueError, match=rf"^'b/01{suffix}' in .*in': {HELD} .*out' .* 0 to 2"):
            ci.sweep(model, source, out=out, **QUICK)
    path.write_bytes(before)
    same(ci.sweep(model, source, out=out, **QUICK), wanted)


@pytest.mark.slow
def test_in_the_middle_of_a_run(model, ran):
    root, out = ran / "in", ran / "half"
    source, first, later = f"imagefolder:{root}", root / "a" / "02.png", root / "b" / "07.png"
    assert ci.sweep(model, source, out=out, shard="0/2", **QUICK) is None  # chunks 0 and 2
    before = first.read_bytes()
    replace(first)
    for shard in (None, "0/2"):
        with pytest.raises(ValueError, match=rf"^'a/02.png' in .*{HELD}"):
            ci.sweep(model, source, out=out, shard=shard, **QUICK)
    assert len(list((out / "chunks").iterdir())) == 2  # refused before work starts
    assert ci.sweep(model, source, out=out, shard="2/3", **QUICK) is None  # of no chunk that is 0's
    with pytest.raises(ValueError, match=rf"^'a/02.png' in .*{HELD}"):
        ci.sweep(model, source, out=out, shard="1/2", **QUICK)  # at the end, for all shards
    first.write_bytes(before)
    replace(later)  # the chunk with this picture was not measured before
    found = ci.sweep(model, source, out=ran / "new", **QUICK)
    with pytest.raises(ValueError, match=rf"^'b/07.png' in .*{HELD}"):
        ci.sweep(model, source, out=out, **QUICK)
    same(ci.sweep(model, source, out=out, resume=False, **QUICK), found)


def test_files_that_were_touched_or_copied_are_read_once(model, ran, monkeypatch):
    source, read = f"imagefolder:{ran / 'in'}", []
    real = picture_contents.digest
    monkeypatch.setattr(
        picture_contents, "digest", lambda path: read.append(path.name) or real(path)
    )
    monkeypatch.setattr(file_reading, "STEP", 0)
    wanted = ci.sweep(model, source, out=ran / "out", resume=False, **QUICK)
    same(ci.sweep(model, source, out=ran / "out", **QUICK), wanted)
    assert read == []  # times and sizes suffice
    os.utime(ran / "in" / "a" / "04.png")
    shutil.copy2(ran / "in" / "b" / "03.png", ran / "copy.png")
    os.replace(ran / "copy.png", ran / "in" / "b" / "03.png")
    os.rename(ran / "in" / "b" / "09.png", ran / "away.png")  # gone is not replaced
    same(ci.sweep(model, source, out=ran / "out", **QUICK), wanted)
    assert sorted(read) == ["03.png", "04.png"]


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


def test_backgrounds_and_objects_of_cutouts(model, tmp_path):
    root, out = tmp_path / "in", tmp_path / "out"
    (root / "backgrounds").mkdir(parents=True)
    for number in range(3):
        draw(root / "backgrounds" / f"{number}.bmp", number)
        drawn = np.random.default_rng(number).integers(0, 256, (8, 8, 4), np.uint8)
        drawn[..., 3] = np.where(np.arange(8) < 4, 255, 0)
        Image.fromarray(drawn).save(root / f"{number}.png")
    cut = make(**MODEL, resize=(6, 20))
    source = f"cutouts:{root}"
    result = ci.sweep(cut, source, out=out, **QUICK)
    assert "content" in result.meta["data"][0]
    used = {file.decode() for file in noted(out)["sweep"]["file"]}
    behind = sorted(used - {"0.png", "1.png", "2.png"})
    assert len(used) == 3 + len(behind) and behind[0].startswith("backgrounds/")
    replace(root / behind[0])
    with pytest.raises(ValueError, match=rf"^'{behind[0]}' in .*{HELD}"):
        ci.sweep(cut, source, out=out, **QUICK)
