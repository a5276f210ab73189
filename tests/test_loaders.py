"""A DataLoader gives each sample of its dataset once, in order, or is refused."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import crate_interp as ci
from conftest import refuses
from test_data_forms import (
    BYTES,
    COUNT,
    LABELS,
    NAMES,
    SWEEP,
    Arriving,
    Own,
    opened,
    together,
    vision,
)  # fmt: skip


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


def doubled(batch):
    return together(batch + batch)


ONCE = "does not give each sample once, in order: write .*num_workers=0, drop_last=False, shuffle="


@pytest.mark.parametrize(
    "loader, words",
    [
        (lambda: DataLoader(Arriving(), num_workers=2), ONCE),
        (lambda: DataLoader(Arriving(), drop_last=True), ONCE),
        (lambda: DataLoader([(BYTES, LABELS)], batch_size=None, shuffle=True), ONCE),
        (lambda: DataLoader(Own(BYTES, LABELS), collate_fn=doubled), "makes 2 samples of one"),
    ],
)
def test_a_loader_that_cannot_give_each_sample_once_is_refused(loader, words):
    refuses(words, lambda: ci.sweep(vision(), loader(), **SWEEP))


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
