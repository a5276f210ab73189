"""One pass of a model over data, batch by batch: what sweeps, audits and the like share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from crate_hooks import full_name
from crate_interp.data import Samples, open_data, open_text
from crate_interp.measures.checks import all_finite
from crate_interp.models.hooked import HookedModel

Forward = Callable[[Any, Tensor], Any]


def check_model(model: Any, blocks: str = "blocks") -> None:
    """ValueError for what is no hooked model with such layers, and for weights that are not finite."""
    if not isinstance(model, HookedModel):
        raise ValueError(
            f"cannot measure {type(model).__name__}: give a hooked model, such as ci.load(...) returns."
        )
    if model.cfg.kind == "clip":
        raise ValueError(
            "a CLIP is two models: measure its towers, model.visual on images and model.text on texts."
        )
    lists = [name for name in ("blocks", "decoder_blocks") if hasattr(model, name)]
    if blocks not in lists:
        raise ValueError(
            f"blocks={blocks!r}: this {type(model).__name__} has {' and '.join(lists)}."
        )
    for name, value in model.named_parameters():
        if not all_finite(value):
            raise ValueError(f"the weights hold NaN or Inf ({name}): nothing can be measured.")


def check_batch_size(batch_size: Any) -> None:
    """ValueError for what is no number of samples."""
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: give a whole number of at least 1.")


def samples_of(model: Any, data: Any, limit: int | None) -> Samples:
    """The samples of `data` as this model takes them: images, or windows of tokens."""
    if model.cfg.kind == "text":
        return open_text(data, model.windows, limit)
    return open_data(data, model.preprocess, limit, model.preprocess_masks)


def run(model: Any, batch: Tensor) -> None:
    """One forward: a masked autoencoder sees every patch, a language model computes no logits."""
    if model.cfg.kind == "mae":
        model(batch, mask_ratio=0.0)
    elif model.cfg.kind == "text" and model.cfg.causal:
        model(batch, return_type=None)
    else:
        model(batch)


def batches(
    model: Any, samples: Samples, batch_size: int, what: str, progress: bool = True
) -> Iterator[tuple[int, Tensor]]:
    """The index of its first sample and each batch, on the model's device, under a progress bar."""
    unit = "window" if model.cfg.kind == "text" else "image"
    with tqdm(total=samples.n, desc=what, unit=unit, disable=not progress) as bar:
        for start in range(0, samples.n, batch_size):
            batch = samples.read(start, min(start + batch_size, samples.n)).to(model.cfg.device)
            if batch.is_floating_point() and not all_finite(batch):
                bad = [start + index for index, image in enumerate(batch) if not all_finite(image)]
                raise ValueError(f"images hold NaN or Inf: samples {', '.join(map(str, bad[:8]))}.")
            yield start, batch
            bar.update(len(batch))


def last_point(model: Any, blocks: str = "blocks") -> str:
    """The name of the point that holds Z^L."""
    return full_name("hook_resid_post", len(getattr(model, blocks)) - 1, blocks)


def twin(model: Any, seed: int) -> Any:
    """The same architecture with the official random initialisation; the global random state is left as it was."""
    with seeded(seed):
        other = type(model)(model.cfg)
    for name in ("tokenizer", "fetch_tokenizer"):
        if hasattr(model, name):
            setattr(other, name, getattr(model, name))
    return other.to(device=model.cfg.device, dtype=model.cfg.dtype).eval()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's global generator at a seed, and as it was before when the context closes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
