"""TransformerLens' activation patching, with tokens as positions: CLS, then patches row by row.

The functions have the same names as in `transformer_lens.patching`. There, positions are columns of
the input (pixels, for an image); here they are tokens, for texts and images alike. The sweeps over
heads at all positions at once are TransformerLens' own functions, after a check of the cache.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import product
from typing import Any

import pandas as pd
from torch import Tensor
from transformer_lens import patching as lens

from crate_interp.circuits.patching_arguments import Metric
from crate_interp.core import checks
from crate_interp.measures.checks import in_full_precision
from crate_interp.models.cache import CrateCache
from crate_interp.models.hooked import HookedModel
from crate_interp.models.weight_cache import check_mark

Numbers = int | Sequence[int] | None  # numbers of layers or positions; None means all

_DOC = """Patches {point!r} over {axes}, with tokens as positions.

    This is `transformer_lens.patching`'s sweep: each forward runs the corrupted input, with the
    activation at one place taken from the clean run, and metric(logits) -> number measures the
    result. Returns a tensor with an axis for each of {axes}. layers, positions: which to patch, in
    the order given; None means all. `hooks.edit.patch_positions` numbers the patches of an image.
    Other options, such as reduce='none', work as in TransformerLens.

    Raises ValueError for layers and positions that the model does not have, for a clean run with
    another number of tokens, and for a cache of another model: to patch from another model, give
    dict(cache). Raises KeyError if the clean cache lacks the point.
    """


def _over_tokens(sweep: partial) -> Callable[..., Any]:
    """Returns a sweep of TransformerLens with tokens as positions."""
    axes = sweep.keywords["index_axis_names"]
    fixed = {name: value for name, value in sweep.keywords.items() if name != "index_axis_names"}

    @in_full_precision
    def over_tokens(
        model: HookedModel,
        corrupted: Tensor,
        clean_cache: CrateCache,
        metric: Metric | Mapping[str, Metric],
        *,
        layers: Numbers = None,
        positions: Numbers = None,
        **options: Any,
    ) -> Tensor | lens.PatchingResult:
        count = _tokens(model, corrupted)
        _check_clean(clean_cache, fixed["activation_name"], count)
        check_mark(getattr(clean_cache, "mark", None), model)
        numbers = _numbers(model, layers, positions, count)
        places = pd.DataFrame(list(product(*(numbers[axis] for axis in axes))), columns=list(axes))
        values = sweep.func(
            model, corrupted, clean_cache, metric, **fixed, index_df=places, **options
        )
        sides = [len(numbers[axis]) for axis in axes]
        return values.view(sides) if isinstance(values, Tensor) else values

    over_tokens.__doc__ = _DOC.format(point=fixed["activation_name"], axes=", ".join(axes))
    return over_tokens


def _over_heads(sweep: partial) -> Callable[..., Any]:
    """Returns a sweep of TransformerLens that refuses the cache of another model."""

    @in_full_precision
    @wraps(sweep)
    def over_heads(
        model: HookedModel, corrupted_tokens: Tensor, clean_cache: Any, *args: Any, **options: Any
    ) -> Any:
        check_mark(getattr(clean_cache, "mark", None), model)
        return sweep(model, corrupted_tokens, clean_cache, *args, **options)

    return over_heads


def _numbers(
    model: HookedModel, layers: Numbers, positions: Numbers, count: int
) -> dict[str, list[int]]:
    """Returns the numbers that each axis of a sweep runs over, by TransformerLens' axis names."""
    places = _chosen("positions", positions, count)
    heads = list(range(model.cfg.n_heads))
    return {
        "layer": _chosen("layers", layers, model.cfg.n_layers),
        "pos": places,
        "dest_pos": places,
        "src_pos": list(range(count)),
        "head": heads,
        "head_index": heads,
    }


def _tokens(model: HookedModel, inputs: Tensor) -> int:
    """Returns how many tokens the model makes from its input."""
    kind = model.cfg.kind
    if kind not in ("vision", "text"):
        raise ValueError(
            "patching needs a classifier of images or a language model: "
            "instead of a CLIP, give one tower, model.visual or model.text."
        )
    axes = ["batch", "channels", "height", "width"] if kind == "vision" else ["batch", "pos"]
    if not isinstance(inputs, Tensor) or inputs.ndim != len(axes):
        got = f"shape {list(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        what = "images" if kind == "vision" else "tokens"
        raise ValueError(
            f"the corrupted input is {got}: give {what} [{', '.join(axes)}], as in the clean run."
        )
    if kind == "text":
        return inputs.shape[1]
    sides = zip(inputs.shape[2:], model.cfg.patch_size, strict=True)
    rows, columns = (side // patch for side, patch in sides)
    return rows * columns + 1


def _check_clean(cache: CrateCache, activation: str, count: int) -> None:
    if isinstance(cache, CrateCache):
        cache.refuse_padding("patching")
    shapes = [value.shape for name, value in cache.items() if name.endswith(f"hook_{activation}")]
    if not shapes:
        raise KeyError(f"clean_cache has no hook_{activation}: use model.run_with_cache(clean)[1].")
    tokens = shapes[0][-1] if activation == "pattern" else shapes[0][1]
    if tokens != count:
        raise ValueError(
            f"the clean run has {tokens} tokens, the corrupted input {count}: give inputs of one "
            "size."
        )


def _chosen(name: str, wanted: Numbers, count: int) -> list[int]:
    if wanted is None:
        return list(range(count))
    values: Any = wanted if isinstance(wanted, (list, tuple, range)) else [wanted]
    if not values or not all(checks.is_int(value) and -count <= value < count for value in values):
        raise ValueError(f"{name}={wanted!r}: give numbers from 0 to {count - 1}, or None for all.")
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
get_act_patch_attn_head_out_all_pos = _over_heads(lens.get_act_patch_attn_head_out_all_pos)
get_act_patch_attn_head_q_all_pos = _over_heads(lens.get_act_patch_attn_head_q_all_pos)
get_act_patch_attn_head_k_all_pos = _over_heads(lens.get_act_patch_attn_head_k_all_pos)
get_act_patch_attn_head_v_all_pos = _over_heads(lens.get_act_patch_attn_head_v_all_pos)
get_act_patch_attn_head_pattern_all_pos = _over_heads(lens.get_act_patch_attn_head_pattern_all_pos)
