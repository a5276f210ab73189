"""TransformerLens' activation patching for images: positions are tokens, CLS first, then patches row by row.

The functions have the names of `transformer_lens.patching`, whose positions are columns of the
input: of an image, pixels. Here they are tokens, of texts and of images alike. Sweeps over whole
heads have no positions and are TransformerLens' own.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
from torch import Tensor
from transformer_lens import patching as lens

from crate_interp import checks


def _over_tokens(sweep: partial) -> Callable[..., Any]:
    """A sweep of TransformerLens whose positions are tokens."""
    axes = sweep.keywords["index_axis_names"]
    fixed = {name: value for name, value in sweep.keywords.items() if name != "index_axis_names"}

    def over_tokens(
        model: Any,
        corrupted: Any,
        clean_cache: Any,
        metric: Any,
        *,
        layers: Any = None,
        positions: Any = None,
        **options: Any,
    ) -> Any:
        return run_sweep(
            sweep.func,
            fixed,
            axes,
            model,
            corrupted,
            clean_cache,
            metric,
            layers,
            positions,
            options,
        )

    over_tokens.__doc__ = (
        f"`transformer_lens.patching`'s sweep of {fixed['activation_name']!r} over {', '.join(axes)}, with tokens as positions.\n\n"
        "    Each forward puts what one place held in the clean run into the corrupted one; metric(logits) -> number says what came\n"
        "    of it. layers, positions: only some, in this order; `hooks.edit.patch_positions` numbers the patches of an image. A\n"
        "    tensor with an axis for each of these; other options, such as reduce='none', as in TransformerLens. Raises ValueError\n"
        "    for layers and positions there are not, and a clean run of another number of tokens.\n    "
    )
    return over_tokens


def run_sweep(
    generic: Callable[..., Any],
    fixed: dict[str, Any],
    axes: tuple[str, ...],
    model: Any,
    corrupted: Any,
    clean_cache: Any,
    metric: Any,
    layers: Any,
    positions: Any,
    options: dict[str, Any],
) -> Any:
    """`generic_activation_patch` over a table of all places."""
    count = _tokens(model, corrupted)
    _check_clean(clean_cache, fixed["activation_name"], count)
    ranges = {
        "layer": _chosen("layers", layers, model.cfg.n_layers),
        "pos": _chosen("positions", positions, count),
        "head": list(range(model.cfg.n_heads)),
    }
    ranges |= {
        "head_index": ranges["head"],
        "dest_pos": ranges["pos"],
        "src_pos": list(range(count)),
    }
    places = pd.DataFrame(list(product(*(ranges[axis] for axis in axes))), columns=list(axes))
    found = generic(model, corrupted, clean_cache, metric, **fixed, index_df=places, **options)
    return found.view([len(ranges[axis]) for axis in axes]) if isinstance(found, Tensor) else found


def _tokens(model: Any, inputs: Any) -> int:
    """How many tokens the model makes of its input."""
    kind = model.cfg.kind
    if kind not in ("vision", "text"):
        raise ValueError(
            "patching sweeps run a classifier of images or a language model; of a CLIP give a tower."
        )
    wanted = (
        "images [batch, channels, height, width]" if kind == "vision" else "tokens [batch, pos]"
    )
    if not isinstance(inputs, Tensor) or inputs.ndim != (4 if kind == "vision" else 2):
        got = f"shape {list(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(f"the corrupted input is {got}: give {wanted}, as the clean run had.")
    if kind == "text":
        return inputs.shape[1]
    rows, columns = (
        side // patch for side, patch in zip(inputs.shape[2:], model.cfg.patch_size, strict=True)
    )
    return rows * columns + 1


def _check_clean(cache: Any, activation: str, count: int) -> None:
    ends = ("hook_pattern",) if activation == "pattern" else (f"hook_{activation}",)
    shapes = [value.shape for name, value in cache.items() if name.endswith(ends)]
    if not shapes:
        raise KeyError(
            f"the clean cache has no hook_{activation}: clean_cache = model.run_with_cache(clean)[1]."
        )
    tokens = shapes[0][-1] if activation == "pattern" else shapes[0][1]
    if tokens != count:
        raise ValueError(
            f"the clean run has {tokens} tokens, the corrupted input {count}: give inputs of one size."
        )


def _chosen(name: str, wanted: Any, count: int) -> list[int]:
    if wanted is None:
        return list(range(count))
    values = list(wanted) if isinstance(wanted, (list, tuple, range)) else [wanted]
    if not values or not all(checks.is_int(value) and -count <= value < count for value in values):
        raise ValueError(f"{name}={wanted!r}: give numbers from 0 to {count - 1}, None for all.")
    return [int(value) % count for value in values]


get_act_patch_resid_pre = _over_tokens(lens.get_act_patch_resid_pre)
get_act_patch_resid_mid = _over_tokens(lens.get_act_patch_resid_mid)
get_act_patch_attn_out = _over_tokens(lens.get_act_patch_attn_out)
get_act_patch_mlp_out = _over_tokens(lens.get_act_patch_mlp_out)
get_act_patch_attn_head_out_by_pos = _over_tokens(lens.get_act_patch_attn_head_out_by_pos)
get_act_patch_attn_head_q_by_pos = _over_tokens(lens.get_act_patch_attn_head_q_by_pos)
get_act_patch_attn_head_k_by_pos = _over_tokens(lens.get_act_patch_attn_head_k_by_pos)
get_act_patch_attn_head_v_by_pos = _over_tokens(lens.get_act_patch_attn_head_v_by_pos)
get_act_patch_attn_head_pattern_by_pos = _over_tokens(lens.get_act_patch_attn_head_pattern_by_pos)
get_act_patch_attn_head_pattern_dest_src_pos = _over_tokens(
    lens.get_act_patch_attn_head_pattern_dest_src_pos
)
get_act_patch_attn_head_out_all_pos = lens.get_act_patch_attn_head_out_all_pos
get_act_patch_attn_head_q_all_pos = lens.get_act_patch_attn_head_q_all_pos
get_act_patch_attn_head_k_all_pos = lens.get_act_patch_attn_head_k_all_pos
get_act_patch_attn_head_v_all_pos = lens.get_act_patch_attn_head_v_all_pos
get_act_patch_attn_head_pattern_all_pos = lens.get_act_patch_attn_head_pattern_all_pos
