"""ci.circuits.head_meaning: whether each head looks at the same part of every picture."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.stats import rankdata
from torch import Tensor

from crate_interp.core import checks
from crate_interp.core.run_options import Run, RunOptions, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures import input_maps
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hooked import HookedModel
from crate_interp.models.runtimes import with_weights
from crate_interp.probes.segmentation_probe import head_maps, points_of
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, Reading, check_model, samples_of
from crate_interp.questions.experiment import Pass, Plan, Question, Tables, copies
from crate_interp.questions.untrained_twins import twin
from crate_interp.results.result import Result, by

AXES = ("row", "column")
INPUT = -1  # the layer number of maps made of the picture alone
SHUFFLES = 999
MODEL, UNTRAINED = "model", "untrained"


def kendalls_w(ranks: Float[np.ndarray, "*draw rater item"]) -> Float[np.ndarray, "*draw"]:
    """Returns Kendall's W: how far raters agree on the order of items.

    `W = 12 sum_i (R_i - mean R)^2 / (m^2 (k^3 - k))` for the sums R_i of the m raters' ranks of k
    items: 1 if all give one order, and 1 / m on average if each gives a random one.
    """
    m, k = ranks.shape[-2:]
    sums = ranks.sum(axis=-2)
    apart = ((sums - sums.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
    return np.asarray(12 * apart / (m**2 * (k**3 - k)))


def _agreement(result: Result) -> pd.DataFrame:
    places: Any = result.table("places")
    rows = []
    for (network, layer), part in places.groupby(["network", "layer"]):
        for axis in AXES:
            wide: Any = part.pivot(index="sample", columns="head", values=axis).dropna()
            if wide.shape[1] < 2 or len(wide) < 2:
                continue
            ranks = rankdata(wide.to_numpy().round(6), axis=1)  # rounding ranks no heads
            draw = np.random.default_rng([result.meta["settings"]["seed"], layer + 1])
            null = kendalls_w(draw.permuted(np.tile(ranks, (SHUFFLES, 1, 1)), axis=2))
            w = float(kendalls_w(ranks))
            p = (1 + (null >= w - 1e-12).sum()) / (1 + SHUFFLES)
            rows.append(
                (network, layer, axis, w, null.mean(), np.quantile(null, 0.95), p, len(wide))
            )
    columns = ["network", "layer", "axis", "w", "shuffled", "shuffled_95", "p", "n"]
    return pd.DataFrame(rows, columns=columns)


def _parts(result: Result) -> pd.DataFrame:
    places: Any = result.table("places")
    columns = ["network", "layer", "head", "part", "share", "even", "n"]
    rows = [
        (*key, name, kept["in " + name].mean(), kept["even " + name].mean(), len(kept))
        for key, part in places.groupby(["network", "layer", "head"], sort=False)
        for name in result.meta["settings"]["parts"]
        for kept in [part.dropna(subset="in " + name)]
        if len(kept)
    ]
    return pd.DataFrame(rows, columns=columns)


class HeadMeaning(Result):
    """Whether the heads of a layer look at the same places in every picture, head by head.

    `table()`, "agreement": a row per network, layer and axis. The pictures are raters that rank the
    heads by how low (row) or how far right (column) the centre of mass of their map lies. w:
    Kendall's W of these ranks, 1 if every picture has the heads in one order. shuffled,
    shuffled_95: mean and 95 % quantile of w if the heads of each picture are shuffled (999 draws);
    p: the share of draws that reach w. network: "model", or "untrained-0" and so on for copies with
    random weights, whose heads agree too: each has its places in every picture. Layer -1 has the
    five maps of `ci.measures.input_maps` in place of heads, which need no network.

    `table("parts")`: network, layer, head, part, share, even, n: the share of a head's map inside a
    part, mean over the n pictures that have the part, and the share that an even map has.
    `table("places")`: row and column of each picture's centre of mass, from 0 (top, left) to 1.
    """

    KIND = "head_meaning"
    MAIN = "agreement"
    STORED = {"places": by("network", "sample", "layer", "head")}
    DERIVED = {"agreement": _agreement, "parts": _parts}

    def sentences(self) -> list[str]:
        """Returns whether heads keep their places, beside random weights, chance and the input."""
        table: Any = self._table("agreement")
        mine = table[(table["network"] == MODEL) & (table["layer"] != INPUT)]
        if mine.empty:
            return ["Too few heads or pictures to compare: give two or more of each."]
        best, most = mine.loc[mine["w"].idxmax()], float(mine["w"].max())
        copies = table["w"][table["network"] != MODEL]
        maps = table["w"][table["layer"] == INPUT]
        beside = f", {copies.max():.2f} in untrained copies" if len(copies) else ""
        significant = int((mine["p"] <= 0.05 / len(mine)).sum())
        more = "keep" if significant and not copies.max() >= most else "do not keep"
        return [
            f"Heads {more} places of their own from picture to picture: W is at most {most:.2f}"
            f"{beside}.",
            f"That is the {best['axis']} in layer {best['layer']}, over {best['n']} pictures. "
            f"Shuffled heads have {best['shuffled']:.2f}"
            + f", maps of the picture alone {maps.max():.2f}" * bool(maps.notna().any())
            + ".",
            f"{significant} of {len(mine)} layers and axes agree beyond shuffled heads "
            "(p at most .05, divided by their number); heads of random weights may, too.",
        ]

    def legend(self) -> str:
        """Returns the meaning of the columns of the table of agreement."""
        return "w: 1 if every picture has the heads in one order. shuffled: w of shuffled heads."


@with_weights
@in_full_precision
def head_meaning(
    model: HookedModel,
    data: Data,
    *,
    parts: Mapping[str, int] | None = None,
    query: int = 0,
    untrained: int = 3,
    seed: int = 0,
    **run: Unpack[Run],
) -> Perhaps[HeadMeaning]:
    """Returns whether each head looks at the same part of every picture.

    "Each head has a meaning" (arXiv 2308.16271, section 3) is shown there on chosen pictures. Here
    all heads and pictures count: the centre of mass of a head's map over the patches is ranked
    among the heads of its layer, and Kendall's W says how far pictures agree on the order.

    Args:
        model: A hooked model of images.
        data: As in `ci.sweep`; with masks, if parts are given.
        parts: Names of parts, with their numbers in the data's masks, such as {"head": 1}.
        query: The token whose attention is the map; 0 is CLS.
        untrained: The number of untrained copies.
        seed: Draws the shuffled heads.
        run: As in `ci.sweep`.

    Returns:
        The agreement of each layer, beside shuffled heads, maps of the picture alone and copies
        with random weights; None while chunks of other shards are missing.

    Raises:
        ValueError: Before work starts, for a model of texts, for parts that are no numbers of 1 to
            254, for data without masks if there are parts, and as `ci.sweep` does.
    """
    check_model(model)
    if model.cfg.kind not in ("vision", "mae"):
        raise ValueError("the model reads text, which has no patches: give a model of images.")
    # what is no mapping becomes an entry that is refused
    known = dict(parts) if isinstance(parts, Mapping) else {"": 0} if parts else {}
    for name, number in known.items():
        if not isinstance(name, str) or not checks.is_int(number) or not 0 < number < 255:
            raise ValueError(f'parts={parts!r}: give names and numbers of masks, as {{"head": 1}}.')
    seed = checks.count("seed", seed, least=0)
    untrained = checks.count("untrained", untrained, least=0)
    if not checks.is_int(query):
        raise ValueError(f"query={query!r}: give the number of a token, 0 for CLS.")
    return ask(
        Meaning(dict(parts or {}), query, untrained, seed),
        model,
        data,
        run_options(head_meaning, run),
    )


@dataclass(frozen=True)
class Meaning(Question):
    """Asks where heads look in every picture."""

    parts: dict[str, int]
    query: int
    untrained: int
    seed: int
    result = HeadMeaning

    def opened(
        self, model: HookedModel, data: Data, options: RunOptions
    ) -> tuple["Meaning", Samples]:
        """Opens the data, and refuses parts without masks."""
        samples = samples_of(model, data, options)
        if self.parts and samples.masks is None:
            raise ValueError(
                "parts are numbers in masks: give data with masks, or leave out parts=."
            )
        return self, samples

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        heads = partial(_of_chunk, question=self, inputs=False)
        step = Pass("places", heads, HeadMeaning.STORED, masks=bool(self.parts))
        own = replace(step, measure=partial(_of_chunk, question=self, inputs=True))
        twins = copies(step, self.untrained, UNTRAINED, twin, run.samples, None)
        tables, *others = yield [own, *twins]
        for seed, one in enumerate(others):
            table = one["places"].assign(network=f"{UNTRAINED}-{seed}")
            tables["places"] = pd.concat([tables["places"], table], ignore_index=True)
        return tables


def _of_chunk(chunk: Chunk, question: Meaning, inputs: bool) -> Tables:
    """Returns the table "places"; inputs: also of the maps of the picture alone."""
    kind, patch = chunk.model.cfg.facts["attention"], chunk.model.cfg.patch_size
    found: list[pd.DataFrame] = []

    def place(maps: Tensor, layer: int, batch: Batch) -> None:
        grid = [side // one for side, one in zip(batch.inputs.shape[2:], patch, strict=True)]
        shares = (maps / maps.sum(dim=-1, keepdim=True)).double()  # [batch, head, patch]
        across = shares.unflatten(-1, grid)
        numbers: dict[str, Tensor] = {}
        for axis, sums in zip(AXES, (across.sum(dim=-1), across.sum(dim=-2)), strict=True):
            at = torch.arange(sums.shape[-1], dtype=sums.dtype, device=sums.device) + 0.5
            numbers[axis] = sums @ at / sums.shape[-1]
        for name, number in question.parts.items():
            assert batch.masks is not None  # the pass has masks
            inside = (batch.masks == number).double().to(maps.device)
            cells = inside.unflatten(1, (grid[0], -1)).unflatten(3, (grid[1], -1)).mean(dim=(2, 4))
            even = cells.mean(dim=(1, 2)).where(cells.sum(dim=(1, 2)) > 0, torch.nan)[:, None]
            held = torch.einsum("bhp,bp->bh", shares, cells.flatten(1))
            numbers["in " + name] = held.where(~even.isnan(), torch.nan)
            numbers["even " + name] = even.expand_as(held)
        samples = np.arange(batch.start, batch.last + 1)
        flat = {name: value.cpu().numpy().ravel() for name, value in numbers.items()}
        heads = shares.shape[1]
        found.append(
            pd.DataFrame(
                {
                    "network": MODEL, "sample": samples.repeat(heads), "layer": layer,
                    "head": np.tile(np.arange(heads), len(samples)), **flat,
                }
            )
        )  # fmt: skip

    def measure(layer: int, acts: Mapping[str, Tensor], batch: Batch) -> None:
        special = chunk.model.cfg.n_special
        place(head_maps(acts, special, question.query, True, True), layer, batch)
        if inputs and layer == 0:
            place(input_maps(batch.inputs.cpu().double(), patch), INPUT, batch)

    chunk.measure_all(Reading(points_of(kind, True), measure))
    return {"places": pd.concat(found, ignore_index=True)} if found else {}
