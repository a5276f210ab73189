"""What data may be: forms, fingerprints, folders, COCO; and what is said of everything else."""

import hashlib
import json
from pathlib import Path
from runpy import run_path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from conftest import PLAIN, make
from crate_interp.data import open_data, open_text
from crate_interp.data.folder_listing import folder_samples, names_under
from crate_interp.data.samples import ImageReading
from strangers import exif_of

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 3, 6, 20), np.uint8)


@pytest.fixture
def preprocess():
    return make(**PLAIN).preprocess


def pictures():
    return [Image.fromarray(image.transpose(1, 2, 0)) for image in IMAGES]


@pytest.fixture
def folder(tmp_path):
    for index, image in enumerate(pictures()):
        (tmp_path / "ab"[index % 2]).mkdir(exist_ok=True)
        image.save(tmp_path / "ab"[index % 2] / f"{index}.png")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    return tmp_path


def dataset(**columns):
    data = datasets.Dataset.from_dict({**columns, "picture": pictures()})
    return data.cast_column("picture", datasets.Image())


def test_fingerprints(preprocess, folder):
    def print_of(data, **more):
        return open_data(data, preprocess, **more).fingerprint

    one = print_of(IMAGES)
    assert one == print_of(IMAGES.copy()) and one.startswith("tensor:sha256:")
    assert one != print_of(IMAGES[::-1].copy())
    # the fingerprint is of the data, so that a sample counted twice is noticed
    assert one == print_of(IMAGES, limit=3)
    first = print_of(f"imagefolder:{folder}")
    (folder / "a" / "0.png").rename(folder / "a" / "9.png")
    assert print_of(f"imagefolder:{folder}") != first
    assert print_of(dataset()) == print_of(dataset())
    grey = make(channels=1, image_size=28, patch_size=4, mean=[0.0], std=[1.0])
    samples = open_data("embedded:fashion", grey.preprocess)
    assert samples.n == 256 and samples.read(0, 256).shape == (256, 1, 28, 28)
    assert samples.names[9] == "Ankle boot" and len(set(samples.labels)) == 10
    assert samples.fingerprint.startswith("embedded:fashion:sha256:")


BAD = {  # first words of the refusal -> the data
    "the data is empty": torch.zeros(0, 3, 6, 20),
    "has no images": "imagefolder:{}",
    "is not a folder": "imagefolder:{}/missing",
    "cannot take images from 'fashion': give .*Did you mean embedded:fashion": "fashion",
    r"data is .* of shape \[3, 6, 20\], .*: give \[n, channels": torch.zeros(3, 6, 20),
    "data is torch.int64 of shape .* floats or uint8": torch.zeros(2, 3, 6, 20).long(),
    "sample 3: images hold NaN or Inf": torch.ones(5, 3, 6, 20),
    "no image column; its columns are text": datasets.Dataset.from_dict({"text": ["a"]}),
}


@pytest.mark.usefixtures("unchecked")
def test_bad_data(preprocess, tmp_path):
    BAD["sample 3: images hold NaN or Inf"][3, 0, 0, 0] = torch.nan
    for match, data in BAD.items():
        with pytest.raises(ValueError, match=match):
            open_data(data.format(tmp_path) if isinstance(data, str) else data, preprocess)
    splits = datasets.DatasetDict(train=dataset(), test=dataset())
    for opening in (lambda: open_data(splits, preprocess), lambda: open_text(splits, list)):
        with pytest.raises(ValueError, match=r'give one split, data\["train"\] or data\["test"\]'):
            opening()
    Image.new("RGB", (20, 6)).save(tmp_path / "a.png")
    (tmp_path / "z.png").write_text("no image")
    samples = open_data(f"imagefolder:{tmp_path}", preprocess)
    with pytest.raises(ValueError, match="cannot read the image '.*z.png'"):
        samples.read(0, 2)  # a file is opened when it is read


def opened(model, data):
    return open_data(data, model.preprocess, preprocess_masks=model.preprocess_masks)


def refused(model, match, data):
    with pytest.raises(ValueError, match=match):
        opened(model, data)


def square(left, top, side):
    return [[left, top, left + side, top, left + side, top + side, left, top + side]]


SIZE = (13, 29)  # height, width of the images


def coco_file(folder, notes, images=((7, "seven.png"), (5, "sub/five.png")), size=SIZE, **tables):
    """An annotation file and its blank images of this (height, width)."""
    sides = {"height": size[0], "width": size[1]}
    rows = [{"id": number, "file_name": name, **sides} for number, name in images]
    categories = [{"id": 90}, {"id": 3}]
    tables = {"images": rows, "annotations": notes, "categories": categories, **tables}
    for _, name in images:
        if name and name.isascii() and name.isprintable() and ".." not in name and name[0] != "/":
            (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size[::-1]).save(folder / "images" / name)
    (folder / "notes.json").write_text(json.dumps(tables))
    return f"coco:{folder / 'notes.json'}:{folder / 'images'}"


def note(number, segmentation, image=7, category=3, **more):
    row = {"id": number, "image_id": image, "category_id": category}
    return {**row, "segmentation": segmentation, **more}


@pytest.fixture
def model():
    return make(image_size=SIZE, patch_size=SIZE, **PLAIN)


def test_coco(model, tmp_path):
    crowd = {"size": [*SIZE], "counts": [13 * 20, 13 * 5, 13 * 4]}  # columns 20 to 24, all rows
    notes = [
        note(1, square(3, 2, 4), category=3),  # the smaller one comes first, and is on top
        note(2, square(1, 1, 9), category=90),
        note(3, crowd, iscrowd=1),
        note(4, square(20, 0, 3), category=90),
        note(5, [[1, 1, 2, 2]]),  # two points: no area
        note(6, [*square(0, 0, 2), *square(8, 8, 3)], image=5),
    ]
    where, wanted = coco_file(tmp_path, notes), np.zeros(SIZE, np.uint8)
    wanted[1:10, 1:10], wanted[2:6, 3:7], wanted[:, 20:25], wanted[0:3, 20:23] = 2, 1, 255, 2
    samples = opened(model, where)
    maps = samples.masks(0, 2).numpy()
    assert samples.n == 2 and samples.labels is None and np.array_equal(maps[0], wanted)
    assert maps[1].sum() == 4 + 9 and maps[1][0, 0] == maps[1][10, 10] == 1
    assert samples.fingerprint.startswith("coco:names-and-sizes:sha256:")
    beside = coco_file(tmp_path / "images", [], images=[(7, "seven.png")])
    (tmp_path / "images" / "images" / "seven.png").rename(tmp_path / "images" / "seven.png")
    assert opened(model, beside.rpartition(":")[0]).masks(0, 1).sum() == 0


def test_compressed_runs_are_those_of_pycocotools(model, tmp_path):
    from pycocotools import mask

    drawn, rows = np.random.default_rng(3).random((2, *SIZE)) < 0.3, []
    for number, pixels in zip((7, 5), drawn, strict=True):
        counts = mask.encode(np.asfortranarray(pixels.astype(np.uint8)))["counts"].decode()
        rows.append(note(number, {"size": [*SIZE], "counts": counts}, image=number))
    assert np.array_equal(opened(model, coco_file(tmp_path, rows)).masks(0, 2).numpy(), drawn)


FULL = [*SIZE]
# first words of the refusal -> annotations, and what else is in the file
REFUSED = {
    "an annotation of image 7 in .* cannot be drawn": [
        *([note(1, [[0, 0, 3, 0, 3, 3, 1]])], [note(1, [["a", 0, 3, 0, 3, 3]])]),
        *([note(1, 3)], [note(1, {"size": [29, 13], "counts": [377]})]),
        *([note(1, {"size": FULL, "counts": [376]})], [note(1, {"size": FULL})]),
        [note(1, [[0, 0, 3, float("nan"), 3, 3]])],
    ],
    "cannot read the annotations .*: KeyError.8": [[note(1, [], image=8)]],
    "cannot read the annotations .*: KeyError.4": [[note(1, [], category=4)]],
    "or an image id twice": [{"images": [(7, "a.png"), (7, "b.png")]}],
    "cannot read the annotations .*: KeyError.'segmentation": [
        [{"id": 1, "image_id": 7, "category_id": 3}]
    ],
    "cannot read the annotations .*: TypeError": [{"categories": 3}],
    "has more than 254 categories": [{"categories": [{"id": one} for one in range(255)]}],
    "names '.*', not inside": [
        {"images": [(7, name)]} for name in ("../../etc/passwd", "/etc/passwd", "", "a\0")
    ],
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("match", REFUSED)
def test_a_file_that_cannot_be_used_is_refused_before_work(model, tmp_path, match):
    (tmp_path / "images").mkdir()
    for content in REFUSED[match]:
        notes, tables = (content, {}) if isinstance(content, list) else ([], content)
        refused(model, match, coco_file(tmp_path, notes, **tables))


def test_annotations_lie_on_the_upright_image(model, tmp_path):
    """As tools show them to who draws, and as detectron2 reads them; pycocotools opens no image."""
    where = coco_file(tmp_path, [note(1, square(3, 2, 4))], images=[(7, "seven.jpg")])
    stored = Image.new("RGB", (13, 29))  # 29 high and 13 wide: it lies on its side
    stored.save(tmp_path / "images" / "seven.jpg", exif=exif_of(6))
    samples = opened(model, where)
    assert samples.masks(0, 1)[0, 2:6, 3:7].all() and samples.masks(0, 1).sum() == 16
    assert samples.read(0, 1).shape == (1, 3, 13, 29)
    Image.new("RGB", (29, 13)).save(tmp_path / "images" / "seven.jpg", exif=exif_of(6))
    match = "seven.jpg' is \\(13, 29\\), but .* says \\(29, 13\\)"
    refused(model, match, where)


def test_coco_results_are_read_by_pycocotools(tmp_path, capsys, monkeypatch):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    script = Path(__file__).parent.parent / "demos" / "maskcut_coco.py"
    monkeypatch.syspath_prepend(script.parent)
    coco_results = run_path(str(script), run_name="demo")["coco_results"]
    pairs = enumerate([(7, 3), (7, 90), (5, 90), (5, 3)], 1)
    notes = [
        note(n, square(n * 5, 2, 7), *pair, area=49, bbox=[n * 5, 2, 7, 7], iscrowd=0)
        for n, pair in pairs
    ]
    where = coco_file(tmp_path, notes, size=(31, 41))
    masks = np.zeros((4, 31, 41), bool)
    for number in range(1, 5):
        masks[number - 1, 2:9, number * 5 : number * 5 + 7] = True
    empty = np.zeros((1, 31, 41), bool)
    results = coco_results(np.concatenate([masks[:2], empty]), 7, [0.9, 0.8, 0.99])
    results += coco_results(torch.from_numpy(masks[2:]), np.int64(5), torch.tensor([0.7, 0.6]))
    assert [row["image_id"] for row in results] == [7, 7, 5, 5]
    (tmp_path / "results.json").write_text(json.dumps(results))
    truth = COCO(where.removeprefix("coco:").rpartition(":")[0])
    evaluation = COCOeval(truth, truth.loadRes(str(tmp_path / "results.json")), "segm")
    evaluation.params.useCats, evaluation.params.catIds = 0, [1, 3, 90]
    evaluation.evaluate(), evaluation.accumulate(), evaluation.summarize()
    assert evaluation.stats[0] == 1.0 and "Average Precision" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("names", "first"), [(("train", "val"), "val"), (("Train", "TEST", "Validation"), "Validation")]
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
