"""ci.circuits.concentration: how few nodes of the code carry the difference of two answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from crate_hooks import full_name
from crate_interp.circuits.code_swaps_result import NATIVE, PCA, ROTATED, Concentration
from crate_interp.config.families import SQUARE_STEPS
from crate_interp.core import checks
from crate_interp.core.run_options import Run, run_options
from crate_interp.data import Data, Samples
from crate_interp.measures.checks import in_full_precision, qr
from crate_interp.models.hook_points import check_atoms, check_causal
from crate_interp.models.hooked import HookedModel, check_gradients
from crate_interp.models.runtimes import with_weights
from crate_interp.questions import edited_runs
from crate_interp.questions.answers import IGNORED, check_logits, loss_on
from crate_interp.questions.asking import Experiment, Perhaps, ask
from crate_interp.questions.batches import Batch, Chunk, Reading, check_one_length
from crate_interp.questions.edited_runs import every_entry, joined, pieces
from crate_interp.questions.experiment import Pass, Plan, Question, Tables, copies
from crate_interp.questions.untrained_twins import SAMPLES, stacked, twin
from crate_interp.results.result import by
from crate_interp.sweeps.atom_statistics import CODE

_STREAM = "hook_resid_post"
POINTS = {"code": CODE, "stream": _STREAM}
_PCA_SAMPLES = 256  # the principal axes are those of the tokens of the first samples
# the name of a basis -> orthonormal columns `[width, width]`; None stands for the axes themselves
Bases = Mapping[str, Float[Tensor, "d d"] | None]


@with_weights
@in_full_precision
def concentration(
    model: HookedModel,
    data: Data,
    *,
    k: Sequence[int] = (4, 16, 64),
    point: str = "code",
    rotations: int = 4,
    untrained: int = 5,
    **run: Unpack[Run],
) -> Perhaps[Concentration]:
    """Measures how much of the difference of two answers a few nodes of a layer's code carry.

    A node is a (token, coordinate) of the code of one sample. Each sample is paired with a donor:
    the next sample in the data that the model answers otherwise (after the last sample comes the
    first). The answer is the class with the highest logit; for a text, the next token after the
    window; for a text that is read both ways, the token at its masked place, the same place in
    all samples. The gap is the logit of the sample's answer minus that of the donor's answer. At
    each layer the k nodes with the largest first-order effect, minus the gradient of the gap times
    (donor - own), take the donor's values, and the model runs on from there. The share is `sum(gap
    - gap of the swapped run) / sum(gap - gap of the donor)` over pairs: a ratio of sums, so that
    pairs with a small gap cannot upset it. A pair may overshoot. So what nodes carry is `1 - sum
    |gap of the swapped run - gap of the donor| / sum |gap - gap of the donor|`: it is 1 only if
    each pair comes to its donor's gap, and less if a pair stops short or overshoots. Bases are
    compared by what they carry. Several samples may have the same donor; intervals take pairs as
    independent. If all nodes are swapped, the share is 1 where the code is the whole stream. Where
    the code is added to the stream, the share is what passes through the code.

    The same difference is swapped in three bases: native (the atoms themselves, or the neurons of
    an MLP), pca (the principal axes of the layer's tokens, from the first 256 samples) and rotated
    (random orthonormal axes, the same in every layer of one width; `rotations` says how many are
    drawn, with seeds 0, 1, ...). If the code is not a privileged basis, native and rotated axes
    have the same share.

    Args:
        model: A hooked model with logits.
        data: As in `ci.sweep`; of crate-bert `(tokens, labels)`, with one label a sample.
        k: How many nodes to swap: a list of numbers, each measured.
        point: code (mlp.hook_post), or stream (hook_resid_post), whose native axes are those of the
            residual stream. In families whose code is the stream, such as crate, both are the same.
        rotations: How many random rotations to compare with.
        untrained: How many untrained copies (seeds 0, 1, ...) to measure too, on the first 64
            samples with the same pairs and classes. A pair whose gap has the other sign in a copy
            counts with its sign turned.
        run: As in `ci.sweep`. A shard returns None while answers of other shards are missing; run
            it again to continue.

    Returns:
        The shares that k nodes carry in each layer and basis, and their contrasts.

    Raises:
        ValueError: Before work starts, for a model without logits, for an unknown point, for a k
            that is not a list of numbers of at least 1, for fewer than 2 rotations, and under
            torch.inference_mode(), because it needs gradients; before the first swap, if the model
            gives all samples the same answer.
    """
    question = Concentrate(k, point, rotations, untrained)
    return ask(question, model, data, run_options(concentration, run))


@dataclass(frozen=True)
class Concentrate(Question):
    """Swaps the nodes of a code, and measures how far the answers move."""

    k: Sequence[int]
    point: str
    rotations: int
    untrained: int = field(repr=False)
    place: int = field(default=-1, repr=False)  # of the token that is the answer to a text
    result = Concentration

    def settled(self, model: HookedModel, samples: Samples) -> "Concentrate":
        """Refuses invalid requests, and fills in what model and samples decide."""
        if isinstance(self.k, str) or not isinstance(self.k, Sequence) or not self.k:
            raise ValueError(f"k={checks.quote(self.k)}: give a list of numbers of nodes.")
        counts = sorted({checks.count("k", one) for one in self.k})
        checks.one_of("point", self.point, tuple(POINTS))
        checks.count("rotations", self.rotations, least=2)
        checks.count("untrained", self.untrained, least=0)
        if self.point == "code":
            check_atoms(model.cfg, "point='code'")
        check_logits(model, "concentration")
        place = -1 if samples.answers is None else masked_place(samples.answers)
        if samples.answers is None:
            check_causal(model.cfg, "concentration")
        else:
            loss_on(model, samples)  # a causal model takes no labels
        check_gradients("concentration", model)
        check_one_length(samples, "concentration")
        return replace(self, k=counts, place=place)

    def facts(self, model: HookedModel) -> dict[str, Any]:
        """Returns what run.json and meta record of the question."""
        settings = super().facts(model)["settings"] | {"pca_samples": _PCA_SAMPLES}
        return {"settings": settings, "untrained": self.untrained}

    def plan(self, run: Experiment) -> Plan:
        """Yields the passes, and returns the tables of the result."""
        asked = partial(_answers, place=self.place)
        answers = yield Pass("answers", asked, {"answers": by("sample")})
        pairs = with_donors(answers["answers"])
        # a code that is the stream is swapped there, so that the runs begin at the next layer
        point = _STREAM if run.model.cfg.sparse_step in SQUARE_STEPS else POINTS[self.point]
        measure = partial(_of_chunk, point=point, question=self, pairs=pairs)
        own = Pass("swaps", measure, Concentration.OF_A_NETWORK)
        most = run.samples.start + SAMPLES
        twins = copies(own, self.untrained, "untrained", twin, run.samples, most)
        tables, *others = yield [own, *twins]
        for name in ("pairs", "swaps"):
            parts = [other[name] for other in others if name in other]
            tables[f"untrained_{name}"] = stacked(parts, *tables[name])
        return tables


def _answers(chunk: Chunk, place: int) -> Tables:
    """Returns the table "answers": sample, answer."""
    parts: list[pd.DataFrame] = []
    with torch.no_grad():
        for batch in chunk.batches():
            numbers = range(batch.start, batch.last + 1)
            for inputs, own in pieces(chunk.model, batch.inputs, numbers):
                answers = logits_at(chunk.model(inputs), place).argmax(dim=-1)
                parts.append(every_entry("answer", answers.cpu(), sample=own))
    return joined({"answers": parts})


def with_donors(answers: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per sample: sample, donor, answer, donor_answer.

    The donor is the next sample with another answer; after the last sample comes the first. Raises
    ValueError if all answers are the same.
    """
    given, n = answers["answer"].to_numpy(), len(answers)
    ends = np.flatnonzero(given != np.roll(given, -1))  # after these comes another answer
    if not len(ends):
        raise ValueError(f"the model gives all {n} samples the same answer: give more samples.")
    donor = (ends[np.searchsorted(ends, np.arange(n)) % len(ends)] + 1) % n
    donors = {"donor": answers["sample"].to_numpy()[donor], "donor_answer": given[donor]}
    return pd.DataFrame(answers.assign(**donors)[["sample", "donor", "answer", "donor_answer"]])


def _of_chunk(chunk: Chunk, point: str, question: Concentrate, pairs: pd.DataFrame) -> Tables:
    """Returns the tables "pairs", "swaps" and "points". pairs: the table of `with_donors`."""
    if "bases" not in chunk.once:
        first = pairs["sample"].to_numpy()[:_PCA_SAMPLES]
        chunk.once["bases"], chunk.once["points"] = _bases(chunk, point, first, question.rotations)
    known, parts = pairs.set_index("sample", drop=False), {"pairs": [], "swaps": []}
    for batch in chunk.batches():
        for inputs, own in pieces(chunk.model, batch.inputs, range(batch.start, batch.last + 1)):
            rows = known.loc[own].reset_index(drop=True)
            gaps, moved = _of_pairs(chunk, point, question, inputs, rows)
            parts["pairs"].append(rows.assign(**gaps))
            parts["swaps"].append(moved)
    tables = joined(parts)
    return tables | {"points": chunk.once["points"]} if tables else {}


def _bases(
    chunk: Chunk, point: str, first: np.ndarray, rotations: int
) -> tuple[list[Bases], pd.DataFrame]:
    """Returns the bases of each layer, and the table "points": layer, tokens, width, pca_tokens.

    The principal axes are the eigenvectors of the covariance of the tokens of the first samples.
    """
    sums: dict[int, tuple[Any, ...]] = {}  # of tokens in a sample, tokens, values and products

    def add(layer: int, acts: Mapping[str, Tensor], batch: Batch) -> None:
        x = acts[point].flatten(0, 1).double()
        _, n, total, products = sums.get(layer, (0, 0, 0, 0))
        sums[layer] = acts[point].shape[1], n + len(x), total + x.sum(dim=0), products + x.T @ x

    for start in range(0, len(first), chunk.batch_size):
        inputs = _read(chunk, first[start : start + chunk.batch_size])
        chunk.measure(Batch(inputs, int(first[start])), [Reading([point], add)])
    cfg: Any = chunk.model.cfg
    drawn: dict[int, dict[str, Tensor]] = {}
    bases, rows = [], []
    for layer, (tokens, n, total, products) in sorted(sums.items()):
        mean, width = total / n, len(total)
        axes = torch.linalg.eigh(products / n - torch.outer(mean, mean))[1]
        if width not in drawn:
            turns = [rotation(width, seed).to(cfg.device, cfg.dtype) for seed in range(rotations)]
            drawn[width] = {f"{ROTATED}-{seed}": turn for seed, turn in enumerate(turns)}
        bases.append({NATIVE: None, PCA: axes.to(cfg.dtype), **drawn[width]})
        rows.append((layer, tokens, width, n))
    return bases, pd.DataFrame(rows, columns=["layer", "tokens", "width", "pca_tokens"])


def rotation(width: int, seed: int) -> Float[Tensor, "d d"]:
    """Returns random orthonormal columns."""
    generator = torch.Generator().manual_seed(seed)
    return qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]


def _read(chunk: Chunk, numbers: np.ndarray) -> Tensor:
    """Returns samples by their numbers, which need not be neighbours or in the chunk."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    inputs = [chunk.samples.read(int(run[0]), int(run[-1]) + 1) for run in runs]
    return torch.cat(inputs).to(chunk.model.cfg.device)


def _of_pairs(
    chunk: Chunk, point: str, question: Concentrate, inputs: Tensor, rows: pd.DataFrame
) -> tuple[dict[str, np.ndarray], pd.DataFrame]:
    """Returns the gaps of some samples and of their donors, and their rows of the table "swaps".

    Donors are next samples, so at most one donor is not among the samples: one forward gives the
    codes of both.
    """
    model, cfg, n = chunk.model, chunk.model.cfg, len(inputs)
    place, counts = question.place, question.k
    classes = torch.tensor(rows[["answer", "donor_answer"]].to_numpy(), device=cfg.device)
    further = np.setdiff1d(rows["donor"], rows["sample"])
    known = torch.cat([inputs, _read(chunk, further)]) if len(further) else inputs
    donors = pd.Index([*rows["sample"], *further]).get_indexer(rows["donor"].to_numpy())
    streams: list[Tensor] = []

    def note(stream: Tensor, hook: Any) -> None:
        streams.append(stream.detach()[:n])

    names, layers = [full_name(point, layer) for layer in range(cfg.n_layers)], range(cfg.n_layers)
    notes = [(full_name("hook_resid_pre", layer), note) for layer in layers]
    with torch.enable_grad():
        logits, codes = edited_runs.with_gradients(model, known, names, notes)
        gap = _gap(logits[:n], classes, place)
        gradients = torch.autograd.grad(gap.sum(), [*codes.values()])
    gap, moved = gap.detach(), []
    with torch.no_grad():
        donor_gap = _gap(logits[donors], classes, place)
        towards = (gap - donor_gap).sign()[:, None, None]
        for layer, name in enumerate(names):
            code, down = codes[name], -gradients[layer][:n] * towards.to(codes[name].dtype)
            for axes in chunk.once["bases"][layer].values():
                for value in swaps(code[:n], code[donors], down, axes, counts):
                    if point == _STREAM:
                        logits = edited_runs.after_layer(model, layer, value, inputs)
                    else:
                        put = (name, lambda acts, hook, value=value: value)
                        logits = edited_runs.from_layer(model, layer, streams[layer], inputs, [put])
                    moved.append((gap - _gap(logits, classes, place)).cpu().numpy())
    gaps = {"gap": gap.cpu().numpy(), "donor_gap": donor_gap.cpu().numpy()}
    basis = [*chunk.once["bases"][0]]
    values = np.stack(moved, axis=1)
    numbers = rows["sample"].tolist()
    return gaps, every_entry("moved", values, sample=numbers, layer=layers, basis=basis, k=counts)


def masked_place(answers: Int[Tensor, "n pos"]) -> int:
    """Returns the place of the labels; raises ValueError unless all samples have one, the same."""
    places = (answers != IGNORED).nonzero()[:, 1]
    if len(places) != len(answers) or len(places.unique()) != 1:
        raise ValueError("concentration swaps token by token: mask one place, the same in all.")
    return int(places[0])


def logits_at(
    logits: Float[Tensor, "batch *pos classes"], place: int = -1
) -> Float[Tensor, "batch classes"]:
    """Returns the logits of the answers; place: the token of a window at which they are read."""
    return logits if logits.ndim == 2 else logits[:, place]


def _gap(logits: Tensor, classes: Int[Tensor, "batch 2"], place: int) -> Float[Tensor, "batch"]:
    """Returns the logit of the own answer minus that of the donor's answer."""
    both = logits_at(logits, place).double().gather(1, classes)
    return both[:, 0] - both[:, 1]


def swaps(
    tokens: Float[Tensor, "batch pos d"],
    donor: Float[Tensor, "batch pos d"],
    down: Float[Tensor, "batch pos d"],
    axes: Float[Tensor, "d d"] | None,
    counts: Sequence[int],
) -> Iterator[Float[Tensor, "batch pos d"]]:
    """Yields `tokens` with its k best nodes swapped for those of the donor, for each k in counts.

    axes: an orthonormal basis, one axis a column; None means the axes as they are. down: minus the
    gradient of the gap: `down * (donor - tokens)` is how far a node moves it, to first order.
    """
    change = donor - tokens
    if axes is not None:
        change, down = change @ axes, down @ axes
    best = (down * change).flatten(1).argsort(dim=1, descending=True, stable=True)
    for k in counts:
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best[:, :k], True)
        chosen = chosen.view_as(change)
        if axes is None:
            yield torch.where(chosen, donor, tokens)
        else:
            yield tokens + (change * chosen) @ axes.T
