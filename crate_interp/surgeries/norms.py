"""Attention whose queries and keys have other norms, or whose tokens do not see themselves."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from crate_interp import measures
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.attention import PatternAttention
from crate_interp.models.layers.block import CrateBlock
from crate_interp.questions.batches import Chunk
from crate_interp.surgeries.result import LADDER_ONLY
from crate_interp.sweeps.measuring import position_sums
from crate_interp.sweeps.moments import from_bytes

MASKED = "masked_diagonal"
NORMS = ("flat_norms", LADDER_ONLY, "permuted_norms", MASKED)
READS = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_pattern")
MEANS = "mean norms"  # the key under which a step finds the means of its layer, [2, head, pos]


def attention_of_norms(
    name: str,
    seed: int,
    block: CrateBlock,
    acts: Mapping[str, Tensor],
    visible: Bool[Tensor, "pos pos"] | None,
    eps: float,
) -> Float[Tensor, "batch pos d_model"]:
    """Returns what attention writes if its queries and keys keep their directions alone.

    Their norms become, by name: the mean over the sample's tokens (flat_norms), the mean over
    samples at each position (ladder_only), or the norms of the sample in another order of tokens,
    one order for all samples, heads and layers (permuted_norms). With masked_diagonal the norms
    stay, and a token does not see itself, unless it sees nothing else. Values stay. In a language
    model the mean and the order are those of the whole window, so they tell a token of later norms.
    Hooks on the layer's own scores, pattern and z have no part in it. Raises ValueError for padding
    and for tokens of a past.
    """
    _check_tokens(acts[READS[3]])
    q, k, v = (acts[point].transpose(1, 2) for point in READS[:3])  # [batch, head, pos, d_head]
    if name != MASKED:
        means = acts.get(MEANS, (None, None))
        q, k = (
            measures.with_norms(codes, _norms(name, seed, codes, mean))
            for codes, mean in zip((q, k), means, strict=True)
        )
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    count = scores.shape[-1]
    sees = scores.new_ones(count, count, dtype=torch.bool) if visible is None else visible
    if name == MASKED:
        others = sees & ~torch.eye(count, dtype=torch.bool, device=scores.device)
        sees = torch.where(others.any(dim=1, keepdim=True), others, sees)
    z = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1) @ v
    pattern = "batch head pos d_head, head d_head d_model -> batch pos d_model"
    return einsum(z, block.attn.W_O, pattern) + block.attn.b_O


def _check_tokens(pattern: Float[Tensor, "batch head query key"]) -> None:
    if pattern.shape[-2] != pattern.shape[-1]:
        raise ValueError(
            "a cache lacks the norms of earlier tokens: generate with use_past_kv_cache=False."
        )
    if bool((pattern.amax(dim=(1, 2)) == 0).any()):  # a token that even itself does not see
        raise ValueError("norms are those of all tokens, without padding: give one text at a time.")


def no_pattern(block: CrateBlock) -> str:
    """Returns why a block's attention has no norms to exchange, or ""."""
    if isinstance(block.attn, PatternAttention):
        return ""
    return "its attention has no queries and keys"


def _norms(
    name: str, seed: int, codes: Float[Tensor, "batch head pos d_head"], mean: Tensor | None
) -> Float[Tensor, "*batch head pos"]:
    norms = torch.linalg.vector_norm(codes, dim=-1)
    count = norms.shape[-1]
    if name == LADDER_ONLY:
        assert mean is not None  # `ci.surgery` measures it, and `replaced` refuses this step
        return mean[:, :count]
    if name == "permuted_norms":
        order = np.random.default_rng([seed, count]).permutation(count)
        return norms[..., torch.from_numpy(order).to(norms.device)]
    return norms.mean(dim=-1, keepdim=True).expand_as(norms)


def norm_sums(chunk: Chunk) -> dict[str, pd.DataFrame]:
    """Returns the table "norms" of `position_sums`: the norms `[2, head, pos]` of q and k."""

    def norms(acts: Mapping[str, Tensor]) -> Tensor:
        both = torch.stack([acts[point].double() for point in READS[:2]], dim=1)
        return torch.linalg.vector_norm(both, dim=-1).transpose(2, 3)

    return position_sums(chunk, "norms", READS[:2], norms)


def mean_norms(table: pd.DataFrame, model: HookedModel) -> list[Float[Tensor, "two head pos"]]:
    """Returns each layer's mean norms of queries and keys at each position.

    Raises ValueError for samples of several lengths, whose positions are different places.
    """
    if len({*table["pos"]}) > 1:
        raise ValueError(
            f"{LADDER_ONLY!r} takes the mean over samples at each position: give samples of one "
            "length."
        )
    rows = table.sort_values("layer")
    heads, device, dtype = model.cfg.n_heads, model.cfg.device, model.cfg.dtype
    return [
        torch.from_numpy(from_bytes(sums, 2, heads, pos) / n).to(device, dtype)
        for sums, pos, n in zip(rows["sums"], rows["pos"], rows["n"], strict=True)
    ]
