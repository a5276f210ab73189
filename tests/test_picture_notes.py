"""Notes of what picture files held: which changes count, and what is no note."""

import hashlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make
from crate_interp.core import file_reading
from crate_interp.data import open_data
from crate_interp.data.picture_contents import Notes, noting, table_of
from padded_pictures import MODEL, draw, folder, replace


def test_a_file_that_changed_just_before_it_was_read_is_read_again(tmp_path):
    draw(tmp_path / "a.png", 0)
    for step, settled in ((file_reading.STEP, False), (0, True)):
        with pytest.MonkeyPatch.context() as patch, file_reading.noted() as found:
            patch.setattr(file_reading, "STEP", step)
            assert file_reading.read(tmp_path / "a.png") == (tmp_path / "a.png").read_bytes()
        (content,) = found.values()
        now = file_reading.stamp_of(os.stat(tmp_path / "a.png"))
        wanted = hashlib.sha256((tmp_path / "a.png").read_bytes()).digest()
        assert content.sha256 == wanted and (content.stamp == now) == settled


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
        patch.setattr(file_reading, "STEP", 0)
        noting(samples, notes).read(0, 5)
    table, files = table_of(notes), samples.files
    wanted = [f"{n}.bmp" for n, how in sorted(changes.items()) if change(root / f"{n}.bmp", how)]
    assert files.changed(table) == wanted


def test_annotations_of_coco_count_by_content(tmp_path):
    pytest.importorskip("pycocotools")
    draw(tmp_path / "a.bmp", 0)
    path, text = (
        tmp_path / "found.json",
        (
            '{"images": [{"id": 1, "file_name": "a.bmp", "width": 20, "height": 6}], "categories": '
            '[{"id": 1}, {"id": 2}], "annotations": [{"id": 1, "image_id": 1, "category_id": 1, '
            '"segmentation": [[1, 1, 9, 1, 9, 5, 1, 5]]}]}'
        ),
    )
    prints = []
    for number in (1, 2):
        path.write_text(text.replace('"category_id": 1', f'"category_id": {number}'))
        samples = open_data(f"coco:{path}", PREPROCESS)
        prints.append(samples.fingerprint)
        assert samples.files is not None and list(samples.files.images(0, 1)) == [(0, "a.bmp")]
    assert prints[0] != prints[1]


@pytest.mark.parametrize("name", ["../out.png", "/etc/hostname", "a/../../out.png"])
def test_a_forged_note_does_not_lead_out(tmp_path, name):
    samples = open_data(f"imagefolder:{folder(tmp_path / 'in', count=2)}", PREPROCESS)
    table = table_of({(0, False, name): file_reading.Content(b"", file_reading.Stamp(1, 2, 3))})
    with pytest.raises(ValueError, match="is not inside"):
        samples.files.changed(table)


def test_notes_of_odd_names_come_back(tmp_path):
    name = os.fsdecode(b"\xff \xc3\xa4.bmp")
    draw(tmp_path / "x.bmp", 0)
    os.rename(tmp_path / "x.bmp", tmp_path / name)
    samples, notes = open_data(f"imagefolder:{tmp_path}", PREPROCESS), Notes()
    noting(samples, notes).read(0, 1)
    assert list(notes) == [(0, False, name)] and samples.files.changed(table_of(notes)) == []
    draw(tmp_path / "x.bmp", 9)
    os.replace(tmp_path / "x.bmp", tmp_path / name)
    assert samples.files.changed(table_of(notes)) == [name]
