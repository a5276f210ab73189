"""Every form of data passes the same checks: masks, labels, values, tokens, and what is text."""

import io
import json

import datasets
import pytest
import torch
from PIL import ExifTags, Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import crate_interp as ci
from conftest import make, make_lm
from test_data_forms import (
    BYTES,
    COUNT,
    LABELS,
    NAMES,
    QUIET,
    SCALE,
    SWEEP,
    TOKEN_FORMS,
    TOKENS,
    Own,
    opened,
    pictures,
    vision,
)  # fmt: skip

WHICH, TALL = 3, (37, 11)  # the sample with a fault; height and width of a mask that does not fit


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def encoded(image):
    """Returns the bytes of a picture's file, with its EXIF orientation."""
    file = io.BytesIO()
    image.save(file, "PNG", exif=image.getexif())
    return {"bytes": file.getvalue(), "path": None}


def voc_of(columns, folder):
    for name, parts in (("JPEGImages", columns["image"]), ("SegmentationClass", columns["mask"])):
        (folder / name).mkdir()
        for number, one in enumerate(parts):
            one.save(folder / name / f"{number}.png", exif=one.getexif())
    return f"voc:{folder}"


def coco_of(columns, folder):
    """Returns annotations that give each picture the size of its mask."""
    rows = []
    for number, one in enumerate(columns["image"]):
        one.save(folder / f"{number}.png", exif=one.getexif())
        width, height = columns["mask"][number].size
        name = f"{number}.png"
        rows.append({"id": number, "file_name": name, "width": width, "height": height})
    path = folder / "rows.json"
    path.write_text(json.dumps({"images": rows, "annotations": [], "categories": []}))
    return f"coco:{path}:{folder}"


def table_of(columns, folder):
    pictures = {"image", "mask"} & set(columns)
    parts = {n: list(map(encoded, v)) if n in pictures else v for n, v in columns.items()}
    table = datasets.Dataset.from_dict(parts)
    for name in pictures:
        table = table.cast_column(name, datasets.Image())
    return table


def rows_of(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def pairs_of(columns):
    return [tuple(row.values()) for row in rows_of(columns)]


def stacked(columns):
    image = torch.stack([torch.as_tensor(one) for one in columns["image"]])
    return (image, *[columns[name] for name in columns if name != "image"])


# how a user may hold {"image": [...], "label": [...] or "mask": [...]}
HOLDERS = {
    "list of dictionaries": lambda columns, folder: rows_of(columns),
    "list of pairs": lambda columns, folder: pairs_of(columns),
    "dataset class": lambda columns, folder: Own(rows_of(columns)),
    "columns": lambda columns, folder: columns,
    "pair": lambda columns, folder: tuple(columns.values()),
    "DataLoader": lambda columns, folder: DataLoader(Own(pairs_of(columns)), batch_size=2),
    "stream": lambda columns, folder: Stream(rows_of(columns)),
    "generator": lambda columns, folder: iter(rows_of(columns)),
}
TABLES = {
    "datasets.Dataset": table_of,
    "datasets stream": lambda columns, folder: table_of(columns, folder).to_iterable_dataset(),
}
FOLDERS = {"VOC": voc_of, "COCO": coco_of}
ARRAYS = {
    "tensor and labels": lambda columns, folder: stacked(columns),
    "numpy and labels": lambda columns, folder: (stacked(columns)[0].numpy(), columns["label"]),
    "TensorDataset": lambda columns, folder: TensorDataset(
        stacked(columns)[0], torch.tensor(columns["label"])
    ),
    "tensor": lambda columns, folder: stacked(columns)[0],
    "list of arrays": lambda columns, folder: columns["image"],
}


def photos(turned=False):
    """Pictures of 11 x 37; the fourth may be stored as 37 x 11 and turned by its EXIF tag."""
    images = [Image.new("RGB", TALL, (number, 0, 0)) for number in range(COUNT)]
    if turned:
        images[WHICH] = images[WHICH].transpose(Image.Transpose.ROTATE_90)
        images[WHICH].getexif()[ExifTags.Base.Orientation] = 6
    return images


def masks(odd=()):
    sizes = [TALL[::-1] if number in odd else TALL for number in range(COUNT)]
    return [Image.new("L", size, 1) for size in sizes]


@pytest.mark.parametrize("form", [*HOLDERS, *TABLES, *FOLDERS])
def test_a_mask_must_fit_its_upright_picture(form, tmp_path):
    model = make(**SCALE, resize=(6, 20))

    def class_maps(images, drawn, name):
        folder = tmp_path / name
        folder.mkdir()
        data = {**HOLDERS, **TABLES, **FOLDERS}[form]({"image": images, "mask": drawn}, folder)
        samples = ci.data.open_data(data, model.preprocess, COUNT, model.preprocess_masks)
        return samples.masks(0, COUNT)

    assert class_maps(photos(), masks(), "right").shape == (COUNT, 6, 20)
    assert class_maps(photos(turned=True), masks(), "upright").shape == (COUNT, 6, 20)
    for name, images in (("odd", photos()), ("stored", photos(turned=True))):
        with pytest.raises(ValueError, match=rf"(sample |['/]){WHICH}.*(37, 11|11, 37|37 x 11)"):
            class_maps(images, masks(odd=[WHICH]), name)


@pytest.mark.parametrize("form", [*HOLDERS, *TABLES, *list(ARRAYS)[:3]])
@pytest.mark.parametrize("label", [-1, 11], ids=["below", "above"])
def test_a_label_must_be_a_class_of_the_model(form, label, tmp_path):
    labels = [*LABELS[:WHICH], label, *LABELS[WHICH + 1 :]]
    images = list(BYTES) if form in ARRAYS else pictures()
    data = {**HOLDERS, **TABLES, **ARRAYS}[form]({"image": images, "label": labels}, tmp_path)
    with pytest.raises(ValueError, match=f"the label {label} of sample {WHICH} is not"):
        ci.ablate_heads(vision(), data, limit=COUNT, **QUIET)


BAD_VALUES = {
    "pixels": lambda image: image.float(),
    "pixels less a mean": lambda image: (image.float() - 0.4) / 0.3,
    "NaN": lambda image: image.float() / 255 * torch.nan,
    "whole numbers": lambda image: image.long(),
    "bools": lambda image: image > 100,
    "complex": lambda image: image.to(torch.complex64),
}


@pytest.mark.parametrize("form", [*HOLDERS, *ARRAYS])
@pytest.mark.parametrize("fault", BAD_VALUES)
def test_values_that_no_preprocessing_gives_are_refused(form, fault, tmp_path):
    images = list(vision().preprocess(BYTES))
    bad = BAD_VALUES[fault](BYTES[WHICH])
    alone = form in ARRAYS and form != "list of arrays"  # one array has one dtype
    images[WHICH] = bad
    images = [one.to(bad.dtype) for one in images] if alone else images
    data = {**HOLDERS, **ARRAYS}[form]({"image": images, "label": LABELS}, tmp_path)
    which = f"sample {WHICH}|index {WHICH}|samples {WHICH}" + ("|data is torch" if alone else "")
    with pytest.raises(ValueError, match=which) as error:
        ci.sweep(vision(), data, **SWEEP)
    if "pixels" in fault:
        for wanted in ("model.preprocess(images.to(torch.uint8))", "(images / 255 - mean) / std"):
            assert wanted in str(error.value)


def test_minus_one_of_a_class_label_means_no_label():
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=NAMES))
    for labels, wanted in ((LABELS[:4] + [-1], LABELS[:4] + [None]), ([-1] * COUNT, None)):
        rows = {"image": pictures(), "label": labels}
        table = datasets.Dataset.from_dict(rows, features=features)
        assert opened(table).labels == wanted
        with pytest.raises(ValueError, match="labels are missing"):
            ci.ablate_heads(vision(), table, **QUIET)
    with pytest.raises(ValueError, match="the label of sample 4 is -1, but the data names 11"):
        ci.sweep(vision(), Own(pictures(), [*LABELS[:4], -1], classes=NAMES), **SWEEP)


@pytest.mark.parametrize("form", [*TOKEN_FORMS, "Dataset of a table"])
@pytest.mark.parametrize("token", [-1, 47])
def test_tokens_must_be_in_the_vocabulary(form, token, monkeypatch):
    wrong = TOKENS.clone()
    wrong[WHICH, 5] = token
    monkeypatch.setattr("test_data_forms.TOKENS", wrong)
    forms = TOKEN_FORMS | {
        "Dataset of a table": lambda: datasets.Dataset.from_dict({"input_ids": wrong.tolist()})
    }
    with pytest.raises(ValueError, match=f"sample {WHICH} has the token {token}"):
        ci.sweep(make_lm(), forms[form](), **SWEEP)
