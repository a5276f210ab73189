"""Direct logit attribution: what each head and atom adds to a logit, if the stream is a sum."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from crate_interp.core import checks
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.cache import CrateCache
from crate_interp.models.hook_points import check_read_out
from crate_interp.models.layers.norm import HookedLayerNorm
from crate_interp.questions.provenance import model_meta
from crate_interp.results.result import Result, by

_PARTS = ("embed", "positions", "head", "atom", "bias", "constant")
Target = int | str | Tensor | Sequence[int | str]  # classes or tokens


def _parts(result: Result) -> pd.DataFrame:
    values: Any = result.table("values")
    n = values["sample"].nunique()
    wide = torch.tensor(values["value"].to_numpy().reshape(n, -1)).double()  # [sample, part]
    std = wide.std(dim=0) if n > 1 else torch.full((wide.shape[1],), torch.nan)
    table: Any = values.iloc[: wide.shape[1]][["part", "layer", "number"]]
    table = table.assign(mean=wide.mean(dim=0).numpy(), std=std.numpy())
    return table.sort_values("mean", key=abs, ascending=False, kind="stable").reset_index(drop=True)


class LogitAttribution(Result):
    """What each part of a model adds to a logit, by sample; all parts sum to the logit.

    `table()` has a row per part: part, layer, number, mean, std (both over samples). The row with
    the largest absolute mean comes first. Values are in the unit of the logit (nats) and may be
    negative. `table("values")` has the value of each part for each sample.
    """

    KIND = "logit_attribution"
    MAIN = "parts"
    STORED = {"values": by("sample")}
    DERIVED = {"parts": _parts}

    @property
    def embed(self) -> Float[Tensor, "batch"]:
        """Returns what the embedding adds."""
        return self._of("embed")

    @property
    def positions(self) -> Float[Tensor, "batch"]:
        """Returns what the position embeddings add."""
        return self._of("positions")

    @property
    def heads(self) -> Float[Tensor, "batch layer head"]:
        """Returns what each head adds."""
        return self._of("head")

    @property
    def atoms(self) -> Float[Tensor, "batch layer atom"]:
        """Returns what each atom adds."""
        return self._of("atom")

    @property
    def biases(self) -> Float[Tensor, "batch layer"]:
        """Returns what the biases of each layer's output maps add."""
        return self._of("bias")

    @property
    def constant(self) -> Float[Tensor, "batch"]:
        """Returns the constant that the last norm and the unembedding add."""
        return self._of("constant")

    def total(self) -> Float[Tensor, "batch"]:
        """Returns the sum of all parts: the logit, before a softcap."""
        rows = [self._of(part).flatten(1).sum(dim=1) for part in ("head", "atom", "bias")]
        return torch.stack([self.embed, self.positions, *rows, self.constant]).sum(dim=0)

    def finding(self) -> str:
        """Returns a sentence with the largest part other than the constant, and the whole logit."""
        table: Any = self._table("parts")
        row = table[table["part"] != "constant"].iloc[0]
        where = "" if pd.isna(row["layer"]) else f" of layer {row['layer']}"
        number = "" if pd.isna(row["number"]) else f" {row['number']}"
        target, minus = (self.meta["settings"][key] for key in ("target", "minus"))
        return (
            f"The largest part of the logit of {target}"
            f"{'' if minus is None else f' minus the logit of {minus}'} comes from {row['part']}"
            f"{number}{where}: {row['mean']:+.3f} of {self.total().double().mean():.3f}, mean over "
            f"{self.counted_samples()}."
        )

    def _of(self, part: str) -> Tensor:
        table: Any = self._table("values")
        values = torch.tensor(table[table["part"] == part]["value"].to_numpy())
        n, layers = table["sample"].nunique(), table["layer"].nunique()
        if part in ("head", "atom"):
            return values.view(n, layers, len(values) // (n * layers))
        return values.view(n, layers) if part == "bias" else values


@in_full_precision
def logit_attribution(
    cache: CrateCache, target: Target, *, minus: Target | None = None, position: int = -1
) -> LogitAttribution:
    """Writes the logit of `target` as a sum over embedding, heads, atoms and biases.

    `logit = sum_c <c, g * w_t - mean> / scale + constant`. c: a part's contribution to the stream
    at the token that is read. w_t: the target's column of W_U. g, scale: weight and scale of the
    last norm. mean: the mean of g * w_t over d_model, which only a LayerNorm subtracts. The scale
    is taken from this run and held constant, although every part changes it.

    In nanochat-crate, the residual lambdas of later layers multiply what a layer adds, and every
    layer adds the embedding again; the logit is the one before the softcap. The atoms of
    gpt-baseline are its neurons. TransformerLens' `cache.logit_attrs` differs: it covers only
    heads, and leaves out the lambdas.

    Args:
        cache: The cache of `model.run_with_cache(x)`, with hook_embed, hook_pos_embed, attn.hook_z,
            mlp.hook_post and ln_final.hook_scale.
        target: The number or name of a class or token; or a list of these or a tensor of numbers,
            one for each sample.
        minus: A second target, given in the same ways; then the difference of the two logits is
            attributed.
        position: In language models, the token whose prediction is attributed. Images are read at
            CLS, or at the mean of all tokens.

    Returns:
        What each part adds for each sample, in nats; `total()` is the logit, before a softcap.

    Raises:
        ValueError: In families where the sparse step replaces the stream (crate, crate-mae,
            crate-lm, cbt, tost-ista): there the parts do not add up to the logit, so use
            `ci.circuits.path_patch`. In tost, where class attention comes between. For a target or
            position that does not exist.
        KeyError: For points that were not cached.
    """
    model: Any = getattr(cache, "model", None)
    if model is None or model.cfg.kind not in ("vision", "text"):
        got = type(cache).__name__
        raise ValueError(f"cannot attribute logits from {got}: give model.run_with_cache(x)[1].")
    cache.check_weights()
    if not model.cfg.residual:
        raise ValueError(
            f"in family {model.cfg.family!r} the sparse step replaces the stream, so that parts do "
            "not add up to a logit: use ci.circuits.path_patch or ci.circuits.attribution_patch."
        )
    check_read_out(model.cfg, "a direct attribution")
    direction, constant = _direction(model, target, "target")
    if minus is not None:
        other = _direction(model, minus, "minus")
        direction, constant = direction - other[0], constant - other[1]
    scale = _read(cache, "ln_final.hook_scale", None, position)  # [batch, 1]
    if len(direction) not in (1, len(scale)):
        raise ValueError(f"{len(direction)} targets for {len(scale)} samples: give one for each.")
    parts = _contributions(cache, direction.expand(len(scale), -1) / scale, position)
    parts["constant"] = constant.expand(len(scale))
    settings = {"target": _setting(target), "minus": _setting(minus), "position": int(position)}
    meta = model_meta(model, len(scale)) | {"settings": settings}
    places = [
        (part, *(*place, None, None)[:2])
        for part in _PARTS
        for place in np.ndindex(parts[part].shape[1:])
    ]
    rows = [parts[part].detach().reshape(len(scale), -1).cpu() for part in _PARTS]
    values = torch.cat(rows, dim=1)
    values = values if values.dtype == torch.float64 else values.float()
    table = pd.DataFrame(places * len(scale), columns=["part", "layer", "number"])
    table = table.astype({"layer": "Int64", "number": "Int64"})
    table.insert(0, "sample", np.repeat(np.arange(len(scale)), len(places)))
    return LogitAttribution({"values": table.assign(value=values.flatten().numpy())}, meta)


def _contributions(
    cache: CrateCache, direction: Float[Tensor, "batch d_model"], position: int
) -> dict[str, Tensor]:
    """Returns what each part except the constant adds along a direction, `[batch, ...]`."""
    gains, entry = residual_gains(cache.model)
    heads, atoms, biases = [], [], []
    for layer, block in enumerate(cache.model.blocks):
        pattern = "head d_head d, batch d -> batch head d_head"
        written = einsum(block.attn.W_O, direction, pattern)
        z = _read(cache, "attn.hook_z", layer, position)
        heads.append(gains[layer] * (z * written).sum(dim=-1))
        bias = block.attn.b_O
        if cache.model.cfg.attn_only:
            atoms.append(direction[:, :0])
        else:
            code, bias = _read(cache, "mlp.hook_post", layer, position), bias + block.mlp.b_out
            atoms.append(gains[layer] * code * (direction @ block.mlp.W_out.T))
        biases.append(gains[layer] * (direction @ bias))
    embed = entry * (_read(cache, "hook_embed", None, position) * direction).sum(dim=-1)
    positions = torch.zeros_like(embed)
    if "hook_pos_embed" in cache.model.hook_dict:
        positions = (_read(cache, "hook_pos_embed", None, position) * direction).sum(dim=-1)
    by_layer = {"head": heads, "atom": atoms, "bias": biases}
    stacked = {name: torch.stack(values, dim=1) for name, values in by_layer.items()}
    return {"embed": embed, "positions": positions, **stacked}


def _read(cache: CrateCache, point: str, layer: int | None, position: int) -> Tensor:
    """Returns a point's activation at the token that is read, `[batch, ...]`."""
    activation = cache.at(point, layer)
    cfg = cache.model.cfg
    if cfg.kind == "vision" and cfg.pool == "mean":
        return activation.mean(dim=1)
    if cache.is_padded:
        places = cache.real_places(position).to(activation.device)
        return activation[torch.arange(len(activation), device=activation.device), places]
    place = 0 if cfg.kind == "vision" else position
    if not checks.is_int(place) or not -activation.shape[1] <= place < activation.shape[1]:
        raise ValueError(f"position={position!r}: give a number, 0 to {activation.shape[1] - 1}.")
    return activation[:, place]


def _setting(target: Target | None) -> Any:
    """Returns a target as it is shown in the settings and the headline of a result."""
    if isinstance(target, (list, tuple)) or (isinstance(target, Tensor) and target.ndim):
        return _setting(target[0]) if len(target) == 1 else "each sample's target"
    given: Any = target
    return given if given is None or isinstance(given, str) else int(given)


def _direction(
    model: Any, target: Target, name: str
) -> tuple[Float[Tensor, "target d_model"], Float[Tensor, "target"]]:
    """Returns the derivative of logits in the stream, for a last norm of scale 1, and their value.

    The value is that of a stream of zeros. There is one logit, or one for each sample.
    """
    ids = torch.atleast_1d(model.answer_ids(target, name))
    columns, constant = model.W_U.T[ids], model.b_U[ids]
    bias = getattr(model.ln_final, "bias", None)
    constant = constant if bias is None else constant + columns @ bias
    if not isinstance(model.ln_final, HookedLayerNorm):
        return columns, constant
    columns = columns * model.ln_final.weight
    return columns - columns.mean(dim=-1, keepdim=True), constant


def residual_gains(model: Any) -> tuple[list[Any], Any]:
    """Returns the factors in the final stream: of each layer's output, and of the embedding."""
    count = len(model.blocks)
    if not hasattr(model, "resid_lambdas"):
        return [1.0] * count, 1.0
    entry = torch.ones(()).to(model.resid_lambdas)
    gains = [entry] * count
    for layer in range(count):
        entry = model.resid_lambdas[layer] * entry + model.x0_lambdas[layer]
        gains[layer] = model.resid_lambdas[layer + 1 :].prod()
    return gains, entry
