"""The models and data of the cases: the embedded ones, and a tiny model of each family."""

from functools import cache
from typing import Any

import numpy as np
import torch

import crate_interp as ci
import foreign
import segments
from conftest import make, make_lm
from neighbours import make_clip, make_mae
from test_family_fixtures import MEMBERS, member

EMBEDDED = {
    "fashion": ("crate-tiny-fashion", "fashion"),
    "pictures": ("crate-tiny-pictures", "pictures"),
    "lm": ("crate-tiny-lm", "held-out-text"),
    "induction": ("crate-tiny-induction", "repeats"),
    "gpt-induction": ("gpt-tiny-induction", "repeats"),
}
TEXT = ("crate-lm", "crate-lm vanilla", "gpt-baseline", "nanochat-crate", "tost-lm", "crate-bert")
PICTURES = ("crate", "crate-alpha", "crate mean", *MEMBERS)
TINY = (*PICTURES, *TEXT)
BRIDGED = ("vit", "gpt2")
N = 11  # samples of the tiny data


@cache
def subject(name: str) -> tuple[Any, Any]:
    """Returns a model and its data."""
    if name in EMBEDDED:
        model, data = EMBEDDED[name]
        return ci.load(model), f"embedded:{data}"
    random = torch.Generator().manual_seed(5)
    if name in TEXT:
        tokens, masked = torch.randint(47, (N, 11), generator=random), torch.arange(11) == 5
        both = (tokens.where(~masked, 3), tokens.where(masked, -100))
        return make_lm(name), both if name == "crate-bert" else tokens
    if name in ("clipa", "crate-mae"):
        model = make_clip() if name == "clipa" else make_mae()
        return model, torch.randn(N, 3, 6, 20, generator=random)
    if name == "masks":
        return segments.model(), segments.dataset(N)
    if name in BRIDGED:
        return foreign.pair(name)[1], foreign.inputs(name, N)
    if name in ("crate", "crate-alpha", "crate mean"):
        family, _, pool = name.partition(" ")
        model = make(family, **({"pool": pool} if pool else {}))
    else:
        model, _ = member(name)
    images = torch.randn(N, 3, *model.cfg.image_size, generator=random)
    with torch.no_grad():  # so that the answers differ
        model.unembed.bias.sub_(model(images).mean(dim=0))
    masks = (torch.rand(N, *model.cfg.image_size, generator=random) > 0.6).to(torch.uint8) * 255
    return model, {"image": images, "label": np.arange(N) % 2, "mask": masks}


def inputs(name: str, n: int = 3) -> torch.Tensor:
    """Returns n samples as the model takes them."""
    model, data = subject(name)
    if isinstance(data, str):
        rows = ci.data.embedded(data.removeprefix("embedded:"))[:n]
        if "image" in rows:
            return model.preprocess(rows["image"])
        return torch.tensor(rows["input_ids"]) if "input_ids" in rows else windows(model, rows, n)
    if name == "masks":
        return model.preprocess(data[:n]["image"])
    data = data[0] if isinstance(data, tuple) else data
    return (data["image"] if isinstance(data, dict) else data)[:n]


def windows(model: Any, rows: dict[str, list[str]], n: int) -> torch.Tensor:
    """Returns the first tokens of texts."""
    return torch.cat([model.to_tokens(text)[:, :24] for text in rows["text"][:n]])


@cache
def cached(name: str) -> tuple[Any, Any, torch.Tensor]:
    """Returns a model, a full cache of three samples, and the samples."""
    model, x = subject(name)[0], inputs(name)
    both = (x, torch.arange(14).view(2, 7)) if name == "clipa" else (x,)
    with torch.no_grad():
        return model, model.run_with_cache(*both)[1], x
