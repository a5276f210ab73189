"""Reads the networks of pairs.py, and measures one number for a property, layer by layer."""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pandas as pd
import pyarrow.parquet
import torch
import transformers
from pairs import SAMPLE, SEEDS, WEIGHTS, digest, facts_of, make_model, name_of, write_preprocessor
from torch import Tensor
from tqdm.auto import tqdm

import crate_interp as ci
from crate_interp.measures import effective_rank, stable_rank

Data = Any  # what ci.sweep takes


class Network(NamedTuple):
    """The network that a sweep measured. subspaces: what stands for U, "" for its own."""

    kind: str
    seed: int
    trained: bool
    subspaces: str


def sample() -> datasets.Dataset:
    """Returns the 256 test composites that are shipped, with masks and labels."""
    return datasets.Dataset(pyarrow.parquet.read_table(SAMPLE))


def load(network: Network) -> Any:
    """Returns a hooked model. Raises SystemExit if it is no untrained twin of what is shipped."""
    transformers.utils.logging.disable_progress_bar()  # of each of many small files
    kind, seed = network.kind, network.seed
    folder = WEIGHTS / name_of(kind, seed)
    how = {"subspaces": network.subspaces} if kind == "vit" else {}
    read: Callable[..., Any] = ci.bridge.load if kind == "vit" else ci.load
    if network.trained:
        return read(str(folder), **how)
    model: Any = make_model(kind, seed)
    if digest(model) != facts_of(kind, seed)["start"]:
        raise SystemExit(
            f"seed {seed} does not give the {kind} here that {folder.name} was trained from: this "
            f"version of torch ({torch.__version__}) or transformers draws other weights."
        )
    if kind != "vit":
        return model.eval()
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        write_preprocessor(Path(place))
        return read(place, **how)


def _change(norm: bool, name: str, words: str) -> ci.Probe:
    """Returns a probe of how attention changes R^c, as a share of what it was.

    beyond: less the change by the same updates in another order of the tokens. Any update as long
    as this changes R^c; what is left is owed to each token getting its own.
    """
    rates = ci.probes.compression(norm=norm, basis="orthonormal")

    def changed(block: Any, before: Tensor, after: Tensor) -> Tensor:
        found = rates.measure(block, {"hook_resid_pre": before, "hook_resid_mid": after})
        return found["subspace_rate_mid"] / found["subspace_rate_pre"] - 1

    def measure(block: Any, acts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        before, after = acts["hook_resid_pre"], acts["hook_resid_mid"]
        order = torch.randperm(before.shape[1], generator=torch.Generator().manual_seed(0))
        change = changed(block, before, after)
        other = changed(block, before, before + (after - before)[:, order])
        return {"change": change, "beyond": change - other}

    how = f"R^c after attention over R^c before it, minus 1, {words}; attention is to lower it."
    less = "The same, less that of the same updates in another order of the tokens."
    unit = "share of R^c"
    statistics = {"change": (unit, None, None, how), "beyond": (unit, None, None, less)}
    only = dict(optional=(), counts=(), final=None)
    return replace(rates, name=name, measure=measure, statistics=statistics, **only)


def _filled(_block: Any, acts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    z = acts["hook_resid_post"]
    return {"stream": effective_rank(z) / min(z.shape[1:])}


def _bases(block: Any) -> dict[str, Tensor]:
    u = block.attn.U.detach()  # [head, d_model, d_head]
    return {"subspace": stable_rank(u) / u.shape[-1]}


def _even(_block: Any, acts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pattern = acts["attn.hook_pattern"]  # [batch, head, query, key]
    entropy = ci.measures.attention_entropy(pattern).mean(dim=(1, 2))
    return {"entropy": entropy / math.log(pattern.shape[-1])}


def probes(subspaces: str = "") -> list[str | ci.Probe]:
    """Returns the probes of a sweep: built-in ones, and our own of shares that need no width.

    subspaces: with "key" only what rests on the choice, since the rest is measured with "value".
    """
    share = "share of the largest possible"
    rank = "Effective rank of the layer's output over the largest possible."
    stable = "Stable rank of U_k over d_head: 1 where it is orthonormal up to scale."
    filled = ci.Probe(
        name="filled",
        points=("hook_resid_post",),
        measure=_filled,
        weights=_bases,
        statistics={"stream": (share, 0.0, 1.0, rank), "subspace": (share, 0.0, 1.0, stable)},
    )
    even = ci.Probe(
        name="evenness",
        points=("attn.hook_pattern",),
        measure=_even,
        statistics={"entropy": ("share of uniform", 0.0, 1.0, "1 is even attention.")},
    )
    read = _change(True, "compression_read", "of the stream as attention reads it")
    if subspaces == "key":
        return [read, "alignment"]
    stream = _change(False, "compression_stream", "of the stream as it is")
    return [read, stream, "sparsity", "alignment", filled, even]


def segmented(model: Any, data: Data) -> dict[str, float]:
    """Returns how well attention masks segment, less what they score on the next image's mask.

    fixed: of the layer and head that are best on the other half of the images; best: of the best
    head for each image, mean over layers (mass rule, tokens).
    """
    result = ci.segment(model, data, untrained=0, progress=False)
    row, rows = result.overall(), result.layers()
    best: Any = rows[rows["way"] == "best head for each image"]
    return {
        "fixed": row["value"] - row["other_image"],
        "best": (best["value"] - best["other_image"]).mean(),
        "score": row["value"],
        "other_image": row["other_image"],
    }


def networks(seeds: tuple[int, ...] = SEEDS) -> list[Network]:
    """Returns every network to measure: trained and untrained, the ViT's with values and keys."""
    choices = (("crate", ""), ("vit", "value"), ("vit", "key"))
    return [Network(kind, seed, trained, subspaces) for kind, subspaces in choices
            for trained in (True, False) for seed in seeds]  # fmt: skip


def measure(
    data: Data, seeds: tuple[int, ...] = SEEDS, progress: bool = True
) -> tuple[dict[Network, ci.SweepResult], pd.DataFrame]:
    """Returns a sweep of every network, and a table of how well each segments.

    data: images with masks, such as `sample()`. The table has a row per kind, seed, trained and
    statistic: fixed, best, score, other_image.
    """
    sweeps, rows = {}, []
    for network in tqdm(networks(seeds), desc="networks", disable=not progress):
        model = load(network)
        chosen = probes(network.subspaces)
        sweeps[network] = ci.sweep(model, data, probes=chosen, controls=0, progress=False)
        if network.subspaces == "key":  # the same network again
            continue
        of = {"kind": network.kind, "seed": network.seed, "trained": network.trained}
        found = segmented(model, data)
        rows += [of | {"statistic": name, "value": value} for name, value in found.items()]
    return sweeps, pd.DataFrame(rows)
