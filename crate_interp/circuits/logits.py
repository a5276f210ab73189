"""Logits by layer: the logit lens, the logits that an atom moves, and its nearest atoms."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from crate_interp.circuits import atom_effects
from crate_interp.circuits.attribution import residual_gains
from crate_interp.core import checks, safe_text
from crate_interp.data import Samples
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.norm import HookedLayerNorm
from crate_interp.probes.layer_reading import dictionary
from crate_interp.questions.edited_runs import every_entry, pieces, with_gradients
from crate_interp.questions.provenance import model_meta
from crate_interp.results import sample_ranges
from crate_interp.results.result import Result, by
from crate_interp.stats.intervals import interval_of_sums, signs

NAMED = 3  # how many classes or tokens, and how many near atoms, are listed for each atom
# each logit takes its own backward: with more than MANY, the model's FEW most frequent answers
MANY, FEW = 16, 8
COLUMNS = ["layer", "atom", "logit", "name", "n", "total", "squares"]


def answer_names(model: HookedModel) -> list[str]:
    """Returns the names of a model's classes, or the strings of its tokens; long ones are cut."""
    numbers = range(model.W_U.shape[1])
    if model.cfg.kind == "text":
        try:
            names = [model.to_single_str_token(token) for token in numbers]
        except ValueError:  # there is no tokenizer
            names = [str(token) for token in numbers]
    else:
        names = model.cfg.labels or [f"class {number}" for number in numbers]
    return [name[: safe_text.LONGEST] for name in names]


def directions(model: HookedModel) -> pd.DataFrame:
    """Returns a row per layer and atom: layer, atom, raises, lowers, nearest, nearest_cosine.

    raises, lowers: the classes or tokens whose logit the atom's direction moves most on the direct
    path. Logit t moves by `gain <row of W_out, g * w_t>` less the mean over t, for a code of 1 and
    a final norm of scale 1. gain: the factor of nanochat's residual lambdas. g: the final norm's
    weight. w_t: the column of W_U. raises and lowers are "" if sparse steps replace the stream
    (`cfg.residual` is False), because then no direct path leads from a layer to the logits.
    nearest: the atoms of other layers whose columns of D have the largest cosine with the atom's.
    """
    layers, width = len(model.blocks), model.cfg.d_mlp
    raises, lowers = _logits(model) if model.cfg.residual else ([""] * layers * width,) * 2
    nearest, cosines = _nearest(model)
    table = every_entry("raises", raises, layer=range(layers), atom=range(width))
    return table.assign(lowers=lowers, nearest=nearest, nearest_cosine=cosines)


def _logits(model: Any) -> tuple[list[str], list[str]]:
    """Returns the names of the logits that each atom raises most and lowers most."""
    names, read = np.array(answer_names(model), dtype=object), model.W_U
    if isinstance(model.ln_final, HookedLayerNorm):
        read = model.ln_final.weight[:, None] * read
        read = read - read.mean(dim=0, keepdim=True)
    raises, lowers = [], []
    for block, gain in zip(model.blocks, residual_gains(model)[0], strict=True):
        moved = gain * block.mlp.written() @ read  # [atom, logit]
        moved = moved - moved.mean(dim=1, keepdim=True)
        for largest, texts in ((True, raises), (False, lowers)):
            best = moved.topk(min(NAMED, moved.shape[1]), dim=1, largest=largest)
            for values, places in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                pairs = zip(names[places], values, strict=True)
                texts.append(", ".join(f"{name!r} {value:+.2g}" for name, value in pairs))
    return raises, lowers


def _nearest(model: Any) -> tuple[list[str], list[float]]:
    """Returns, for each atom, the nearest atoms of other layers as text, and the largest cosine."""
    bases, width = [dictionary(block) for block in model.blocks], model.cfg.d_mlp
    unit = [None if d is None else F.normalize(d.detach().float(), dim=0) for d in bases]
    names: list[str] = []
    cosines: list[float] = []
    for layer, mine in enumerate(unit):
        others = [(other, d) for other, d in enumerate(unit) if other != layer and d is not None]
        if mine is None or not others:
            names += [""] * width
            cosines += [np.nan] * width
            continue
        # the nearest of each layer are found first, so that memory never holds all pairs of atoms
        best = [(other * width, (mine.T @ d).topk(min(NAMED, width), dim=1)) for other, d in others]
        values = torch.cat([top.values for _, top in best], dim=1)
        places = torch.cat([start + top.indices for start, top in best], dim=1)
        top = values.topk(min(NAMED, values.shape[1]), dim=1)
        numbers = places.gather(1, top.indices).tolist()
        for atoms, near in zip(numbers, top.values.tolist(), strict=True):
            pairs = zip(atoms, near, strict=True)
            words = [f"L{atom // width}A{atom % width} {value:.2f}" for atom, value in pairs]
            names.append(", ".join(words))
        cosines += top.values[:, 0].tolist()
    return names, cosines


def logit_effects(
    model: HookedModel, inputs: Tensor | None, numbers: Sequence[int], samples: Samples
) -> pd.DataFrame:
    """Returns a row per layer, atom and logit: layer, atom, logit, name, n, total, squares.

    total, squares: the sums over samples of `sum_t z_tj d logit / d z_tj` and of its square, with
    z_tj the code of atom j at token t. Here `logit` is the logit less the mean of all logits; for
    text, it is averaged over tokens. A positive sum means that the atom raises the logit, to first
    order. Each logit takes its own backward. So if there are more than 16 classes or tokens, only
    the 8 that the model answers most often on these samples are measured. The table is empty
    without inputs. numbers: those of the inputs among the samples. For samples with groups it
    also has the columns of `stats.contrasts.columns_of_sums`.
    """
    if inputs is None:
        return pd.DataFrame({name: [] for name in COLUMNS})
    count = model.W_U.shape[1]
    chosen, sums = torch.arange(count), atom_effects.EffectSums(samples)
    if count > MANY:
        answers = torch.zeros(count, dtype=torch.long)
        with torch.no_grad():
            for piece, _ in pieces(model, inputs, numbers):
                answers += model(piece).argmax(dim=-1).flatten().cpu().bincount(minlength=count)
        chosen = answers.topk(FEW).indices.sort().values
    for piece, own in pieces(model, inputs, numbers):
        with torch.enable_grad():
            logits, codes = with_gradients(model, piece, atom_effects.code_points(model))
            centred = logits - logits.mean(dim=-1, keepdim=True)
            centred = centred.mean(dim=1) if centred.ndim == 3 else centred
            effects = [
                atom_effects.code_times_gradient(centred[:, place].sum(), codes.values(), True)
                for place in chosen
            ]
        sums.add(torch.stack(effects, dim=1), own)  # [batch, logit, layer, atom]
    table: Any = sums.table("logit", "layer", "atom", n=len(inputs))
    names = np.array(answer_names(model), dtype=object)
    logit = chosen.numpy()[table["logit"]]
    return table.assign(logit=logit, name=names[logit])[[*COLUMNS, *table.columns[6:]]]


def named(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per layer and atom: layer, atom, raises, lowers.

    raises, lowers: the names of up to three logits whose interval excludes 0, each with its mean
    effect and its 95 % interval.
    """
    mean, low, high = interval_of_sums(table)
    known: Any = table.assign(mean=mean, low=low, high=high)
    clear = known[signs(low, high) != 0]
    keys = ["layer", "atom"]
    every = known[keys].drop_duplicates().sort_values(keys, ignore_index=True)
    for word, ascending in (("raises", False), ("lowers", True)):
        side = clear[(clear["mean"] > 0) != ascending]
        side = side.sort_values([*keys, "mean"], ascending=[True, True, ascending])
        side = side.groupby(keys).head(NAMED)
        texts = [
            f"{row.name!r} {row.mean:+.2g} ({row.low:+.2g} to {row.high:+.2g})"
            for row in side[["name", "mean", "low", "high"]].itertuples(index=False)
        ]
        texts = pd.Series(texts, index=side.index, dtype=str)  # text type even for an empty table
        joined = side[keys].assign(**{word: texts}).groupby(keys)[word].agg(", ".join)
        every = every.merge(joined.reset_index(), on=keys, how="left")
    return every.fillna({"raises": "", "lowers": ""})


class LogitLens(Result):
    """The likeliest answers if the last norm and the unembedding read the stream at each layer.

    `table()` has a row per sample, layer and rank: sample, layer, rank (from 0), answer,
    probability. Rows of layer l read the stream before layer l, those of layer n_layers the final
    stream.
    """

    KIND = "logit_lens"
    MAIN = "answers"
    STORED = {"answers": by("sample", "layer", "rank")}

    def finding(self) -> str:
        """Returns the first sample's answer, and the layer from which on it is the likeliest."""
        table: Any = self._table("answers")
        own = table[(table["sample"] == table["sample"].min()) & (table["rank"] == 0)]
        last = own.iloc[-1]
        others = own[own["answer"] != last["answer"]]["layer"]
        name = safe_text.plain(self.meta["model"] or "the model")
        return (
            f"For sample {last['sample']} {name} answers {last['answer']!r} "
            f"({100 * last['probability']:.0f}\u00a0%). It is the likeliest answer from layer "
            f"{0 if others.empty else int(others.max()) + 1} of {last['layer']} on."
        )

    def _notebook_table(self) -> pd.DataFrame:
        """Returns the first sample's answers, a row per layer."""
        table: Any = self._table("answers")
        own = table[table["sample"] == table["sample"].min()]
        words = own["answer"].map(repr) + own["probability"].map(" {:.0%}".format)
        shown = own.assign(answer=words).pivot(index="layer", columns="rank", values="answer")
        return shown.reset_index().rename(columns=str)


@in_full_precision
def logit_lens(
    cache: CrateCache, *, sample: int = 0, position: int = -1, count: int = 5
) -> LogitLens:
    """Returns the `count` likeliest answers by layer at one token of a sample.

    Probabilities are `softmax(LN(Z^l) W_U + b_U)`, as in TransformerLens' `cache.logit_lens()`. In
    CRATE and CRATE-LM each layer writes the stream in its own atoms, and the last norm reads only
    the atoms of the last layer, so early rows may mean nothing.

    Args:
        cache: From `model.run_with_cache(x)`, with hook_resid_pre.
        sample: The sample's number in the cache.
        position: The token that is read, in language models and in models that pool the mean; other
            models always read the same token, such as CLS.
        count: How many answers.

    Raises:
        ValueError: For models without logits, and for samples and positions that the cache does not
            have.
        KeyError: If the cache lacks hook_resid_pre.
    """
    model = getattr(cache, "model", None)
    if model is None or not model.has_logits:
        raise ValueError("the logit lens needs the cache of a model with logits.")
    checks.count("count", count)
    n = len(cache.at("hook_resid_pre", 0))
    if not checks.is_int(sample) or not 0 <= sample < n:
        raise ValueError(f"sample={sample!r}: the cache has samples 0 to {n - 1}.")
    row = int(sample)
    if cache.is_padded:
        cache, row = cache.alone(row), 0
    tokens = cache.at("hook_resid_pre", 0).shape[1]
    if not checks.is_int(position) or not -tokens <= position < tokens:
        raise ValueError(f"position={position!r}: the sample has positions 0 to {tokens - 1}.")
    fixed = model.lens_positions is not None
    place = model.lens_positions if fixed else position
    values: Tensor = cache.logit_lens(positions=place).values[:, row].float()  # [layer, answer]
    best = values.softmax(dim=-1).topk(min(count, values.shape[-1]), dim=-1)
    layers, ranks = map(range, best.values.shape)
    shares = best.values.detach().double().cpu()
    table = every_entry("probability", shares, sample=[int(sample)], layer=layers, rank=ranks)
    names = answer_names(model)
    table.insert(3, "answer", [names[number] for number in best.indices.flatten().tolist()])
    settings = {"position": None if fixed else int(position), "count": int(count)}
    meta = model_meta(model, 1) | {"settings": settings}
    meta["data"] = sample_ranges.of(None, int(sample), int(sample) + 1)
    return LogitLens({"answers": table}, meta)
