"""Tables of strangers: an image column gives the bytes that it holds, and no file is opened."""

import os

import datasets
import pytest
import torch

from crate_interp.data.tables import EMBED
from strangers import EPS, cell, file_of, opened, picture, refused, small, table


@pytest.fixture(scope="module")
def model():
    return small()


def test_no_file_that_a_table_names_is_opened(model, tmp_path):
    picture().save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    good = cell(file_of(picture(), "PNG"))
    there = (tmp_path / "a.png", tmp_path / "pipe.png", "/etc/passwd")
    far = ("https://127.0.0.1/a.png", "hf://datasets/x/y/a.png", "zip://a::/b.zip")
    for path in (*there, *far):
        named = {"bytes": None, "path": str(path)}
        match = "the image of sample 0 is the name of a file, '.*', without its bytes: no file that"
        refused(match, opened, model, table([named, good]))
        refused(match, opened, model, table([named], feature=datasets.Image(decode=False)))
        samples = opened(model, table([good, named]))  # the error names the sample
        refused("the image of sample 1 is the name of a file", samples.read, 0, 2)
        masks = opened(model, table([good], mask=[named]))
        refused("the mask of sample 0 is the name of a file", masks.masks, 0, 1)
    with_both = {"bytes": good["bytes"], "path": str(tmp_path / "pipe.png")}
    assert opened(model, table([with_both])).read(0, 1).shape == (1, 3, 6, 7)


def test_what_the_error_says_to_type_works(model, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        picture().save(tmp_path / "photos" / name / f"{name}.png")
    data = datasets.load_dataset(
        "imagefolder",
        data_dir=str(tmp_path / "photos"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    with pytest.raises(ValueError) as error:
        opened(model, data)
    where = f"imagefolder:{tmp_path / 'photos'}"
    assert str(error.value).endswith(EMBED) and 'Give "imagefolder:DIR"' in str(error.value)
    names = {"data": data}
    exec(EMBED, names)
    samples = opened(model, names["data"])
    assert samples.n == 2 and samples.labels == [0, 1] and samples.names == ("a", "b")
    assert torch.equal(samples.read(0, 2), opened(model, where).read(0, 2))


def test_columns_and_formats_of_tables(model):
    good = cell(file_of(picture(), "PNG"))
    rows = table([good, good])
    read = opened(model, rows).read(0, 2)
    for form in ("torch", "numpy", "arrow", None):
        assert torch.equal(opened(model, rows.with_format(form)).read(0, 2), read)
    transformed = rows.with_transform(lambda batch: batch)
    refused("the dataset has a transform, for which datasets", opened, model, transformed)
    grey = opened(model, table([good], feature=datasets.Image(mode="L"))).read(0, 1)
    assert torch.equal(grey, model.preprocess(picture().convert("L")))
    refused("the image of sample 0 cannot become mode X", opened, model,
            table([good], feature=datasets.Image(mode="X")))  # fmt: skip
    # segmentation sets call the column of their masks "label": pictures are no labels
    assert opened(model, table([good], label=[cell(EPS)])).labels is None
    numbers = datasets.Dataset.from_dict({"image": [good], "labels": [[1, 2]]})
    assert opened(model, numbers.cast_column("image", datasets.Image())).labels == [[1, 2]]
