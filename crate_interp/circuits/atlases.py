"""ci.atlas: what every dictionary atom is for: where it fires, what it says, which atoms are like it, what it is needed for."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from crate_hooks import full_name
from crate_interp import checks
from crate_interp.models.norm import HookedLayerNorm
from crate_interp.probes.shared import dictionary
from crate_interp.sweeps.atom_statistics import CODE, AtomResult, atoms
from crate_interp.sweeps.stream import check_model, samples_of

SAID = 3  # classes or tokens, and atoms of other layers, that are named for each atom
_TOKENS = 2**15  # of the copies of one forward, each of which lacks another atom


@dataclass(frozen=True)
class Atlas:
    """What is known of every atom.

    `table`: layer, atom, firing_rate, mean_on, max, energy_share, state (as `ci.atoms`), ablation (nats, NaN where it was not
    measured), raises and lowers (names of classes or tokens), nearest (atoms of other layers) and nearest_cosine. `atoms`: where
    each was largest, `atoms.top(layer, atom)`. `meta`: where it comes from.
    """

    table: pd.DataFrame
    atoms: AtomResult
    meta: dict[str, Any]

    def row(self, layer: int, atom: int) -> dict[str, Any]:
        """What the table says of one atom; ValueError for one there is not."""
        self.atoms.top(layer, atom)
        table: Any = self.table
        return table[(table["layer"] == layer) & (table["atom"] == atom)].iloc[0].to_dict()

    def __repr__(self) -> str:
        table: Any = self.table
        dead = int((table["state"] == "dead").sum())
        return f"Atlas of {self.meta['model'] or 'a model'}: {len(self.table)} atoms, {dead} dead, {self.meta['n_samples']} samples"

    def _repr_html_(self) -> str:
        columns = ["layer", "atom", "firing_rate", "max", "ablation", "raises", "lowers", "nearest"]
        shown: Any = self.table.sort_values("ablation", ascending=False, kind="stable").head(20)[
            columns
        ]
        return shown.to_html(index=False, float_format=lambda value: f"{value:.3g}")


def atlas(
    model: Any,
    data: Any,
    *,
    top: int = 9,
    ablate: int = 2,
    limit: int | None = None,
    batch_size: int = 32,
    progress: bool = True,
) -> Atlas:
    """Statistics, top activations, effect on the logits, nearest atoms and ablation effect of every atom of every layer.

    Statistics and the `top` tokens of each atom: one pass over `data` (`ci.atoms`), memory flat in the number of samples. raises,
    lowers: the classes or tokens whose logit the atom's direction moves most, `<row of W_out, g * w_t>` less the mean over t: the
    direct path alone (a logit lens), which in CRATE and CRATE-LM, where later steps re-code the stream, is exact in the last layer
    only. nearest: by the cosine of columns of D. ablation: the mean Kullback-Leibler divergence, in nats, of what the model
    answers with the atom set to 0 everywhere from what it answers as it is, over the first `ablate` samples (0: not measured).

    Then `ci.viz.atlas_pages(found, model, data, out)` cuts the patches or contexts from the data and writes pages. Raises
    ValueError as `ci.sweep` does, and for models whose layers have no code and no logits (a masked autoencoder, a CLIP).
    """
    check_model(model)
    if model.cfg.kind not in ("vision", "text"):
        raise ValueError(
            "an atlas is of a classifier of images or a language model: this one has no logits."
        )
    if not checks.is_int(ablate) or ablate < 0:
        raise ValueError(f"ablate={ablate!r}: give a whole number of samples, 0 for none.")
    found = atoms(model, data, top=top, limit=limit, batch_size=batch_size, progress=progress)
    table = found.table()
    with torch.no_grad():
        table["ablation"] = _ablations(
            model, data, found, min(ablate, found.meta["n_samples"]), progress
        )
        raises, lowers = _said(model)
        nearest, cosines = _nearest(model)
    table["raises"], table["lowers"], table["nearest"], table["nearest_cosine"] = (
        raises,
        lowers,
        nearest,
        cosines,
    )
    meta = found.meta | {
        "ablate": min(ablate, found.meta["n_samples"]),
        "n_layers": len(model.blocks),
        "kind": model.cfg.kind,
    }
    return Atlas(table, found, meta)


def written(block: Any) -> Float[Tensor, "atom d_model"]:
    """The direction in the stream that each atom writes: a row of W_out, or an axis where the code is the stream."""
    code_is_stream = not hasattr(block.mlp, "W_out")
    return torch.eye(block.mlp.D.shape[1]).to(block.mlp.D) if code_is_stream else block.mlp.W_out


def names_of(model: Any) -> list[str]:
    """What classes or tokens are called."""
    count = model.W_U.shape[1]
    if model.cfg.kind == "text":
        try:
            return [model.to_single_str_token(token) for token in range(count)]
        except ValueError:  # no tokenizer
            return [str(token) for token in range(count)]
    return (
        list(model.cfg.labels)
        if model.cfg.labels is not None
        else [f"class {number}" for number in range(count)]
    )


def _said(model: Any) -> tuple[list[str], list[str]]:
    """The logits that each atom raises and lowers most."""
    names, read = names_of(model), model.W_U
    if isinstance(model.ln_final, HookedLayerNorm):
        read = model.ln_final.weight[:, None] * read
        read = read - read.mean(dim=0, keepdim=True)
    raises, lowers = [], []
    for block in model.blocks:
        moved = written(block) @ read  # [atom, logit]
        moved = moved - moved.mean(dim=1, keepdim=True)
        count = min(SAID, moved.shape[1])
        for sign, texts in ((1, raises), (-1, lowers)):
            best = (sign * moved).topk(count, dim=1)
            for values, places in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                texts.append(
                    ", ".join(
                        f"{names[place]!r} {sign * value:+.2f}"
                        for value, place in zip(values, places, strict=True)
                    )
                )
    return raises, lowers


def _nearest(model: Any) -> tuple[list[str], list[float]]:
    """The atoms of other layers with the largest cosine, by layer and atom."""
    bases = [dictionary(block) for block in model.blocks]
    unit = [
        None if d is None else torch.nn.functional.normalize(d.detach().float(), dim=0)
        for d in bases
    ]
    names: list[str] = []
    cosines: list[float] = []
    for layer, mine in enumerate(unit):
        others = [(other, d) for other, d in enumerate(unit) if other != layer and d is not None]
        if mine is None or not others:
            names += [""] * model.cfg.d_mlp
            cosines += [np.nan] * model.cfg.d_mlp
            continue
        # the best of each layer, so that no table of all pairs is held
        best = [(mine.T @ d).topk(min(SAID, d.shape[1]), dim=1) for _, d in others]
        values = torch.cat([found.values for found in best], dim=1)
        layers = torch.cat(
            [
                torch.full_like(found.indices, other)
                for (other, _), found in zip(others, best, strict=True)
            ],
            dim=1,
        )
        places = torch.cat([found.indices for found in best], dim=1)
        top = values.topk(min(SAID, values.shape[1]), dim=1)
        for row, order in enumerate(top.indices.tolist()):
            names.append(
                ", ".join(
                    f"L{int(layers[row, at])}A{int(places[row, at])} {values[row, at]:.2f}"
                    for at in order
                )
            )
        cosines += top.values[:, 0].tolist()
    return names, cosines


def _ablations(model: Any, data: Any, found: AtomResult, count: int, progress: bool) -> list[float]:
    """Kullback-Leibler divergences by layer and atom; an atom that never fires on these samples changes nothing."""
    width = model.cfg.d_mlp
    if not count:
        return [np.nan] * (width * len(model.blocks))
    inputs = samples_of(model, data, count).read(0, count).to(model.cfg.device)
    layers = range(len(model.blocks))
    names = [full_name(point, layer) for point in (CODE, "hook_resid_post") for layer in layers]
    logits, cache = model.run_with_cache(inputs, names_filter=names)
    before = logits.float().log_softmax(dim=-1)
    changes: list[float] = []
    with tqdm(
        total=width * len(layers), desc="ablations", unit="atom", disable=not progress
    ) as bar:
        for layer in layers:
            code, post = cache[full_name(CODE, layer)], cache[full_name("hook_resid_post", layer)]
            on = (code != 0).flatten(0, 1).any(dim=0)
            lost = torch.zeros(width, dtype=torch.float64)
            for group in on.nonzero().flatten().split(max(1, _TOKENS // (count * code.shape[1]))):
                told = einsum(
                    code[..., group],
                    written(model.blocks[layer])[group],
                    "b n atom, atom d -> atom b n d",
                )
                after = (
                    _rest(model, inputs, layer, (post - told).flatten(0, 1))
                    .float()
                    .log_softmax(dim=-1)
                )
                after = after.unflatten(0, (len(group), count))
                divergence = (before.exp() * (before - after)).sum(
                    dim=-1
                )  # [atom, sample] or [atom, sample, pos]
                lost[group.cpu()] = divergence.flatten(1).mean(dim=1).clamp(min=0).double().cpu()
                bar.update(len(group))
            bar.update(width - int(on.sum()))
            changes += lost.tolist()
    return changes


def _rest(model: Any, inputs: Tensor, layer: int, stream: Tensor) -> Tensor:
    """The logits of copies of the inputs whose stream after a layer is another."""
    if not hasattr(model, "x0_lambdas") or not bool(model.x0_lambdas[layer + 1 :].any()):
        return model(stream, start_at_layer=layer + 1)
    many = inputs.repeat(len(stream) // len(inputs), 1)  # later layers add the embedding again
    return model.run_with_hooks(
        many, fwd_hooks=[(full_name("hook_resid_post", layer), lambda post, hook: stream)]
    )
