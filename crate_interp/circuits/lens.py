"""The logit lens as a table: what the stream after each layer would answer, if the last norm and the unembedding read it."""

import html
from dataclasses import dataclass
from typing import Any

import pandas as pd

from crate_interp import checks
from crate_interp.circuits.atlases import names_of


@dataclass(frozen=True)
class LogitLens:
    """`table`: layer (layer l: the stream before it, the last row after all), rank, answer, probability.

    A notebook shows a row per layer.
    """

    table: pd.DataFrame
    title: str

    def _repr_html_(self) -> str:
        table: Any = self.table
        rows = []
        for layer, own in table.groupby("layer"):
            cells = "".join(
                f'<td style="text-align: left; background: rgba(60, 120, 220, {row.probability:.2f})">{html.escape(repr(row.answer))} '
                f"{row.probability:.0%}</td>"
                for row in own.itertuples()
            )
            rows.append(f'<tr><th scope="row">{layer}</th>{cells}</tr>')
        return f"<table><caption>{html.escape(self.title)}</caption><tbody>{''.join(rows)}</tbody></table>"


def logit_lens(cache: Any, *, sample: Any = 0, position: Any = -1, count: int = 5) -> LogitLens:
    """The `count` likeliest answers by layer at one token: `softmax(LN(Z^l) W_U + b_U)`, TransformerLens' `cache.logit_lens()`.

    position: of language models; of images it is CLS (or each token where the mean is pooled, and `position` says which). In CRATE
    and CRATE-LM the stream before the last layer is written in other atoms than the last norm reads, so early rows may say
    nothing. Raises ValueError for samples and positions there are not; KeyError for a cache without hook_resid_pre.
    """
    model = getattr(cache, "model", None)
    if model is None or model.cfg.kind not in ("vision", "text"):
        raise ValueError(
            "the logit lens reads the cache of a classifier of images or a language model."
        )
    if not checks.is_int(count) or count < 1:
        raise ValueError(f"count={count!r}: give a whole number of at least 1.")
    n = len(next(iter(cache.values())))
    if not checks.is_int(sample) or not 0 <= sample < n:
        raise ValueError(f"sample={sample!r}: the cache has samples 0 to {n - 1}.")
    if not cache.has_batch_dim:
        raise ValueError(
            "the cache has no batch axis: run_with_cache without remove_batch_dim=True."
        )
    tokens = next(
        (value.shape[1] for name, value in cache.items() if name.endswith("hook_resid_pre")), 0
    )
    if not checks.is_int(position) or (tokens and not -tokens <= position < tokens):
        raise ValueError(f"position={position!r}: the cache has positions 0 to {tokens - 1}.")
    place = model.lens_positions if model.lens_positions is not None else position
    values = cache.logit_lens(positions=place).values[:, sample].float()  # [layer, answer]
    best = values.softmax(dim=-1).topk(min(count, values.shape[-1]), dim=-1)
    names = names_of(model)
    rows = [
        (layer, rank, names[place], value)
        for layer, (values, places) in enumerate(
            zip(best.values.tolist(), best.indices.tolist(), strict=True)
        )
        for rank, (value, place) in enumerate(zip(values, places, strict=True))
    ]
    at = "" if model.lens_positions is not None else f", position {position}"
    title = f"{model.cfg.model_name or model.cfg.family}: logit lens, sample {sample}{at}"
    return LogitLens(pd.DataFrame(rows, columns=["layer", "rank", "answer", "probability"]), title)
