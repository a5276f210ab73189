"""COCO annotations of strangers: what would take memory, time or another file is refused."""

import json
import os
import subprocess
import sys
from contextlib import suppress

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from PIL import Image

from conftest import PLAIN, make
from crate_interp.core import checks
from crate_interp.core.safe_text import plain
from crate_interp.data import coco, coco_regions
from crate_interp.data.coco_regions import check_region, paint, runs_of
from strangers import exif_of, opened, refused
from test_boundaries import HERE
from test_coco import coco_file, note, square

SIZE = (13, 29)


@pytest.fixture(scope="module")
def model():
    return make(image_size=SIZE, patch_size=SIZE, **PLAIN)


def drawn(segmentation, size=SIZE):
    """The pixels of a region, as a map."""
    check_region(segmentation, size, "x")
    pixels = np.zeros(size[0] * size[1], np.uint8)
    paint(pixels, runs_of(segmentation, size), 1)
    return pixels.reshape(size[::-1]).T


def fails(match, segmentation, size=SIZE):
    refused(
        f"the segmentation of x cannot be drawn: {match}", check_region, segmentation, size, "x"
    )


# run lengths


@hypothesis.given(st.data(), st.integers(1, 9), st.integers(1, 99))
def test_run_lengths_are_those_of_pycocotools(data, height, width):
    from pycocotools import mask

    seed, share = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.floats(0, 1))
    pixels = np.random.default_rng(seed).random((height, width)) < share
    rle = mask.encode(np.asfortranarray(pixels.astype(np.uint8)))
    region = {"size": [height, width], "counts": rle["counts"].decode()}
    assert np.array_equal(drawn(region, (height, width)), pixels)
    plain = np.diff(np.flatnonzero(np.diff(pixels.T.ravel(), prepend=0, append=2)), prepend=0)
    region["counts"] = [int(run) for run in plain]
    assert np.array_equal(drawn(region, (height, width)), pixels)


@hypothesis.given(st.text(st.characters(min_codepoint=44, max_codepoint=116), max_size=30))
def test_any_string_is_drawn_or_refused(counts):
    region = {"size": list(SIZE), "counts": counts}
    with suppress(ValueError):
        runs = [int(run) for run in runs_of(region, SIZE)]
        check_region(region, SIZE, "x")
        assert min(runs) >= 0 and sum(runs) == SIZE[0] * SIZE[1]


def test_run_lengths_are_read_in_linear_time():
    """Numbers have a largest length, so none grows with the string, and the string has one too."""
    whole = SIZE[0] * SIZE[1]
    for counts in ("o" * 7 + "0", "o" * 1_000_000 + "0", "P" * 7 + "0"):
        fails("its counts hold a number of more than 7 chara", {"size": SIZE, "counts": counts})
    fails("its run lengths do not fill", {"size": SIZE, "counts": "o" * 1_000_000})
    for counts in ("1" * (coco_regions.MOST_EDGE + 1), [0] * (coco_regions.MOST_EDGE + 1)):
        fails("its counts are longer than 4,000,000", {"size": SIZE, "counts": counts})
    for counts in ([2**63], [-(2**70), whole], [10**4000]):
        fails("Python int too large", {"size": SIZE, "counts": counts})
    # sums that come out right where they wrap
    for counts in ([2**62] * 4 + [whole], [2**63 - 1, 2**63 - 1, 2 + whole], [whole + 1, 0, -1]):
        fails("its run lengths do not fill", {"size": SIZE, "counts": counts})
    fails(r"its size is \['xxx.* \.\.\., but the", {"size": ["x" * 9999, 1], "counts": ""})
    fails("its size is {}, but the image is", {"size": {}, "counts": ""})


# polygons


def test_the_outline_of_a_polygon_has_a_limit(monkeypatch):
    """Pycocotools walks along it in fifths of a pixel and keeps every step."""
    side = 7000
    edge = [value for row in range(600) for value in (row % 2 * side, row)]
    covered, length = check_region([edge], (side, side), "x")
    assert covered == (side) * 600 and abs(length - 600 * side) < 2 * side
    assert check_region([edge, edge], (side, side), "x") == (2 * covered, 2 * length)
    assert check_region(square(3, 2, 4), SIZE, "x")[0] >= 16
    assert check_region([[]], SIZE, "x") == (0, 0) and not drawn([[], [1, 1]]).any()
    far = check_region([[-29, -13, -1, -13, -1, -1]], SIZE, "x")
    assert far[0] == 0 and not drawn([[-29, -13, -1, -13, -1, -1]]).any()


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=9), st.dictionaries(st.text(max_size=6), inner)
    ),
    max_leaves=30,
)


@pytest.mark.usefixtures("unchecked")
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    st.one_of(
        json_values,
        st.lists(st.lists(st.floats(-40, 70), min_size=6, max_size=12)),
        st.fixed_dictionaries({"size": st.just(list(SIZE)), "counts": json_values}),
        st.fixed_dictionaries({"size": json_values, "counts": st.just([377])}),
    )
)
def test_any_segmentation_is_drawn_or_refused_in_one_line(segmentation):
    try:
        covered, edge = check_region(segmentation, SIZE, "x")
    except ValueError as error:
        assert str(error).startswith("the segmentation of x cannot be drawn: ")
        # one plain line; isprintable() would also refuse letters that are newer than this Python
        assert plain(error, 400) == str(error) and len(str(error)) < 400
    else:
        assert drawn(segmentation).sum() <= covered and edge >= 0


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(1, 9)), max_size=9)
)
def test_objects_are_painted_as_if_all_masks_were_there(places):
    rows = [
        note(number, square(left, top, side), category=number % 2, iscrowd=number % 3 == 0)
        for number, (top, left, side) in enumerate(places)
    ]
    wanted = np.zeros(SIZE, np.uint8)
    masks = [(drawn(row["segmentation"]) == 1, row) for row in rows]
    for mask, row in masks:
        if row["iscrowd"]:
            wanted[mask] = 255
    for mask, row in sorted(masks, key=lambda pair: -pair[0].sum()):
        if not row["iscrowd"]:
            wanted[mask] = row["category_id"] + 1
    assert np.array_equal(np.asarray(coco._class_map(SIZE, rows, {0: 1, 1: 2})), wanted)


# many of them

MANY = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np, torch
from crate_interp.data import open_data
from crate_interp.core.pictures import loaded
from test_coco import coco_file, note

side = 4000
full = [[0, 0, side, 0, side, side, 0, side]]
rows = [note(n, full if n % 2 else {"size": [side, side], "counts": [n, side**2 - n]})
        for n in range(80)]
rows += [note(301, [[0, 0, 1, 0, 1, 1, 0, 1]], category=90)]
where = coco_file(Path(sys.argv[2]), rows, images=[(7, "seven.png")], size=(side, side))
used = int(next(row for row in open("/proc/self/status") if row.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + (400 << 20),) * 2)
maps = lambda made: torch.stack([torch.from_numpy(np.array(loaded(one)[0])) for one in made])
drawn = open_data(where, lambda images: images, preprocess_masks=maps).masks(0, 1)[0]
assert drawn.shape == (side, side) and drawn[0, 0] == 2 and (drawn == 1).sum() == side**2 - 1
"""


@pytest.mark.slow
def test_many_annotations_take_one_map(tmp_path):
    """80 masks of 16 MB each, under a limit of 400 MB for everything."""
    command = [sys.executable, "-c", MANY, str(HERE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_what_an_image_may_have_drawn(model, tmp_path, monkeypatch):
    notes = [note(number, square(2, 2, 9)) for number in range(10)]
    where = coco_file(tmp_path, notes)
    covered, edge = check_region(square(2, 2, 9), SIZE, "x")
    monkeypatch.setattr(coco, "MOST_COVERED", 10 * covered)
    monkeypatch.setattr(coco, "MOST_EDGE", 10 * edge)
    assert opened(model, where).masks(0, 1).sum() == 81
    monkeypatch.setattr(coco, "MOST_COVERED", 10 * covered - 1)
    match = "the annotations of image 7 in '.*notes.json' cover 1,000 pixels or more, with edges of"
    refused(match, opened, model, where)
    monkeypatch.setattr(coco, "MOST_COVERED", 10 * covered)
    monkeypatch.setattr(coco, "MOST_EDGE", 10 * edge - 1)
    refused(match, opened, model, where)
    two = [note(number, square(2, 2, 9), image=(5, 7)[number % 2]) for number in range(10)]
    assert opened(model, coco_file(tmp_path, two)).n == 2  # the limit is one image's


# the tables


@pytest.mark.usefixtures("unchecked")
def test_sizes_and_ids_that_no_image_has(model, tmp_path):
    def row(**more):
        return [{"id": 7, "file_name": "seven.png", "height": 13, "width": 29, **more}]

    where = coco_file(tmp_path, [])
    path, tables = tmp_path / "notes.json", json.loads((tmp_path / "notes.json").read_text())

    def said(match, **changed):
        path.write_text(json.dumps(tables | changed))
        refused(match, opened, model, where)

    for size in ({"width": 10**8}, {"height": 2**31 - 1}, {"width": 8000, "height": 8000}):
        match = "image 7 in '.*notes.json' is .*, which is too large: .* at most 50,000,000"
        said(match, images=row(**size))
    for side in (0, -13, 13.0, float("nan"), True, "13", None, 2**31, 10**4000):
        said("number 0 of its images has no usable height", images=row(height=side))
    # multiples of 2^61 - 1 all have hash 0: a set of a million of them takes hours
    for wrong in (float("nan"), 1.0, True, "7", None, [7], 2**61 - 1, -(2**53)):
        said("number 0 of its images has no usable id", images=row(id=wrong))
        said("number 0 of its categories has no usable id", categories=[{"id": wrong}])
        said("no usable image_id", annotations=[note(1, [], image=wrong)])
    for deep in ("[" * 200_000, '{"images":' * 200_000, '{"images": ' + "[" * 200_000):
        path.write_text(deep)
        refused("cannot read the annotations '.*notes.json': ", opened, model, where)
    for text in ("", "[1", "\x00", '{"images": NaN', '"\\ud800"', "9" * 9999, "\x1b[2J"):
        path.write_text(text)
        refused("'.*notes.json'", opened, model, where)


def test_names_of_images_lead_to_files_inside(model, tmp_path):
    where = coco_file(tmp_path, [], images=[(7, "seven.png")])
    images, path = tmp_path / "images", tmp_path / "notes.json"
    tables = json.loads(path.read_text())
    os.mkfifo(images / "pipe.png")
    (images / "zeros.png").symlink_to("/dev/zero")
    (images / "folder.png").mkdir()
    odd, outside = "it is a pipe, socket or device", "which is not inside"
    said = {"pipe.png": odd, "zeros.png": odd, "folder.png": "it is a folder", "": outside}
    said |= {"gone.png": "No such file", "a" * 5000: "File name too long", "a\0": outside}
    said |= {
        "../seven.png": outside,
        "/etc/passwd": outside,
        "http://a/b.png": "No such|not inside",
    }
    said |= {"\ud800.png": r"'\\ud800.png', which is not inside", "a\n\x1b[2J": r"\\x1b\[2J"}
    for name, match in said.items():
        tables["images"][0]["file_name"] = name
        path.write_text(json.dumps(tables))
        refused(match, opened, model, where)
    path.unlink()
    os.mkfifo(path)
    refused("cannot read the annotations '.*notes.json': it is a pipe", opened, model, where)
    path.unlink()
    refused("cannot read the annotations '.*notes.json': No such", opened, model, where)
    path.mkdir()
    refused("cannot read the annotations '.*notes.json': it is a fold", opened, model, where)
    (tmp_path / "zeros.json").symlink_to("/dev/zero")
    refused("annotations '.*zeros.json': it is a pipe, socket or device", opened, model,
            f"coco:{tmp_path}/zeros.json:{images}")  # fmt: skip


def test_names_that_are_no_utf8_are_read(model, tmp_path):
    where = coco_file(tmp_path, [], images=[(7, "seven.png")])
    odd = os.fsdecode(b"\xff\n.png")
    (tmp_path / "images" / "seven.png").rename(tmp_path / "images" / odd)
    path = tmp_path / "notes.json"
    path.write_text(path.read_text().replace('"seven.png"', json.dumps(odd)))
    samples = opened(model, where)
    assert samples.n == 1 and samples.fingerprint.startswith("coco:names-and-sizes:sha256:")


def test_annotations_lie_on_the_upright_image(model, tmp_path):
    """As tools show them to who draws, and as detectron2 reads them; pycocotools opens no image."""
    where = coco_file(tmp_path, [note(1, square(3, 2, 4))], images=[(7, "seven.jpg")])
    stored = Image.new("RGB", SIZE)  # 29 high and 13 wide: it lies on its side
    stored.save(tmp_path / "images" / "seven.jpg", exif=exif_of(6))
    samples = opened(model, where)
    assert samples.masks(0, 1)[0, 2:6, 3:7].all() and samples.masks(0, 1).sum() == 16
    assert samples.read(0, 1).shape == (1, 3, 13, 29)
    Image.new("RGB", SIZE[::-1]).save(tmp_path / "images" / "seven.jpg", exif=exif_of(6))
    match = "gives 'seven.jpg' as 13 x 29, but the image is 29 x 13: masks would not fit it"
    refused(match, opened, model, where)


def test_a_table_is_refused_before_an_image_is_opened(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MOST_PIXELS", 13 * 29 - 1)
    where = coco_file(tmp_path, [])
    for name in ("seven.png", "sub/five.png"):
        (tmp_path / "images" / name).unlink()
    refused("image 7 in .* is 13 x 29, which is too large", opened, model, where)
