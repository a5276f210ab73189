"""What every hooked model shares: caching, switches, and the names that TransformerLens reads."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.slice import Slice

from crate_interp import checks
from crate_interp.config import CrateConfig
from crate_interp.config.families import FAMILIES
from crate_interp.models.cache import CrateCache
from crate_interp.models.compiled import CompiledMixin
from crate_interp.models.runtime import follow
from crate_interp.models.sharing import SharedModel

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None

# Points that fire only while a switch of model.cfg is on, and how to switch it on.
GATED = {
    "attn.hook_result": ("use_attn_result", "model.set_use_attn_result(True)"),
    "attn.hook_q_input": ("use_split_qkv_input", "model.set_use_split_qkv_input(True)"),
    "attn.hook_k_input": ("use_split_qkv_input", "model.set_use_split_qkv_input(True)"),
    "attn.hook_v_input": ("use_split_qkv_input", "model.set_use_split_qkv_input(True)"),
}
# [batch, head, query, key]: pos_slice cuts queries
_QUERY_AXIS = ("hook_attn_scores", "hook_pattern")
# [batch, width]; those of patches have no CLS
_NO_POS_AXIS = ("hook_pooled", "hook_features", "hook_mask", "hook_pred")


def own_config(
    cfg: CrateConfig, model: str, kinds: tuple[str, ...], families: tuple[str, ...] | None = None
) -> CrateConfig:
    """Returns a copy of a config for one model, as it follows that model's device and dtype.

    Raises ValueError for a config of another kind or family.
    """
    right = (
        isinstance(cfg, CrateConfig)
        and cfg.kind in kinds
        and not cfg.facts.get("bridged")
        and (families is None or cfg.family in families)
    )
    if not right:
        got = f"family {cfg.family!r}" if isinstance(cfg, CrateConfig) else type(cfg).__name__
        wanted = families or tuple(
            name
            for name, facts in FAMILIES.items()
            if facts["kind"] in kinds and not facts.get("bridged")
        )
        raise ValueError(
            f"{model} takes a CrateConfig of family {' or '.join(map(repr, wanted))}, got {got}."
        )
    return dataclasses.replace(cfg)


def set_runtime(cfg: CrateConfig, **values: bool) -> None:
    """Sets TransformerLens' switches in a model's own config."""
    for name, value in values.items():
        object.__setattr__(cfg, name, value)


def hooked_part(model: object) -> str | None:
    """Returns where the hooked model is in a compiled or parallel one, such as "model._orig_mod".

    Returns "model" for a hooked model, and None where there is none.
    """
    place, inner = "model", model
    while not isinstance(inner, HookedModel):
        name = next((name for name in ("_orig_mod", "module") if hasattr(inner, name)), None)
        if name is None or not isinstance(inner, nn.Module):
            return None
        place, inner = f"{place}.{name}", getattr(inner, name)
    return place


def check_hooked(model: object) -> None:
    """Raises ValueError for anything but a hooked model."""
    if isinstance(model, HookedModel):
        return
    if type(model).__name__ == "TransformerBridge":  # its class takes seconds to import
        raise ValueError(
            "cannot measure a TransformerBridge as it is: give model = ci.from_bridge(bridge)."
        )
    place = hooked_part(model)
    advice = (
        ": give a hooked model, such as ci.load(...) returns."
        if place is None
        else f", which wraps a hooked model: give that one, {place}."
    )
    raise ValueError(f"cannot measure {type(model).__name__}{advice}")


class HookedModel(CompiledMixin, SharedModel):
    """The one base class of the hooked models.

    A subclass has `cfg`, `blocks`, `ln_final`, `unembed` and a forward. unit: what its samples are
    called, "images" or "windows" of tokens. has_cls: whether the first token is CLS. towers: the
    names of the models that a CLIP consists of; a model with towers has no layers of its own.
    """

    cfg: CrateConfig
    blocks: nn.ModuleList
    unembed: Any
    unit: str = "images"
    has_cls: bool = False
    towers: tuple[str, ...] = ()

    @property
    def has_logits(self) -> bool:
        """Whether the forward returns logits, or the features of a CLIP's tower."""
        return self.cfg.kind in ("vision", "text")

    @property
    def full_options(self) -> dict[str, Any]:
        """The keyword arguments of a forward that runs every layer on every token.

        Such a forward computes nothing that is not needed for that.
        """
        return {}

    def fresh(self) -> "HookedModel":
        """Returns the same architecture with its official random initialisation.

        It is drawn from torch's global generator.
        """
        return type(self)(self.cfg)

    def full_forward(self, batch: Tensor) -> None:
        """Runs every layer on every token of a batch, for the hooks on the way.

        A masked autoencoder sees every patch, and a language model computes no logits.
        """
        self(batch, **self.full_options)

    def run_with_cache(  # pyright: ignore[reportIncompatibleMethodOverride]  # as in TransformerLens
        self, *args: Any, remove_batch_dim: bool = False, **kwargs: Any
    ) -> tuple[Any, CrateCache]:
        """Returns `(output, CrateCache)` of one forward; arguments as in TransformerLens.

        Different from it: a `names_filter` that matches no point raises KeyError with the nearest
        names, tuples of names are accepted, and `pos_slice` cuts the declared position axis of
        every point. As there, `incl_bwd=True` calls backward on the output, which must be a scalar:
        use hooks of direction "bwd" around a loss of your own.
        """
        out, cache = super().run_with_cache(*args, remove_batch_dim=remove_batch_dim, **kwargs)
        return out, CrateCache(cache, self, has_batch_dim=not remove_batch_dim)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict, list, list]:
        """Returns the dict to fill and the forward and backward hooks that fill it.

        The hooks are not yet on the model. The signature is TransformerLens'.
        """
        cache = {} if cache is None else cache
        cut = Slice.unwrap(pos_slice)
        pooled = getattr(self.cfg, "pool", None) == "mean"  # then ln_final sees one pooled token

        def save(tensor: Tensor, hook: HookPoint, name: str, suffix: str) -> None:
            # a copy of gradients: autograd goes on adding to what it handed out
            kept = (tensor.detach().clone() if suffix else tensor.detach()).to(device)
            if not name.endswith(_NO_POS_AXIS) and not (pooled and name.startswith("ln_final.")):
                kept = cut.apply(kept, dim=-2 if name.endswith(_QUERY_AXIS) else 1)
            if remove_batch_dim and kept.shape[0] == 1:
                kept = kept[0]
            cache[name + suffix] = kept

        names = self.matching_points(names_filter)
        self.is_caching = True
        # by the name in this model: a tower's hooks carry the names of the larger model
        forward = [(name, partial(save, name=name, suffix="")) for name in names]
        backward = (
            [(name, partial(save, name=name, suffix="_grad")) for name in names] if incl_bwd else []
        )
        return cache, forward, backward

    def matching_points(self, names_filter: NamesFilter) -> list[str]:
        """Returns the hook points that a filter selects, in the model's order.

        None and functions select among the points that fire with the switches as they are. Raises
        KeyError if nothing is selected, and for a name that is not a point or cannot fire.
        """
        firing = [name for name in self.hook_dict if self._why_silent(name) is None]
        if names_filter is None:
            return firing
        if callable(names_filter):
            chosen = [name for name in firing if names_filter(name)]
            if not chosen:
                raise KeyError(
                    f"names_filter matches none of the {len(self.hook_dict)} hook points: see "
                    "model.hook_dict."
                )
            return chosen
        asked = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        if not asked:
            raise KeyError(
                "names_filter is empty: name a hook point, or pass None for all of them."
            )
        for name in asked:
            self.check_point(name)
        return [name for name in self.hook_dict if name in set(asked)]

    def check_point(self, name: str) -> None:
        """Raises KeyError if no hook point has this name, or if it cannot fire as switched."""
        self._check_name(name)
        silent = self._why_silent(name)
        if silent:
            raise KeyError(f"{name!r} {silent}.")

    def _check_name(self, name: str) -> None:
        if name not in self.hook_dict:
            hint = checks.did_you_mean(name, self.hook_dict, "See model.hook_dict.")
            raise KeyError(f"no hook point is called {name!r}. {hint}")

    def _why_silent(self, name: str) -> str | None:
        """Returns why a point does not fire with the switches as they are, or None if it does."""
        for point, (switch, call) in GATED.items():
            if name.endswith(point) and not getattr(self.cfg, switch):
                return f"fires only after {call}"
        if name.endswith("attn.hook_u") and self.cfg.use_split_qkv_input:
            return "does not fire with split inputs: call model.set_use_split_qkv_input(False)"
        return None

    def add_hook(
        self, name: str | Callable[[str], bool], hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Adds a hook as TransformerLens does.

        Raises KeyError for a name that is not a hook point; warns of a hook that would never be
        called.
        """
        self._prepare(name)
        super().add_hook(name, hook, *args, **kwargs)

    def _enable_hook(self, name: str | Callable[[str], bool], hook: Callable, dir: Any) -> None:
        self._prepare(name)  # run_with_hooks and hooks() call this
        super()._enable_hook(name, hook, dir)

    def _prepare(self, name: str | Callable[[str], bool]) -> None:
        """Checks the points that a hook is to be added to.

        A patch that is never called would look like one without effect. That is a warning and not
        an error, since hooking all points is usual. A tower shares its points with the larger
        model: each carries the name by which it was hooked last.
        """
        names = (
            [name] if isinstance(name, str) else [point for point in self.hook_dict if name(point)]
        )
        for point in names:
            self._check_name(point)
            self.hook_dict[point].name = point
        reasons = [self._why_silent(point) for point in names]
        if reasons and all(reasons):
            shown = repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            warnings.warn(f"a hook on {shown} is never called: it {reasons[0]}.", stacklevel=4)

    @property
    def context_level(self) -> int:
        """How many contexts of hooks are open.

        A tower counts together with the larger model, whose points it shares.
        """
        return self.__dict__.setdefault("_levels", [0])[0]

    @context_level.setter
    def context_level(self, level: int) -> None:
        self.__dict__.setdefault("_levels", [0])[0] = level

    def set_use_attn_result(self, on: bool) -> None:
        """Sets whether `attn.hook_result` fires.

        It holds the output of each head on its own, `[batch, pos, head, d_model]`.
        """
        for cfg in self.runtime_configs():
            set_runtime(cfg, use_attn_result=on)

    def set_use_split_qkv_input(self, on: bool) -> None:
        """Sets whether `attn.hook_q_input`, `k` and `v` fire.

        They hold the stream per role and head, `[batch, pos, head, d_model]`.
        """
        for cfg in self.runtime_configs():
            set_runtime(cfg, use_split_qkv_input=on)

    def runtime_configs(self) -> list[CrateConfig]:
        """Returns the configs that follow the model's switches and device, its parts' too."""
        return [self.cfg]

    def _follow(self) -> None:
        """Lets the configs that no part of this model has claimed say its device and dtype."""
        follow(self, *(cfg for cfg in self.runtime_configs() if cfg._runtime is None))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow()  # a copied or unpickled config follows nothing

    def _stacked(self, name: str) -> Tensor:
        return torch.stack([getattr(block.attn, name) for block in self.blocks])

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """The query maps of every layer: the subspace bases U, except in a plain transformer."""
        return self._stacked("W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """The key maps of every layer: U again, except in a plain transformer."""
        return self._stacked("W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """The value maps of every layer: U again, except in a plain transformer."""
        return self._stacked("W_V")

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every layer and head, factored."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every layer and head, factored."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """The dictionaries of every layer; AttributeError if the step is CRATE's ISTA."""
        return torch.stack([cast(Any, block).mlp.W_in for block in self.blocks])

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        """The decoders of every layer; AttributeError for CRATE's ISTA step, which has none."""
        return torch.stack([cast(Any, block).mlp.W_out for block in self.blocks])

    def all_head_labels(self) -> list[str]:
        """Returns "L0H0", "L0H1", ... in the order of TransformerLens' stacks of heads."""
        return [
            f"L{layer}H{head}"
            for layer in range(self.cfg.n_layers)
            for head in range(self.cfg.n_heads)
        ]

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """The output maps of every layer."""
        return self._stacked("W_O")

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """The output biases of every layer, zeros for layers without one."""
        return self._stacked("b_O")

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding: `hook_pooled @ W_U + b_U` are the logits of a vision model."""
        return self.unembed.weight.T

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        """The bias of the unembedding; zeros if it has none."""
        bias = self.unembed.bias
        return self.unembed.weight.new_zeros(self.unembed.weight.shape[0]) if bias is None else bias

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """Returns the sum of output biases before `layer`, `[d_model]`.

        The sparse steps of CRATE have no bias.
        """
        total = self.b_O[: layer + 1 if mlp_input else layer].sum(dim=0)
        if include_mlp_biases and not self.cfg.tied:
            mlps: list[Any] = [block.mlp for block in self.blocks]
            total = total + torch.stack([mlp.b_out for mlp in mlps])[:layer].sum(dim=0)
        return total
