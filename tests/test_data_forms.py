"""Every form in which people hold images or tokens gives what the plain tensor gives."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
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
