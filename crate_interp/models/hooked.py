"""Features of every hooked model: caching, switches, and the names that TransformerLens reads."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.slice import Slice

from crate_hooks.reading import position_axis
from crate_hooks.threads import owner_of
from crate_interp.config import CrateConfig
from crate_interp.config.families import FAMILIES
from crate_interp.core import checks
from crate_interp.measures.checks import all_finite
from crate_interp.models import hook_aliases, hook_points, runtimes
from crate_interp.models.cache import CrateCache
from crate_interp.models.hook_points import Hooks, NamesFilter, Selector
from crate_interp.models.saving import SharedModel
from crate_interp.models.weights import WeightsMixin, weight_mark


def own_config(
    cfg: CrateConfig, model: str, kinds: tuple[str, ...], families: tuple[str, ...] | None = None
) -> CrateConfig:
    """Returns a copy of a config for one model; the copy reports that model's device and dtype.

    Raises ValueError for a config of a wrong kind or family.
    """
    wanted = families or [name for name in FAMILIES if FAMILIES[name]["kind"] in kinds]
    wanted = [name for name in wanted if not FAMILIES[name].get("bridged")]
    if not isinstance(cfg, CrateConfig) or cfg.family not in wanted:
        got = f"family {cfg.family!r}" if isinstance(cfg, CrateConfig) else type(cfg).__name__
        some = " or ".join(map(repr, wanted))
        raise ValueError(f"{model} takes a CrateConfig of family {some}, got {got}.")
    return dataclasses.replace(cfg)


def hooked_part(model: object) -> str | None:
    """Returns the path to the hooked model inside a wrapper, such as "model._orig_mod".

    Returns "model" for a hooked model itself, and None if there is no hooked model inside.
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
    if type(model).__name__ == "TransformerBridge":  # importing its class takes seconds
        raise ValueError("cannot measure a TransformerBridge: give ci.from_bridge(bridge).")
    place = hooked_part(model) or "a hooked model, such as ci.load(...) returns"
    raise ValueError(f"cannot measure {type(model).__name__}: give {place}.")


def layer_range(n_layers: int, start: int | None, stop: int | None) -> tuple[int, int | None]:
    """Returns the first layer to run and the layer before which to stop; None means the end.

    Negative layers count from the end. Raises ValueError for anything but a whole number, for a
    layer that the model does not have, and for a stop before the start.
    """
    start = checks.layer("start_at_layer", start or 0, n_layers)
    stop = None if stop is None else checks.layer("stop_at_layer", stop, n_layers)
    if stop is not None and stop < start:
        raise ValueError(f"stop_at_layer={stop} lies before start_at_layer={start}.")
    return start, stop


def check_stream(model: "HookedModel", z: Tensor) -> Tensor:
    """Returns a copy of the stream with which a run begins at `start_at_layer`.

    Hooks may write into it, and a cache keeps it. Raises ValueError unless its shape is `[batch,
    pos, d_model]`.
    """
    if z.ndim != 3 or z.shape[2] != model.cfg.d_model:
        wanted = f"[batch, pos, {model.cfg.d_model}]"
        raise ValueError(f"start_at_layer takes the stream {wanted}, got shape {tuple(z.shape)}.")
    return z.clone()


def check_finite(x: Float[Tensor, "batch *any"]) -> None:
    """Raises ValueError if an input holds NaN or Inf; values that cannot be read are not checked.

    They cannot be read while a model is compiled, exported or traced.
    """
    if not runtimes.readable(x):
        return
    bad = ~x.flatten(1).isfinite().all(dim=1)
    if bad.any():
        raise ValueError(
            f"the input holds NaN or Inf in {int(bad.sum())} of {len(bad)} samples, first in "
            f"sample {int(bad.int().argmax())}. Leave these samples out, or repair them."
        )


def _part(name: str) -> Any:
    """Returns an attribute of the class for a submodule, which is else found in the instance alone.

    Since Python 3.12 isinstance of TransformerLens' Protocols passes over torch's __getattr__.
    """
    return property(lambda model: nn.Module.__getattr__(model, name))


class HookedModel(WeightsMixin, hook_points.PointsMixin, runtimes.CompiledMixin, SharedModel):
    """The base class of all hooked models.

    A subclass has `cfg`, `blocks`, `ln_final`, `unembed` and a forward. unit: the name of its
    samples, "images" or "windows" (of tokens). towers: the names of the models that a CLIP consists
    of; a model with towers has no layers besides theirs.
    """

    cfg: CrateConfig
    blocks: nn.ModuleList = _part("blocks")
    ln_final: Any = _part("ln_final")
    unembed: Any
    unit: str = "images"
    towers: tuple[str, ...] = ()

    @property
    def has_cls(self) -> bool:
        """Whether the first token of the stream is CLS."""
        return not self.towers and getattr(self.cfg, "n_special", 0) > 0

    @property
    def has_logits(self) -> bool:
        """Whether the forward returns logits; a CLIP's tower returns features."""
        return self.cfg.kind in ("vision", "text")

    @property
    def full_options(self) -> dict[str, Any]:
        """The arguments with which a forward runs every layer on every token, and no more."""
        return {}

    def fresh(self) -> "HookedModel":
        """Returns a model of the same architecture with its official random initialisation.

        The weights are drawn from torch's global generator.
        """
        return type(self)(self.cfg)

    def full_forward(self, batch: Tensor) -> None:
        """Runs every layer on every token of a batch, so that hooks fire.

        A masked autoencoder sees every patch; a language model does not compute logits.
        """
        self(batch, **self.full_options)

    @overload
    def run_with_cache(
        self, *args: object, return_cache_object: Literal[True] = True, **kwargs: object
    ) -> tuple[Any, CrateCache]: ...
    @overload
    def run_with_cache(
        self, *args: object, return_cache_object: Literal[False], **kwargs: object
    ) -> tuple[Any, dict[str, Tensor]]: ...
    def run_with_cache(  # pyright: ignore  # the arguments are TransformerLens'
        self,
        *args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, CrateCache | dict[str, Tensor]]:
        """Returns the output of one forward and the activations at its hook points.

            logits, cache = model.run_with_cache(images, names_filter="blocks.3.attn.hook_pattern")

        Args:
            args: What the model takes, such as images, tokens or a text.
            return_cache_object: False gives a plain dict of tensors in place of a CrateCache.
            remove_batch_dim: Whether one sample is cached without its batch axis.
            kwargs: TransformerLens' arguments. `names_filter` says which points to cache: a name,
                several names (a list, tuple or set), a function of a name, a compiled regular
                expression, which is searched for anywhere in a name, or None for all points.
                `pos_slice` cuts the declared position axis of every point, unlike in
                TransformerLens. `incl_bwd=True` calls backward on the output, as in
                TransformerLens, so the output must be a scalar. For any other output, use hooks of
                direction "bwd" around a loss of your own.

        Returns:
            `(output, CrateCache)`.

        Raises:
            KeyError: If `names_filter` matches no point, with the nearest names.
        """
        if isinstance(kwargs.get("device"), str):  # TransformerLens' code needs a torch.device
            kwargs["device"] = torch.device(kwargs["device"])
        if kwargs.get("incl_bwd"):
            check_gradients("incl_bwd=True", self)
        floats = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        looked = () if kwargs.get("check") else filter(runtimes.readable, floats)
        if not all(map(all_finite, looked)):
            warnings.warn("the input holds NaN or Inf: no finite answer for those", stacklevel=2)
        out, cache = super().run_with_cache(*args, remove_batch_dim=remove_batch_dim, **kwargs)
        named: Any = cache
        named.mark = weight_mark(self)
        if not return_cache_object:
            return out, cache
        mask = self.real_tokens(*args, **kwargs)
        if mask is not None:
            # a copy, because the caller may reuse the tensor
            mask = Slice.unwrap(kwargs.get("pos_slice")).apply(mask.clone(), dim=1)
            mask = mask[0] if remove_batch_dim else mask
        return out, CrateCache(cache, self, not remove_batch_dim, mask)

    def real_tokens(self, *args: object, **kwargs: object) -> Bool[Tensor, "batch pos"] | None:
        """Returns which tokens of a forward with these arguments are real, or None if all are."""
        return None

    def run_with_hooks(
        self,
        *args: object,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the output of a run with hooks; the arguments are TransformerLens'.

            edit = ci.hooks.edit.zero(heads=2)
            model.run_with_hooks(images, fwd_hooks=[("blocks.0.attn.hook_z", edit)])

        Args:
            args: What the model takes, such as images, tokens or a text.
            fwd_hooks: Pairs of a point and a function `(tensor, hook) -> tensor`. If it returns
                None, the tensor stays as it is.
            bwd_hooks: The same for gradients.
            remove_batch_dim: Whether the hooks see one sample without its batch axis.
            kwargs: What the model's forward takes, and TransformerLens' switches.
        """
        wrap = hook_points.without_batch if remove_batch_dim else lambda hook: hook
        forward: Any = [(name, wrap(hook)) for name, hook in fwd_hooks]
        backward: Any = [(name, wrap(hook)) for name, hook in bwd_hooks]
        return super().run_with_hooks(*args, fwd_hooks=forward, bwd_hooks=backward, **kwargs)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict, list, list]:
        """Returns the dict to fill, and forward and backward hooks that fill it.

        The hooks are not yet on the model. The signature is TransformerLens'.
        """
        cache = hook_aliases.Named() if cache is None else cache
        cut = Slice.unwrap(pos_slice)
        # in these cases ln_final sees one pooled token, or CLS besides the tokens of the stream
        pooled = getattr(self.cfg, "pool", None) == "mean" or getattr(self.cfg, "class_layers", 0)
        whole = () if self.cfg.causal else ("hook_moment", "hook_weight")  # one for all tokens

        def save(tensor: Tensor, hook: HookPoint, name: str, suffix: str) -> None:
            # gradients are copied, because autograd adds to the tensor later
            kept = (tensor.detach().clone() if suffix else tensor.detach()).to(device)
            uncut = name.endswith(whole) or (pooled and name.startswith("ln_final."))
            axis = None if uncut else position_axis(name)
            kept = kept if axis is None else cut.apply(kept, dim=axis)
            if remove_batch_dim and kept.shape[0] == 1:
                kept = kept[0]
            cache[name + suffix] = kept

        names = self.matching_points(names_filter)
        self.is_caching = True
        # under this model's names: in a CLIP the points of a tower have other names
        forward = [(name, partial(save, name=name, suffix="")) for name in names]
        backward = [(name, partial(save, name=name, suffix="_grad")) for name in names]
        return cache, forward, backward if incl_bwd else []

    def add_caching_hooks(self, *args: object, **kwargs: object) -> dict:  # pyright: ignore
        """Adds hooks that fill a dict at each run, until `reset_hooks()`; returns the dict.

        Arguments are those of `get_caching_hooks`.
        """
        cache, forward, backward = self.get_caching_hooks(*args, **kwargs)  # pyright: ignore
        for kind, named in (("fwd", forward), ("bwd", backward)):
            for name, hook in named:
                self.add_hook(name, hook, dir=kind)
        return cache

    def setup(self) -> None:
        """Names the parts and hook points, once the model has been built."""
        super().setup()
        self.hook_dict = hook_aliases.Named(self.hook_dict)

    def add_hook(self, name: str | Selector, hook: Callable, *args: Any, **kwargs: Any) -> None:
        """Adds a hook as TransformerLens does.

        Args:
            name: The name of a point, a function of a name, or a compiled regular expression.
            hook: A function `(tensor, hook) -> tensor`; None leaves the tensor as it is.
            args: TransformerLens' further arguments.
            kwargs: The same by name, such as `dir="bwd"`.

        Raises:
            KeyError: For a name that is not a hook point.
            ValueError: For a point that does not fire with the current switches.
        """
        for point in self.hookable(name):
            super().add_hook(point, hook, *args, **kwargs)

    @contextmanager
    def hooks(self, *args: Any, **kwargs: Any) -> Iterator[Any]:  # pyright: ignore
        """Adds hooks while the context is open; the arguments are TransformerLens'.

        The hooks belong to this thread, like the hooks of run_with_hooks and run_with_cache. Raises
        RuntimeError if another thread has hooks of such a context on the model. A run of another
        thread raises it at the first forward hook.
        """
        with owner_of(self).context(), super().hooks(*args, **kwargs) as model:
            yield model

    def _enable_hook(self, name: str | Selector, hook: Callable, dir: Any) -> None:
        # torch runs backward hooks in threads of its own
        own = owner_of(self).guarded(hook) if dir == "fwd" else hook
        for point in self.hookable(name):  # hooks() calls this method
            super()._enable_hook(point, own, dir)
            on_point = self.hook_dict[point]
            (on_point.fwd_hooks if dir == "fwd" else on_point.bwd_hooks)[-1].user_hook = hook

    def __getattr__(self, name: str) -> Any:
        if name in hook_aliases.REFUSALS:
            raise hook_aliases.refuse(name)
        return super().__getattr__(name)

    @property
    def context_level(self) -> int:
        """The number of open contexts of hooks.

        A CLIP's tower shares the CLIP's count, because it shares the CLIP's points.
        """
        return self.__dict__.setdefault("_levels", [0])[0]

    @context_level.setter
    def context_level(self, level: int) -> None:
        self.__dict__.setdefault("_levels", [0])[0] = level

    def _follow(self) -> None:
        """Makes configs report this model's device, unless they already belong to a tower."""
        for cfg in self.runtime_configs():
            if cfg._runtime is None:
                hook_points.set_runtime(cfg, _runtime=hook_points.Runtime(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._follow()  # a copied or unpickled config has lost its model


def check_gradients(caller: str, model: nn.Module) -> None:
    """Raises ValueError, naming the caller, if inference mode forbids gradients.

    It also forbids gradients through a model that was made or loaded in inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(f"{caller} needs gradients: leave torch.inference_mode().")
    if any(weight.is_inference() for weight in model.parameters()):
        raise ValueError(f"{caller} needs gradients, but the model was made in inference mode.")
