"""Every form in which people hold images or tokens gives what the plain tensor gives."""

import io
import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import ExifTags, Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import crate_interp as ci
from conftest import make, make_lm
from selection import few
from texts import Words

COUNT, SIZE = 5, (6, 20)
LABELS = [3, 0, 7, 3, 10]
NAMES = [f"class {number}" for number in range(11)]
BYTES = torch.randint(
    0, 256, (COUNT, 3, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
)
TOKENS = torch.randint(0, 47, (COUNT, 11), generator=torch.Generator().manual_seed(4))
MASKS = torch.randint(0, 3, (COUNT, *SIZE), dtype=torch.uint8,
                      generator=torch.Generator().manual_seed(5))  # fmt: skip


def pictures():
    return [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in BYTES]


class Own(Dataset):
    """A dataset as people write them, with an item for each number."""

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
    changed = LABELLED[form]()
    if form == "pair":
        assert samples.fingerprint != opened((changed[0], changed[1] + 0 * 1 - 1)).fingerprint


def masked():
    images = pictures()
    masks = [Image.fromarray(mask.numpy()) for mask in MASKS]
    return {
        "pair of tensors": (BYTES, MASKS),
        "Dataset of pictures": Own(images, masks),
        "list of dictionaries": [
            {"image": one, "mask": mask, "label": 3}
            for one, mask in zip(images, masks, strict=True)
        ],
        "Dataset of tensors": Own(BYTES, MASKS.long()),
    }


@pytest.mark.parametrize("form", masked())
def test_masks_come_along(form):
    samples = opened(masked()[form])
    assert samples.masks is not None
    assert torch.equal(samples.masks(1, 4), MASKS[1:4])
    assert samples.labels == ([3] * COUNT if "dict" in form else None)


VERBS = {
    "audit": lambda model, data: ci.audit(model, data, untrained=0, grid=False, **QUIET),
    "atoms": lambda model, data: ci.atoms(model, data, **QUIET),
    "ablate_heads": lambda model, data: ci.ablate_heads(model, data, **QUIET),
    "segment": lambda model, data: ci.segment(model, data, **QUIET),
}


@pytest.mark.parametrize("verb", few(["ablate_heads", "atoms", "segment", "audit"], 2))
def test_verbs_take_a_dataset_and_a_loader(verb):
    labels, masks = LABELS, None
    if verb == "segment":
        masks = [Image.fromarray(mask.numpy()) for mask in MASKS]
    results = [
        VERBS[verb](vision(), data)
        for data in ((BYTES, masks or labels), Own(pictures(), masks or labels))
    ]
    same(results[1], results[0])
    if verb != "segment":
        loader = DataLoader(Own(BYTES, labels), batch_size=3)
        data = loader if verb == "atoms" else loader
        same(VERBS[verb](vision(), ci.data.open_data(data, vision().preprocess, COUNT)), results[0])


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


@pytest.mark.parametrize(
    "data, words",
    [
        (lambda: Own(list(BYTES), [[1, 2]] * 5), "the label of data\\[0\\] is a list"),
        (lambda: Own(list(BYTES), torch.eye(5)), "Give the number or the name of one class"),
        (lambda: [(BYTES[0], 1, 2)], "is a tuple of 3"),
        (lambda: [{"picture": BYTES[0]}], "a dictionary with the keys picture"),
        (lambda: (BYTES, LABELS[:3]), "5 samples and 3 labels"),
        (lambda: [], "the data is empty"),
        (lambda: 3, "cannot take images from int: give images"),
        (lambda: {3, 4}, "sample 0 is of type int"),
        (lambda: [3, 4], "sample 0 is of type int"),
        (lambda: Own([Path("/no/such.png")]), "cannot read"),
        (lambda: (BYTES.double()[:, 0, 0], LABELS), "give \\[n, channels"),
        (lambda: Own([BYTES[0], BYTES[1][:, :5]]), "5 x 20"),
    ],
)
def test_what_is_not_taken_is_said(data, words, unchecked):
    with pytest.raises(ValueError, match=words):
        ci.sweep(vision(), data(), **SWEEP)


class Random(Own):
    def __getitem__(self, number):
        return torch.rand(3, *SIZE)


class Broken(Own):
    def __getitem__(self, number):
        if number == 2:
            raise KeyError("no such row")
        return super().__getitem__(number)


def test_a_dataset_that_changes_or_fails_is_refused():
    with pytest.raises(ValueError, match="not the same when it is read twice. Take random steps"):
        ci.sweep(vision(), Random(BYTES), **SWEEP)
    with pytest.raises(ValueError, match=r"data\[2\] raised KeyError: .*no such row"):
        ci.sweep(vision(), Broken(BYTES), **SWEEP)


def test_a_generator_cannot_begin_again():
    batches = iter([(BYTES[:3], LABELS[:3]), (BYTES[3:], LABELS[3:])])
    kept = ci.data.open_data(batches, vision().preprocess, 4)
    assert kept.labels == LABELS[:4]
    with pytest.raises(ValueError, match="give limit=n"):
        ci.ablate_heads(vision(), iter([BYTES]), **QUIET)


def test_pictures_that_cannot_be_read_are_left_out(paths):
    paths[3].write_bytes(b"no picture")
    with pytest.raises(ValueError, match="not a picture"):
        ci.sweep(vision(), paths, **SWEEP)
    result = ci.sweep(vision(), paths, skip_bad=True, **SWEEP)
    assert sorted(result.table("samples")["sample"].unique()) == [0, 1, 2, 4]


def test_a_run_goes_on_with_the_same_samples_only(tmp_path):
    first = ci.sweep(vision(), Own(pictures(), LABELS), out=tmp_path / "o", chunk_size=2, **SWEEP)
    again = ci.sweep(vision(), Own(pictures(), LABELS), out=tmp_path / "o", chunk_size=2, **SWEEP)
    same(again, first)
    other = [*LABELS[:-1], 1]
    with pytest.raises(ValueError, match="data"):
        ci.sweep(vision(), Own(pictures(), other), out=tmp_path / "o", chunk_size=2, **SWEEP)


def many():
    """Two classes of eight pictures each, as a dataset and as tensors."""
    images = torch.randint(
        0, 256, (16, 3, *SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)
    )
    labels = [number % 2 for number in range(16)]
    held = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in images]
    return (images, torch.tensor(labels)), Own(held, labels)


def test_a_linear_probe_takes_the_labels_of_a_dataset():
    pair, dataset = many()
    model = make(**SCALE, n_layers=1)
    same(*(ci.linear_probe(model, data, **QUIET) for data in (dataset, pair)))


def test_a_comparison_and_a_watch_take_a_dataset():
    few = {"untrained": 0, "probes": "sparsity", **QUIET}
    data = (Own(pictures(), LABELS), BYTES)
    found, wanted = (ci.compare(vision(), make(**SCALE, seed=3), one, **few) for one in data)
    same(found, wanted)
    watches = []
    for one in data:
        with ci.watch(vision(), one, every=1, probes="sparsity") as watch:
            watch.step()
        watches.append(watch.result())
    same(*watches)


@pytest.mark.slow
def test_a_report_takes_a_dataset(tmp_path):
    path = ci.report(vision(), Own(pictures(), LABELS), out=tmp_path / "r", untrained=0, **QUIET)
    assert path is not None and (tmp_path / "r" / "report.html").is_file()


WHICH, TALL = 3, (37, 11)  # the sample with a fault; height and width of a mask that does not fit


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


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
    "dataset class": lambda columns, folder: Rows(rows_of(columns)),
    "columns": lambda columns, folder: columns,
    "pair": lambda columns, folder: tuple(columns.values()),
    "DataLoader": lambda columns, folder: DataLoader(Rows(pairs_of(columns)), batch_size=2),
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
        with pytest.raises(ValueError, match=rf"(sample |'){WHICH}.* is 37 x 11|as 37 x 11"):
            class_maps(images, masks(odd=[WHICH]), name)


@pytest.mark.parametrize("form", [*HOLDERS, *TABLES, *list(ARRAYS)[:3]])
@pytest.mark.parametrize("label", [-1, 11], ids=["below", "above"])
def test_a_label_must_be_a_class_of_the_model(form, label, tmp_path):
    labels = [*LABELS[:WHICH], label, *LABELS[WHICH + 1 :]]
    images = list(BYTES) if form in ARRAYS else pictures()
    data = {**HOLDERS, **TABLES, **ARRAYS}[form]({"image": images, "label": labels}, tmp_path)
    with pytest.raises(ValueError, match=f"the label {label} of sample {WHICH} is not a class"):
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


def test_noise_and_perturbed_pictures_are_taken():
    model, random = vision(), torch.Generator().manual_seed(7)
    noise = torch.randn(COUNT, 3, *SIZE, generator=random)
    for given in (noise, 1e4 * noise, torch.rand(COUNT, 3, *SIZE), model.preprocess(BYTES) + 9.0):
        assert torch.equal(model.preprocess(given), given) and model(given).isfinite().all()
    raw = BYTES.float()
    for given in (raw, raw / 2, raw.double(), (raw - 0.4) / 0.3):
        for run in (model.preprocess, model.to(given.dtype)):
            with pytest.raises(ValueError, match="not preprocessed: give uint8 pixels"):
                run(given)


def test_a_mask_of_a_preprocessed_image_is_not_resized():
    model = make(**SCALE, resize=9, crop=SIZE, interpolate_pos=False)
    floats = torch.rand(COUNT, 3, *SIZE, generator=torch.Generator().manual_seed(7))
    for data in ((floats, MASKS), Own(floats, MASKS), [(floats[:3], MASKS[:3])]):
        samples = ci.data.open_data(data, model.preprocess, 3, model.preprocess_masks)
        assert torch.equal(samples.masks(0, 3), MASKS[:3])


def test_minus_one_of_a_class_label_means_no_label():
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=NAMES))
    for labels, wanted in ((LABELS[:4] + [-1], LABELS[:4] + [None]), ([-1] * COUNT, None)):
        rows = {"image": pictures(), "label": labels}
        table = datasets.Dataset.from_dict(rows, features=features)
        assert opened(table).labels == wanted
        with pytest.raises(ValueError, match="has no label" if wanted else "has no labels"):
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


class Backwards(Sampler):
    """A sampler as people write them: here the numbers from the last to the second."""

    def __iter__(self):
        return iter(range(COUNT - 1, 0, -1))

    def __len__(self):
        return COUNT - 1


def spread(**options):
    return {"sampler": DistributedSampler(Own(BYTES), num_replicas=2, **options)}


def in_batches(sampler, **options):
    return {"batch_sampler": BatchSampler(sampler, 2, options.get("drop_last", False))}


# arguments of a loader that changes the order or the number of samples, or nothing
LOADERS = {
    "in order": lambda: {"batch_size": 2},
    "two workers": lambda: {"batch_size": 2, "num_workers": 2},
    "shuffle": lambda: {"batch_size": 2, "shuffle": True},
    "drop_last": lambda: {"batch_size": 2, "drop_last": True},
    "with replacement": lambda: {"sampler": RandomSampler(range(COUNT), replacement=True)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1, 0, 5, 0, 2], 7)},
    "first of two processes": lambda: spread(rank=0),
    "second of two processes": lambda: spread(rank=1, shuffle=False),
    "distributed, dropping": lambda: spread(rank=1, shuffle=False, drop_last=True),
    "a sampler of their own": lambda: {"sampler": Backwards()},
    "random batches": lambda: in_batches(RandomSampler(range(COUNT))),
    "batches in order": lambda: in_batches(SequentialSampler(range(COUNT))),
    "dropping batches": lambda: in_batches(SequentialSampler(range(COUNT)), drop_last=True),
    "batches of their own": lambda: {"batch_sampler": [[4, 1], [1, 0]]},
    "no batches": lambda: {"batch_size": None},
}
SAYS_NOTHING = ("in order", "two workers", "batches in order", "no batches")


@pytest.mark.parametrize("collate", [None, together], ids=["default", "own"])
@pytest.mark.parametrize("form", LOADERS)
def test_a_loader_of_a_dataset_gives_each_sample_once(form, collate):
    more = {} if form == "no batches" else {"collate_fn": collate}
    loader = DataLoader(Own(BYTES, LABELS, classes=NAMES), **LOADERS[form](), **more)
    quiet = form in SAYS_NOTHING
    with nullcontext() if quiet else pytest.warns(UserWarning, match="Subset") as told:
        samples = opened(loader)
    assert quiet or len(told) == 1
    assert samples.labels == LABELS and samples.names == tuple(NAMES) and samples.n == COUNT
    assert torch.equal(samples.read(0, COUNT), vision().preprocess(BYTES))


@pytest.mark.parametrize("numbers", [[3, 0, 4], range(2, 5)], ids=["list", "range"])
@pytest.mark.parametrize("kind", [SubsetRandomSampler, list, Subset])
def test_a_loader_of_some_samples_gives_these(kind, numbers):
    dataset = Own(BYTES, LABELS, classes=NAMES)
    if kind is Subset:
        samples = opened(DataLoader(Subset(dataset, sorted(numbers)), batch_size=2))
    else:
        with pytest.warns(UserWarning, match="left aside: 3 samples"):
            samples = opened(DataLoader(dataset, batch_size=2, sampler=kind(numbers)))
    chosen = sorted(numbers)
    assert samples.labels == [LABELS[number] for number in chosen]
    assert samples.names == tuple(NAMES)
    assert torch.equal(samples.read(0, 3), vision().preprocess(BYTES[chosen]))


def test_a_loader_is_measured_by_every_verb_without_a_limit():
    loader = DataLoader(Own(BYTES, LABELS), batch_size=2)
    same(
        ci.ablate_heads(vision(), loader, **QUIET),
        ci.ablate_heads(vision(), (BYTES, LABELS), **QUIET),
    )
    samples = opened(DataLoader(Own(BYTES, MASKS), batch_size=2))
    assert torch.equal(samples.masks(1, 4), MASKS[1:4])
    table = datasets.Dataset.from_dict({"image": pictures(), "label": LABELS})
    table = table.cast_column("image", datasets.Image())
    same(ci.sweep(vision(), DataLoader(table, batch_size=2), **SWEEP), wanted())
    with pytest.warns(UserWarning, match="3 samples"):
        some = opened(DataLoader(table, sampler=SubsetRandomSampler([4, 0, 1])))
    assert some.labels == [LABELS[number] for number in (0, 1, 4)]


@pytest.mark.parametrize("form", ["tokens", "pairs", "texts"])
def test_a_loader_of_tokens_gives_each_sample_once(form):
    lm = make_lm()
    if form == "texts":
        lm.tokenizer = Words()
        held = [" ".join(map(str, row.tolist())) for row in TOKENS]
    else:
        held = TOKENS
    dataset = Own(held, LABELS if form == "pairs" else None)
    wanted = ci.sweep(lm, held, **SWEEP)
    with pytest.warns(UserWarning, match="RandomSampler"):
        same(ci.sweep(lm, DataLoader(dataset, batch_size=2, shuffle=True), **SWEEP), wanted)
    if form != "texts":
        batches = [TOKENS[:3], TOKENS[3:]]
        same(ci.sweep(lm, DataLoader(batches, batch_size=None), **SWEEP), wanted)


def doubled(batch):
    return together(batch + batch)


@pytest.mark.parametrize(
    "loader, words",
    [
        (lambda: DataLoader(Arriving(), num_workers=2), r"num_workers=0\)"),
        (lambda: DataLoader(Arriving(), drop_last=True), r"drop_last=False\)"),
        (
            lambda: DataLoader(Arriving(), num_workers=2, batch_size=3, drop_last=True),
            r"num_workers=0, drop_last=False\)",
        ),
        (
            lambda: DataLoader([(BYTES, LABELS)], batch_size=None, shuffle=True),
            r"shuffle=False\)",
        ),
        (lambda: DataLoader(Own(BYTES, LABELS), collate_fn=doubled), "makes 2 samples of sample 0"),
    ],
)
def test_a_loader_that_cannot_give_each_sample_once_is_refused(loader, words):
    with pytest.raises(ValueError, match=words):
        ci.sweep(vision(), loader(), **SWEEP)


class Flipping(Own):
    """Flips a picture with probability 1/2 whenever it is read, as a transform for training."""

    def __getitem__(self, number):
        picture, label = super().__getitem__(number)
        return (picture.flip(-1) if torch.rand(()) < 0.5 else picture), label


class FlippingStream(IterableDataset):
    def __iter__(self):
        flipping = Flipping(BYTES, LABELS)
        return (flipping[number] for number in range(COUNT))


@pytest.mark.parametrize("form", ["Dataset", "DataLoader", "stream"])
def test_a_random_flip_is_refused(form):
    flipping = Flipping(BYTES, LABELS)
    data = {
        "Dataset": flipping,
        "DataLoader": DataLoader(flipping, batch_size=2),
        "stream": FlippingStream(),
    }[form]
    for seed in range(12):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match="same when it is read twice|with another sample when"):
            ci.sweep(vision(), data, **SWEEP)
