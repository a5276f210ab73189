"""Every form of images or tokens gives what the plain tensor gives, and passes the same checks."""

import io
import json
from functools import cache

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import ExifTags, Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import crate_interp as ci
from conftest import make, make_lm, refuses

COUNT, SIZE = 5, (6, 20)
LABELS = [3, 0, 7, 3, 10]
NAMES = [f"class {number}" for number in range(11)]
BYTES = torch.randint(
    0, 256, (COUNT, 3, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
)
TOKENS = torch.randint(0, 47, (COUNT, 11), generator=torch.Generator().manual_seed(4))


def pictures():
    return [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in BYTES]


class Own(Dataset):
    def __init__(self, values, labels=None, form="pair", classes=None):
        self.values, self.labels, self.form = values, labels, form
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.values)

    def __getitem__(self, number):
        value = self.values[number]
        if self.labels is None:
            return value
        label = self.labels[number]
        return (value, label) if self.form == "pair" else {"image": value, "label": label}


class Arriving(IterableDataset):
    def __iter__(self):
        yield from zip(BYTES, LABELS, strict=True)


class ByIndex(Own):
    class_to_idx = {name: number for number, name in enumerate(NAMES)}


def together(batch):
    return [image for image, _ in batch], torch.tensor([label for _, label in batch])


@pytest.fixture
def paths(tmp_path):
    names = []
    for number, image in enumerate(pictures()):
        names.append(tmp_path / f"{number}.png")
        image.save(names[-1])
    return names


LABELLED = {
    "pair": lambda: (BYTES, torch.tensor(LABELS)),
    "pair of a list": lambda: (pictures(), LABELS),
    "pair of numpy arrays": lambda: (BYTES.numpy(), np.array(LABELS)),
    "channels last": lambda: (BYTES.permute(0, 2, 3, 1).numpy(), LABELS),
    "dictionary": lambda: {"image": BYTES, "label": torch.tensor(LABELS)},
    "a batch of a loader": lambda: [BYTES, torch.tensor(LABELS)],
    "TensorDataset": lambda: TensorDataset(BYTES, torch.tensor(LABELS)),
    "Dataset of tensors": lambda: Own(BYTES, LABELS),
    "Dataset of pictures": lambda: Own(pictures(), LABELS),
    "Dataset of dictionaries": lambda: Own(pictures(), torch.tensor(LABELS), "dict"),
    "Dataset with classes": lambda: Own(pictures(), LABELS, classes=NAMES),
    "Dataset with class_to_idx": lambda: ByIndex(pictures(), LABELS),
    "list of pairs": lambda: list(zip(pictures(), LABELS, strict=True)),
}
STREAMS = {
    "DataLoader": lambda: DataLoader(Own(BYTES, LABELS), batch_size=2),
    "DataLoader of pictures": lambda: DataLoader(
        Own(pictures(), LABELS), batch_size=3, collate_fn=together
    ),
    "DataLoader of dictionaries": lambda: DataLoader(Own(BYTES, LABELS, "dict"), batch_size=2),
    "DataLoader of items": lambda: DataLoader(Own(BYTES, LABELS), batch_size=None),
    "IterableDataset": lambda: Arriving(),
    "generator": lambda: ((BYTES[i : i + 2], LABELS[i : i + 2]) for i in (0, 2, 4)),
    "list of batches": lambda: [(BYTES[:3], LABELS[:3]), (BYTES[3:], LABELS[3:])],
}
PLAIN = {
    "list of pictures": pictures,
    "list of tensors": lambda: list(BYTES),
    "numpy": lambda: BYTES.numpy(),
    "numpy, channels last": lambda: BYTES.permute(0, 2, 3, 1).numpy(),
    "Dataset without labels": lambda: Own(pictures()),
    "TensorDataset of images": lambda: TensorDataset(BYTES),
    "DataLoader of images": lambda: DataLoader(BYTES, batch_size=2),
}


SCALE = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}


def vision():
    return make(**SCALE, labels=NAMES)


def same(found, wanted):
    """Compares the results' tables, but for labels, which only one of the two may have."""
    for name in wanted.tables:
        one, other = found.table(name), wanted.table(name)
        if "label" in other.columns and other["label"].isna().all():
            one, other = one.drop(columns="label"), other.drop(columns="label")
        pd.testing.assert_frame_equal(one, other, check_exact=True)


QUIET = {"batch_size": 2, "progress": False}
SWEEP = {**QUIET, "controls": 0, "probes": "sparsity"}


@cache
def wanted(count=COUNT):
    return ci.sweep(vision(), BYTES[:count], **SWEEP)


@pytest.mark.parametrize("form", [*LABELLED, *STREAMS, *PLAIN])
def test_a_sweep_has_the_same_bits(form):
    data = {**LABELLED, **STREAMS, **PLAIN}[form]()
    result = ci.sweep(vision(), data, **SWEEP)
    same(result, wanted())
    if form not in PLAIN:
        assert list(result.table("samples").groupby("sample")["label"].first()) == LABELS


def test_a_list_of_paths_and_a_folder_and_one_picture(paths):
    for data in (paths, [str(path) for path in paths], paths[0].parent, str(paths[0].parent)):
        same(ci.sweep(vision(), data, **SWEEP), wanted())
    for data in (paths[0], str(paths[0])):
        same(ci.sweep(vision(), data, **SWEEP), wanted(1))


def opened(data, **more):
    model = vision()
    return ci.data.open_data(data, model.preprocess, None, model.preprocess_masks, **more)


@pytest.mark.parametrize("form", LABELLED)
def test_labels_and_their_names_come_along(form):
    samples = opened(LABELLED[form]())
    assert samples.labels == LABELS and type(samples.labels[0]) is int
    assert samples.names == (tuple(NAMES) if "class" in form else None)
    assert torch.equal(samples.read(1, 4), vision().preprocess(BYTES[1:4]))
    assert samples.fingerprint == opened(LABELLED[form]()).fingerprint
    assert samples.fingerprint != opened((BYTES, torch.tensor(LABELS) - 1)).fingerprint


TOKEN_FORMS = {
    "lists": lambda: TOKENS.tolist(),
    "numpy": lambda: TOKENS.numpy(),
    "pair": lambda: (TOKENS, LABELS),
    "dictionary": lambda: {"input_ids": TOKENS, "labels": LABELS},
    "Dataset": lambda: Own(TOKENS),
    "Dataset of lists": lambda: Own(TOKENS.tolist()),
    "Dataset of pairs": lambda: Own(TOKENS, LABELS),
    "TensorDataset": lambda: TensorDataset(TOKENS, torch.tensor(LABELS)),
    "DataLoader": lambda: DataLoader(Own(TOKENS, LABELS), batch_size=2),
    "generator": lambda: (TOKENS[i : i + 2] for i in (0, 2, 4)),
}


@cache
def wanted_tokens():
    return ci.sweep(make_lm(), TOKENS, **SWEEP)


@pytest.mark.parametrize("form", TOKEN_FORMS)
def test_a_sweep_of_tokens_has_the_same_bits(form):
    same(ci.sweep(make_lm(), TOKEN_FORMS[form](), **SWEEP), wanted_tokens())


def test_a_generator_cannot_begin_again():
    batches = iter([(BYTES[:3], LABELS[:3]), (BYTES[3:], LABELS[3:])])
    kept = ci.data.open_data(batches, vision().preprocess, 4)
    assert kept.labels == LABELS[:4]
    refuses("give limit=n", lambda: ci.ablate_heads(vision(), iter([BYTES]), **QUIET))


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
    monkeypatch.setitem(globals(), "TOKENS", wrong)
    forms = TOKEN_FORMS | {
        "Dataset of a table": lambda: datasets.Dataset.from_dict({"input_ids": wrong.tolist()})
    }
    with pytest.raises(ValueError, match=f"sample {WHICH} has the token {token}"):
        ci.sweep(make_lm(), forms[form](), **SWEEP)
