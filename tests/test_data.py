"""What data may be, its labels and fingerprints, and what is said of everything else."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from conftest import PLAIN, make
from crate_interp.data import open_data, open_text, part
from crate_interp.data.folder_listing import spread

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


def test_every_kind_gives_the_same_images_and_its_labels(preprocess, folder):
    floats, names = preprocess(IMAGES), list("abababa")
    classed = dataset(number=[9] * 7, kind=[0, 1, 0, 1, 0, 1, 0])
    classed = classed.cast_column("kind", datasets.ClassLabel(names=["x", "y"]))
    for data, labels in (
        (floats, None),
        (torch.from_numpy(IMAGES), None),
        (IMAGES, None),
        (dataset(), None),
        (dataset(label=names), names),
        (classed, [0, 1, 0, 1, 0, 1, 0]),
        (f"imagefolder:{folder}", names),  # the classes of a folder are spread evenly
    ):
        samples = open_data(data, preprocess)
        assert samples.n == 7 and samples.labels == labels
        assert torch.equal(torch.cat([samples.read(0, 3), samples.read(3, 7)]), floats)
        few = open_data(data, preprocess, limit=4)
        assert few.n == 4 and few.labels == (labels and labels[:4])
        assert open_data(data, preprocess, limit=99).n == 7
    assert spread(list("aaaabbb")).tolist() == [0, 4, 1, 5, 2, 6, 3]
    assert spread(list("aab")).tolist() == [0, 2, 1]


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


@pytest.mark.usefixtures("unchecked")
def test_parts(preprocess):
    data = dataset(label=list("abcdefg"))
    whole = open_data(data, preprocess)
    assert (whole.n, whole.start, whole.of) == (7, 0, 7)
    some = part(whole, 2, 6)
    assert (some.n, some.start, some.of, some.labels) == (4, 2, 7, list("cdef"))
    assert some.fingerprint == whole.fingerprint
    assert torch.equal(some.read(3, 5), whole.read(3, 5))  # numbers in the whole data
    inner = part(some, 3, 5)
    assert (inner.n, inner.start, inner.of, inner.labels) == (2, 3, 7, list("de"))
    assert part(whole, 0, 7) == whole
    assert open_data(some, preprocess) is some and open_text(some, lambda texts: texts) is some
    few = open_data(some, preprocess, limit=3)
    assert (few.n, few.start, few.of, few.labels) == (3, 2, 7, list("cde"))
    few = open_data(whole, preprocess, limit=3)  # the first ones are a whole data set again
    assert (few.n, few.start, few.of, few.labels) == (3, 0, 3, list("abc"))
    for start, stop in ((1, 5), (2, 7), (4, 4), (5, 3), (2.0, 4), (True, 4)):
        with pytest.raises(ValueError, match="give whole numbers with 2 <= start < stop <= 6"):
            part(some, start, stop)


BAD = {  # first words of the refusal -> the data
    "the data is empty": torch.zeros(0, 3, 6, 20),
    "has no images": "imagefolder:{}",
    "is not a folder": "imagefolder:{}/missing",
    "cannot take images from 'fashion': give .*Did you mean embedded:fashion": "fashion",
    r"data is .* of shape \[3, 6, 20\], .*: give \[n, channels": torch.zeros(3, 6, 20),
    "data is torch.int64 of shape .* preprocessed floats or uint8": torch.zeros(2, 3, 6, 20).long(),
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
