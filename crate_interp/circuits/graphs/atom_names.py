"""ci.circuits.atom_names: what an atom's activation tells, on held-out samples, or "no name"."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from crate_interp.circuits.excerpts import (
    Concept,
    concepts_of_patches,
    concepts_of_samples,
    concepts_of_tokens,
    excerpts,
    special_tokens,
)
from crate_interp.circuits.logits import answer_names
from crate_interp.core import checks
from crate_interp.core.pictures import decoded
from crate_interp.core.run_options import Run, run_options
from crate_interp.core.safe_text import visible
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.hook_points import check_atoms
from crate_interp.models.hooked import HookedModel
from crate_interp.models.runtimes import with_weights
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, Reading
from crate_interp.questions.edited_runs import every_entry
from crate_interp.questions.experiment import Pass, Plan, Question, Tables
from crate_interp.results.result import Result, first
from crate_interp.stats.intervals import halves
from crate_interp.sweeps.atom_statistics import CODE

EXAMPLES = 4  # the tokens at which an atom is largest
_TOKENS = 2**13  # tokens that are compared one by one, and the rest of the last sample's
_SPLITS = 8
_SIDE = 48  # pixels of an example
_FEWEST = 4  # tokens or samples of a half at which a candidate must be present, and absent


class AtomNames(Result):
    """What the activation of each atom tells: the candidate that it separates best, if any.

    `table()` has a row per layer and atom: layer, atom, name, kind, auc, null, present, n. A
    candidate is chosen on half of the samples, as the one whose presence the activation separates
    best. auc: on the other half, the chance that a token (or a sample, for classes) with it has a
    larger activation than one without it; 0.5 says nothing. It is the mean over 8 splits; name and
    kind are those of the candidate that was chosen most often. null: the 95th percentile of auc in
    a split, over atoms of the layer, if what is present is disturbed and the candidate is chosen
    anew.

    The rule separates what a token is from where it is. Classes, objects and words are judged at
    fixed positions: a token's activation is its rank among the activations of other samples at the
    same position. The random baseline (null) then deals out what is present anew among samples, at
    the same positions. An atom without such a name may be named after a position. Its baseline
    shifts positions by random amounts along each sample. name is "" if auc exceeds neither
    baseline. present, n: the number of tokens or samples with the candidate, and of all.

    examples: layer, atom, rank, sample, token, value: where the atom is largest. images, contexts:
    the pictures and the texts of these places, as in an atlas.
    """

    KIND = "atom_names"
    MAIN = "names"
    STORED = dict.fromkeys(("names", "examples", "images", "contexts"), first)
    ALONE = "names are chosen on all samples: run ci.circuits.atom_names on all samples at once."

    def finding(self) -> str:
        """Returns how many atoms have a name, by kind of candidate."""
        table: Any = self._table("names")
        kinds = table[table["name"] != ""]["kind"].value_counts()
        words = ", ".join(f"{n:,} {kind}" for kind, n in kinds.items()) or "none"
        return (
            f"{kinds.sum():,} of {len(table):,} atoms of {self.meta['model'] or 'the model'} have "
            f"a name ({words}), over {self.counted_samples()}; about 5 % would by chance."
        )

    def name_of(self, layer: int, atom: int) -> str:
        """Returns the name of an atom with its evidence, or ""."""
        table: Any = self._table("names")
        row = table[(table["layer"] == layer) & (table["atom"] == atom)]
        if row.empty or not row["name"].iloc[0]:
            return ""
        return f"{row['name'].iloc[0]} (AUC {row['auc'].iloc[0]:.2f})"

    def examples(self, layer: int, atom: int) -> list[dict[str, Any]]:
        """Returns the places where an atom is largest: value, words, and the file of a picture.

        words: the text around the token, or the sample and the patch. webp: the patch with what
        lies around it; None for a text and for CLS.
        """
        table: Any = self._table("examples")
        rows = table[(table["layer"] == layer) & (table["atom"] == atom)].sort_values("rank")
        texts: Any = self._table("contexts").set_index(["sample", "token"])
        pictures: Any = self._table("images").set_index("sample")
        found = []
        for row in rows.itertuples():
            patch, file = int(row.token) - int(self.meta["settings"]["special"]), None
            if len(texts):
                here = texts.loc[(row.sample, row.token)]
                words = f"{here['before']}[{here['at']}]{here['after']}"
            elif patch < 0:
                words = f"CLS of sample {row.sample}"
            else:
                picture = pictures.loc[row.sample]
                grid = int(picture["rows"]), int(picture["columns"])
                place = divmod(patch, grid[1])
                words = f"patch {place} of sample {row.sample}"
                file = cut_out(picture["picture"], place, grid)
            found.append({"value": float(row.value), "webp": file, "words": words})
        return found


def cut_out(file: bytes, place: tuple[int, int], grid: tuple[int, int]) -> bytes:
    """Returns a patch of a picture with half a patch around it, as a WebP file."""
    image = decoded(file, "an example").convert("RGB")
    sides = (place[1], image.width / grid[1]), (place[0], image.height / grid[0])
    box = [(start + end) * side for end in (-0.5, 1.5) for start, side in sides]
    cut = image.crop((round(box[0]), round(box[1]), round(box[2]), round(box[3])))
    buffer = io.BytesIO()
    cut.resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(buffer, "WEBP", quality=70)
    return buffer.getvalue()


@with_weights
@in_full_precision
def atom_names(
    model: HookedModel, data: Data, *, seed: int = 0, **run: Unpack[Run]
) -> Perhaps[AtomNames]:
    """Names each atom after what its activation tells on held-out samples, or not at all.

    Candidates for images: the class of the image (by its mean activation), CLS, nine places, and
    patches on an object if the data has masks. For texts: the 40 commonest tokens, the tokens after
    these, sets such as digits or quotation marks, and the first tokens of a window. The score is
    the area under the ROC curve (AUC). Except for places, the position is held fixed; `AtomNames`
    has the rule. A name says what separates best among these candidates, not what an atom is for.

    Args:
        model: A model with codes.
        data: As in `ci.sweep`; tokens are compared one by one on about the first 8,000.
        seed: The seed of the random baselines.
        run: As in `ci.sweep`.

    Raises:
        ValueError: As `ci.sweep` does, for a model without codes, and for fewer than four samples.
    """
    return ask(NamesOfAtoms(seed), model, data, run_options(atom_names, run))


@dataclass(frozen=True)
class NamesOfAtoms(Question):
    """Scores candidate names of each atom."""

    seed: int
    result = AtomNames

    def settled(self, model: HookedModel, samples: Samples) -> "NamesOfAtoms":
        """Refuses invalid requests, and fills in what model and samples decide."""
        check_atoms(model.cfg, "atom_names")
        if model.cfg.kind not in ("vision", "text"):
            raise ValueError("give a model of images or of texts: names need one kind of sample.")
        if samples.n < 4:
            raise ValueError(
                f"the data has {samples.n} samples, and names need four: give more samples."
            )
        return replace(self, seed=checks.count("seed", self.seed, least=0))

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        return {"settings": {"seed": self.seed, "special": special_tokens(model) or 0}}

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        measure = partial(_named, seed=self.seed, progress=run.options.progress)
        masks = bool(getattr(run.samples, "masks", None))
        return (yield Pass("names", measure, AtomNames.STORED, whole=True, masks=masks))


def _named(chunk: Chunk, seed: int, progress: bool) -> Tables:
    """Returns the tables of all layers."""
    samples, layers = chunk.samples, range(len(chunk.model.blocks))
    kept: dict[str, list[list[Tensor]]] = {
        name: [[] for _ in layers] for name in ("means", "codes", "largest")
    }
    inputs, masks, numbers = [], [], []

    def compared(batch: Batch, pos: int) -> int:
        return max(0, -(-_TOKENS // pos) - (batch.start - samples.start))

    def read(layer: int, acts: Any, batch: Batch) -> None:
        code = acts[CODE].detach().float()
        kept["means"][layer].append(code.mean(dim=1).cpu())
        kept["codes"][layer].append(code[: compared(batch, code.shape[1])].cpu())
        kept["largest"][layer].append(_largest(code, batch.start))

    for batch in chunk.batches():
        chunk.measure(batch, [Reading([CODE], read)])
        numbers += range(batch.start - samples.start, batch.last + 1 - samples.start)
        count = compared(batch, kept["codes"][0][0].shape[1])
        inputs.append(batch.inputs[:count].cpu())
        masks += [] if batch.masks is None else [batch.masks[:count]]
    if not numbers:
        return {}
    tokens = [torch.cat(parts) for parts in kept["codes"]]
    if chunk.model.cfg.kind == "text":
        words = [visible(word) for word in answer_names(chunk.model)]
        known = concepts_of_tokens(torch.cat(inputs), words)
    else:
        pictures = torch.cat(masks) if masks else None
        known = concepts_of_patches(chunk.model, len(tokens[0]), tokens[0].shape[1], pictures)
    own = None if samples.labels is None else [samples.labels[n] for n in numbers]
    classes = concepts_of_samples(own, samples.names)
    generator = torch.Generator().manual_seed(seed)
    groups = None if samples.groups is None else np.array(samples.groups)[numbers]
    rows = [
        _of_layer(layer, torch.cat(means), classes, tokens[layer], known, generator, groups)
        for layer, means in enumerate(kept["means"])
    ]
    places = pd.concat([_examples(layer, parts) for layer, parts in enumerate(kept["largest"])])
    found = excerpts(places, chunk.model, samples, progress)
    for column in ("before", "at", "after"):
        found["contexts"][column] = [visible(word) for word in found["contexts"][column]]
    return {"names": pd.concat(rows, ignore_index=True), "examples": places, **found}


def _largest(
    code: Float[Tensor, "batch pos atom"], start: int
) -> Float[Tensor, "place three atom"]:
    """Returns value, sample and token of the largest codes of a batch, for each atom."""
    flat = code.flatten(0, 1)
    values, places = flat.topk(min(EXAMPLES, len(flat)), dim=0)
    pos = code.shape[1]
    return torch.stack([values.double(), start + places // pos, places % pos], dim=1).cpu()


def _examples(layer: int, parts: list[Tensor]) -> pd.DataFrame:
    """Returns the rows of the table "examples" of a layer."""
    every = torch.cat(parts)  # [place, 3, atom]
    best = every[:, 0].topk(min(EXAMPLES, len(every)), dim=0).indices  # [rank, atom]
    value, sample, token = (every[:, part].gather(0, best) for part in range(3))
    ranks, atoms = map(range, best.shape)
    table: Any = every_entry("value", value, layer=[layer], rank=ranks, atom=atoms)
    table = table.assign(sample=sample.long().numpy().ravel(), token=token.long().numpy().ravel())
    return table[table["value"] > 0][["layer", "atom", "rank", "sample", "token", "value"]]


def _of_layer(
    layer: int,
    means: Float[Tensor, "sample atom"],
    classes: list[Concept],
    tokens: Float[Tensor, "compared pos atom"],
    candidates: list[Concept],
    generator: torch.Generator,
    groups: Int[np.ndarray, "sample"] | None = None,
) -> pd.DataFrame:
    """Returns the rows of the table "names" of a layer; groups: those of the samples."""
    ranks = pd.DataFrame(tokens.flatten(1).numpy()).rank().to_numpy()
    at_position = torch.tensor(ranks).reshape(tokens.shape).float()
    held = [(at_position, [one for one in candidates if one[1] != "position"]), (means, classes)]
    table: Any = _best(held, _dealt, generator, groups)
    free = [(tokens, [one for one in candidates if one[1] == "position"])]
    places = _best(free, _shifted, generator, groups)
    table = table.where(table["auc"] > table["null"], places)
    table.loc[~(table["auc"] > table["null"]), ["name", "kind"]] = ""
    table.insert(0, "layer", layer)
    table.insert(1, "atom", range(len(table)))
    return table


def _best(
    sources: list[tuple[Float[Tensor, "_sample *_pos atom"], list[Concept]]],
    disturbed: Callable[[Tensor, torch.Generator], Tensor],
    generator: torch.Generator,
    groups: Int[np.ndarray, "sample"] | None,
) -> pd.DataFrame:
    """Returns the candidate that tells most of each atom: name, kind, auc, null, present, n.

    In each split the best candidate of one half is scored on the other; a group of samples stays on
    one side, if there are several. auc: the mean over splits. null: the 95th percentile of the
    score in a split, over atoms and splits, if candidates are disturbed first.
    """
    every = [candidate for _, candidates in sources for candidate in candidates]
    if not every:
        blank = {"name": "", "kind": "", "auc": 0.5, "null": 0.5, "present": 0, "n": 0}
        return pd.DataFrame(blank, index=range(sources[0][0].shape[-1]))
    there = [
        torch.stack([torch.zeros(values.shape[:-1], dtype=torch.bool), *(on for *_, on in own)])[1:]
        for values, own in sources
    ]
    scores, places, splits = [], [], []
    for values, _ in sources:
        whose = None if groups is None else groups[: len(values)]
        several = whose is not None and len(np.unique(whose)) > 1
        splits.append(halves(len(values), whose if several else None, draws=_SPLITS))
    for split in zip(*splits, strict=True):
        sides = []
        for side in (split, [~half for half in split]):
            parts = []
            for (values, _), known, rows in zip(sources, there, side, strict=True):
                flat = pd.DataFrame(values[rows].flatten(0, -2).numpy())
                ranks = torch.tensor(flat.rank().to_numpy())
                present = known[:, rows]
                both = [present, disturbed(present, generator)]
                parts.append(torch.stack([auc(ranks, one.flatten(1)) for one in both], dim=1))
            sides.append(torch.cat(parts))
        best = sides[0].argmax(dim=0, keepdim=True)
        scores.append(sides[1].gather(0, best)[0])
        places.append(best[0, 0])
    own, null = torch.stack(scores).unbind(dim=1)
    best = [every[place] for place in torch.stack(places).mode(dim=0).values.tolist()]
    table = pd.DataFrame([(name, kind) for name, kind, _ in best], columns=["name", "kind"])
    return table.assign(
        auc=own.mean(dim=0).numpy(),
        null=float(null.quantile(0.95)),
        present=[int(on.sum()) for *_, on in best],
        n=[on.numel() for *_, on in best],
    )


def _dealt(
    present: Bool[Tensor, "concept sample *pos"], generator: torch.Generator
) -> Bool[Tensor, "concept sample *pos"]:
    """Returns what is present in each sample dealt out anew among samples, at the same places."""
    return present[:, torch.randperm(present.shape[1], generator=generator)]


def _shifted(
    present: Bool[Tensor, "concept sample pos"], generator: torch.Generator
) -> Bool[Tensor, "concept sample pos"]:
    """Returns what is present in each sample shifted by a random amount along it."""
    _, samples, pos = present.shape
    shift = torch.randint(pos, (samples, 1), generator=generator)
    order = (torch.arange(pos) + shift) % pos
    return present.gather(2, order.expand(len(present), -1, -1))


def auc(
    ranks: Float[Tensor, "row atom"], present: Bool[Tensor, "concept row"]
) -> Float[Tensor, "concept atom"]:
    """Returns the area under the ROC curve, from mean ranks (from 1) of the activations.

    `(sum of the ranks where present - n1 (n1 + 1) / 2) / (n1 n0)`, in 0 to 1. It is .5 for a
    candidate that is present in fewer than 4 rows, or absent in fewer.
    """
    ones = present.double().sum(dim=1, keepdim=True)
    zeros = present.shape[1] - ones
    area = (present.double() @ ranks - ones * (ones + 1) / 2) / (ones * zeros).clamp_min(1)
    few = (ones < _FEWEST) | (zeros < _FEWEST)
    return torch.where(few, 0.5, area)
