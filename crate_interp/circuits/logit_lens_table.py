"""The logit lens as a table: the answers that the unembedding reads from the stream, by layer."""

from typing import Any

import pandas as pd
from torch import Tensor

from crate_interp.circuits.atlases.atom_logits import answer_names
from crate_interp.core import checks, safe_text
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.cache import CrateCache
from crate_interp.questions.provenance import model_meta
from crate_interp.results import sample_ranges
from crate_interp.results.result import Result, by

_COLUMNS = ["sample", "layer", "rank", "answer", "probability"]


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
        others = own[own["answer"] != last["answer"]]
        since = 0 if others.empty else int(others["layer"].max()) + 1
        where = "after the last layer" if since == last["layer"] else f"from layer {since} on"
        name = safe_text.plain(self.meta["model"] or "the model")
        answer = f"{last['answer']!r} ({last['probability']:.0%})"
        return (
            f"For sample {last['sample']} {name} answers {answer}, "
            f"which is the likeliest answer {where}."
        )

    def _repr_html_(self) -> str:
        table: Any = self._table("answers")
        sample = int(table["sample"].min())
        own = table[table["sample"] == sample]
        rows = []
        by_layer: Any = own.groupby("layer")
        for layer, answers in by_layer:
            cells = f'<th scope="row">{int(layer)}</th>'
            for row in answers.itertuples():
                colour = f"rgba(60, 120, 220, {row.probability:.2f})"
                words = f"{safe_text.in_html(repr(row.answer))} {row.probability:.0%}"
                cells += f'<td style="text-align: left; background: {colour}">{words}</td>'
            rows.append(f"<tr>{cells}</tr>")
        settings = self.meta["settings"]
        at = "" if settings["position"] is None else f", position {settings['position']}"
        name = self.meta["model"] or self.meta["config"]["family"]
        caption = safe_text.in_html(f"{name}: logit lens, sample {sample}{at}")
        body = f"<caption>{caption}</caption><tbody>{''.join(rows)}</tbody>"
        return safe_text.notebook_view(self._words(), f"<table>{body}</table>")


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
        raise ValueError(
            "the logit lens needs the cache of a classifier of images or a language model: "
            "use model.run_with_cache(x)[1]."
        )
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
    names = answer_names(model)
    layers = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    rows = [
        (int(sample), layer, rank, names[answer], value)
        for layer, (shares, answers) in enumerate(layers)
        for rank, (value, answer) in enumerate(zip(shares, answers, strict=True))
    ]
    settings = {"position": None if fixed else int(position), "count": int(count)}
    meta = model_meta(model, 1) | {"settings": settings}
    meta["data"] = sample_ranges.of(None, int(sample), int(sample) + 1)
    return LogitLens({"answers": pd.DataFrame(rows, columns=_COLUMNS)}, meta)
