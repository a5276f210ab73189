"""A DataLoader of a map-style dataset: each sample of its dataset once, in order."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
    default_convert,
)

from crate_interp.data.item_samples import names_of
from crate_interp.data.items import Item, is_array, is_tokens, item_of, separated_batch
from crate_interp.data.tables import Table


def is_loader(data: object) -> TypeGuard[DataLoader]:
    """Tells whether data is a DataLoader of a map-style dataset, which gives samples by number."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    if data.batch_size is not None or data.batch_sampler is not None:
        return True
    dataset: Any = data.dataset  # whose items may be batches themselves
    value = item_of(dataset[0], "data[0]").value if len(dataset) else None
    if not is_array(value):
        return not isinstance(value, (list, tuple)) or is_tokens(value)
    tokens = value.ndim == 2 and str(value.dtype).endswith(("int32", "int64"))
    return value.ndim != 4 and not tokens


def drops_last(loader: DataLoader) -> bool:
    """Tells whether a loader leaves out a last batch that is short."""
    return loader.drop_last or getattr(loader.batch_sampler, "drop_last", False)


@dataclass(frozen=True)
class Collated:
    """The samples of a DataLoader's dataset, each as the loader's collate_fn gives it alone."""

    dataset: Any
    collate: Callable[[list[Any]], object]
    classes: tuple[str, ...] | None
    tokens: bool

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Item:
        """Returns a sample; raises ValueError unless the batch of one sample is one sample."""
        batch = item_of(self.collate([self.dataset[number]]), f"sample {number} alone")
        items = list(separated_batch(batch, self.tokens, number))
        if len(items) != 1:
            raise ValueError(
                f"the loader's collate_fn makes {len(items)} samples of sample {number} alone: "
                "give loader.dataset, or a collate_fn that gives one."
            )
        return items[0]


def samples_of_loader(loader: DataLoader, tokens: bool = False) -> Any:
    """Returns what a DataLoader of a map-style dataset draws from: each sample once, in order.

    That is its dataset; of a SubsetRandomSampler only the samples of its indices, in ascending
    order. A collate_fn of its own is applied to each sample alone. tokens: whether samples are
    tokens or texts. Warns if the loader itself would shuffle, repeat or leave out samples.
    """
    dataset: Any = loader.dataset
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    chosen = sampler.indices if isinstance(sampler, SubsetRandomSampler) else sampler
    if isinstance(sampler, (SubsetRandomSampler, list, tuple, range)):
        numbers = sorted({int(number) for number in chosen})
        select: Any = getattr(dataset, "select", None)  # of a datasets.Dataset
        dataset = select(numbers) if isinstance(dataset, Table) else Subset(dataset, numbers)
    kinds = [type(one) for one in (sampler, loader.batch_sampler) if one is not None]
    if not {SequentialSampler, BatchSampler}.issuperset(kinds) or drops_last(loader):
        warnings.warn(
            f"the DataLoader's order ({', '.join(kind.__name__ for kind in kinds)}) is left aside: "
            f"{len(dataset):,} samples of its dataset are read, each once, in ascending order. To "
            "measure some of them, give torch.utils.data.Subset(dataset, numbers).",
            stacklevel=2,
        )
    if loader.collate_fn in (default_collate, default_convert):
        return dataset
    return Collated(dataset, loader.collate_fn, names_of(loader.dataset), tokens)
