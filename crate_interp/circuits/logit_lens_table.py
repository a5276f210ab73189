"""The logit lens as a table: the answers that the unembedding reads from the stream, by layer."""

from typing import Any

import pandas as pd
from torch import Tensor

from crate_interp.circuits.atom_logits import answer_names
from crate_interp.core import checks, safe_text
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.cache import CrateCache
from crate_interp.questions.edited_runs import every_entry
from crate_interp.questions.provenance import model_meta
from crate_interp.results import sample_ranges
from crate_interp.results.result import Result, by


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
            f"({last['probability']:.0%}), which is the likeliest answer from layer "
            f"{0 if others.empty else int(others.max()) + 1} of {last['layer']} on."
        )

    def _shown(self) -> pd.DataFrame:
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

    Probabilities are `softmax(LN(Z^l) W_U + b_U)`, as in TransformerLens' `cache.logit_lens()`.
    sample: the sample's number in the cache. position: the token that is read, in language models
    and in models that pool the mean; other models always read the same token, such as CLS. In CRATE
    and CRATE-LM each layer writes the stream in its own atoms, and the last norm reads only the
    atoms of the last layer, so early rows may mean nothing.

    Raises ValueError for models without logits, and for samples and positions that the cache does
    not have. Raises KeyError if the cache lacks hook_resid_pre.
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
