"""The activations of one forward: TransformerLens' cache, adapted to CRATE models."""

import re
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities.slice import Slice

from crate_hooks import full_name
from crate_hooks.reading import position_axis
from crate_interp.core import checks
from crate_interp.models.hook_aliases import REFUSALS, refuse, resolve
from crate_interp.models.hook_points import check_atoms, check_linear, check_read_out
from crate_interp.models.layers.norm import NoNorm
from crate_interp.models.weights import Answers, Mark, check_mark

Method = TypeVar("Method", bound=Callable[..., Any])
_NEURONS = ("stack_neuron_results", "get_full_resid_decomposition")
_PATTERNS = ("hook_attn_scores", "hook_pattern")  # [batch, head, query, key]
# axes after the batch -> the points that have them, without "hook_"; as in hooks/README.md
_AXES = {
    "pos d_model": "embed pos_embed token_type_embed resid_pre resid_mid resid_post normalized "
    "attn_out mlp_in mlp_out recon gram error",
    "pos d_mlp": "corr grad pre post pre_init post_init",
    "pos 1": "scale",
    "pos head d_head": "u q k v z",
    "pos head d_model": "result q_input k_input v_input attn_in",
    "head query key": "attn_scores pattern rep_pattern",
    "head pos": "pi",
    "head pos d_head": "moment weight",
    "representative head d_head": "rep rep_post",
    "head representative pos": "contract",
    "d_model": "pooled",
    "d_features": "features",
    "patch": "mask",
    "patch value": "pred",
}
_AXES_OF = {f"hook_{point}": axes for axes, points in _AXES.items() for point in points.split()}


def _at_places(value: Tensor, name: str, places: Int[Tensor, "pos"], of_all: int) -> Tensor:
    """Returns the part of a point's activation at some of all positions.

    Raises ValueError if the activation does not hold all positions.
    """
    places = places.to(value.device)
    first = position_axis(name)
    axes = [] if first is None else [first, 3] if name.endswith(_PATTERNS) else [first]
    for axis in axes:
        if value.shape[axis] != of_all:
            raise ValueError("the cache lacks positions of padded texts: cache without pos_slice.")
        value = value.index_select(axis, places)
    return value


def _checked(method: Method, weights: bool = True, stack: bool = False) -> Method:
    """Makes a method check first what it reads.

    weights: checks that the model's weights made the activations. stack: checks that the parts of
    the returned stack add up.
    """

    @wraps(method)
    def checked(self: "CrateCache", *args: Any, **kwargs: Any) -> Any:
        if weights:
            self.check_weights()
        if stack:
            self._check_stack(method.__name__, args, kwargs)
        return method(self, *args, **kwargs)

    return cast(Method, checked)


class CrateCache(ActivationCache):
    """TransformerLens' ActivationCache; `logit_lens()` reads the CLS token, not the last one.

    Code of this library reads activations with `at`, which raises clear errors for activations that
    are missing.

    mask: which of the cached tokens are real, `[batch, pos]`, if texts of unequal length were
    padded, else None. `alone(sample)` is the cache of one text without its padding. mark:
    identifies the model that made the activations (models/weights.py); None means the mark of
    `cache_dict`, if it came from a model.
    """

    model: Any

    def __init__(
        self,
        cache_dict: dict[str, Tensor],
        model: object,
        has_batch_dim: bool = True,
        mask: Bool[Tensor, "*batch pos"] | None = None,
        mark: Mark | None = None,
    ) -> None:
        super().__init__(cache_dict, model, has_batch_dim)
        self.mask, self.mark = mask, mark or getattr(cache_dict, "mark", None)

    def __repr__(self) -> str:
        held = {one.data_ptr(): one.nbytes() for one in map(Tensor.untyped_storage, self.values())}
        return f"CrateCache: {len(self)} points, {sum(held.values()) / 1e6:,.1f} MB."

    def _repr_html_(self) -> str:
        from crate_interp.viz.page import render

        layers: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for name, value in self.items():
            *place, point = re.split(r"(?<=blocks)\.(\d+)\.", name, maxsplit=1)
            axes = _AXES_OF.get(name.rsplit(".", 1)[-1], "").split()
            axes = ["batch", *axes] if axes and self.has_batch_dim else axes
            named = ", ".join(axes) if len(axes) == value.ndim else ""
            kind = str(value.dtype).removeprefix("torch.")
            row = (point, " x ".join(map(str, value.shape)), named, kind)
            layers.setdefault(tuple(place or ("", "")), []).append(row)
        groups: dict[tuple[str, tuple], list[str]] = {}  # (name of the list of layers, points)
        for (blocks, number), rows in layers.items():
            groups.setdefault((blocks, tuple(rows)), []).append(number)
        return render("cells/points.html", said=repr(self), groups=groups)

    @property
    def is_padded(self) -> bool:
        """Whether some of the cached tokens are padding."""
        return self.mask is not None and not bool(self.mask.all())

    def alone(self, sample: int) -> "CrateCache":
        """Returns the cache of one sample, with a batch axis of 1 and without padding.

        Raises ValueError for a sample that the cache does not have, and for a padded cache that
        holds only some of the positions (`pos_slice`).
        """
        count = self._batch_size()
        if not checks.is_int(sample) or not 0 <= sample < count:
            raise ValueError(f"sample={sample!r}: the cache has samples 0 to {count - 1}.")
        one = self.apply_slice_to_batch_dim([int(sample)])
        if one.mask is not None and one.is_padded:
            places, count = one.mask[0].nonzero()[:, 0], one.mask.shape[1]
            named = one.cache_dict.items()
            one.cache_dict = {name: _at_places(x, name, places, count) for name, x in named}
        one.mask = None
        return one

    def parts(self) -> Iterator[tuple[int, "CrateCache"]]:
        """Yields (number of the first sample, cache): the whole cache, or each text if padded."""
        if not self.is_padded:
            yield 0, self
            return
        for sample in range(self._batch_size()):
            yield sample, self.alone(sample)

    def refuse_padding(self, reader: str) -> None:
        """Raises ValueError, naming the reader, if some of the cached tokens are padding."""
        if self.is_padded:
            raise ValueError(
                f"the cache holds padded texts, and {reader} would read padding as tokens. Give "
                "the cache of one text, cache.alone(i), or texts of one length."
            )

    def check_weights(self) -> None:
        """Raises ValueError unless the model is the one that made the activations, unchanged."""
        if self.model is not None:  # users may drop the model
            check_mark(self.mark, getattr(self.model, "whole", self.model))

    def to(self, device: str | torch.device) -> "CrateCache":
        """Moves the activations and the mask to a device, and returns the cache."""
        super().to(device)
        self.mask = None if self.mask is None else self.mask.to(device)
        return self

    def real_places(self, position: int) -> Int[Tensor, "batch"]:
        """Returns where a position of each text stands in the padded rows.

        position: from 0, or from -1 backwards, counting real tokens only. Raises ValueError for a
        position that a text does not have.
        """
        assert self.mask is not None
        lengths = self.mask.sum(dim=1)
        shortest = int(lengths.min())
        if not checks.is_int(position) or not -shortest <= position < shortest:
            raise ValueError(f"position={position!r}: the shortest text has {shortest} tokens.")
        wanted = position + lengths if position < 0 else torch.full_like(lengths, position)
        rank = self.mask.cumsum(dim=1) - 1
        return ((rank == wanted[:, None]) & self.mask).int().argmax(dim=1)

    def at(self, point: str, layer: int | None = None, *, sample: int | None = None) -> Tensor:
        """Returns the activation at a hook point, batch first.

            cache.at("attn.hook_pattern", -1)  # [batch, head, query, key], of the last layer
            cache.at("mlp.hook_post", 3, sample=0)  # [pos, d_mlp]
            cache.at("ln_final.hook_scale")  # [batch, pos, 1]

        hooks/README.md has the shape at each point.

        Args:
            point: With `layer`, a name inside a block; without, a full name.
            layer: The number of a layer; negative numbers count from the end.
            sample: The number of one sample, whose activation has no batch axis and no padding.

        Raises:
            ValueError: For a layer that the model does not have, and for a cache without a batch
                axis.
            KeyError: For a point that was not cached or does not exist.
        """
        name = point if layer is None else full_name(point, self._layer(layer))
        if not self.has_batch_dim:
            raise ValueError("the cache has no batch axis: cache without remove_batch_dim=True.")
        if name not in self.cache_dict:
            raise KeyError(self._why_missing(name))
        value = self.cache_dict[name]
        if sample is None:
            return value
        one = value[sample : sample + 1]
        if self.mask is not None and self.is_padded:
            one = _at_places(one, name, self.mask[sample].nonzero()[:, 0], self.mask.shape[1])
        return one[0]

    def _layer(self, layer: int) -> int:
        if self.model.towers:
            raise ValueError("a CLIP is two models: read cache.visual or cache.text.")
        count = len(self.model.blocks)
        if not checks.is_int(layer) or not -count <= layer < count:
            raise ValueError(f"layer={layer!r}: the model has layers 0 to {count - 1}.")
        return int(layer) % count

    def _why_missing(self, name: str) -> str:
        """Returns why the cache lacks a point, and what to type instead."""
        try:
            if self.model is not None:  # users may drop the model to free its memory
                self.model.check_point(name)
        except KeyError as error:
            return error.args[0]
        return f"the cache lacks {name!r}: cache it, run_with_cache(x, names_filter=[{name!r}])."

    def __getitem__(self, key: Any) -> Tensor:
        """Returns the activation at a point, by its full name or TransformerLens' short name.

        Raises KeyError, with the nearest names, for a point that the cache does not have.
        """
        try:
            return super().__getitem__(key)
        except TypeError:  # from what makes a name of the key
            words = 'names no point: give cache["pattern", 0], or a full name.'
            raise KeyError(f"{checks.quote(key)} {words}") from None
        except KeyError as error:
            meant = resolve(error.args[0], self.cache_dict)
            if meant in self.cache_dict:
                return self.cache_dict[meant]

            raise KeyError(self._why_missing(error.args[0])) from None

    def __contains__(self, name: object) -> bool:
        """Tells whether a point was cached, by its name or TransformerLens' alias."""
        return isinstance(name, str) and resolve(name, self.cache_dict) in self.cache_dict

    @_checked
    def logit_lens(self, **kwargs: Any) -> Any:
        """Returns TransformerLens' logit lens, with the same arguments.

        Unlike in TransformerLens, the default of `positions` is `model.lens_positions`. At the CLS
        token, the entry after the last layer is the model's logits. A model that pools the mean
        reads no single token, so the lens reads every token. Raises ValueError for a model without
        logits, and for ToST, whose layers see no CLS token.
        """

        if not self.model.has_logits:
            raise ValueError("the model has no classifier head, and so no logits for a lens.")
        check_read_out(self.model.cfg, "the logit lens")
        self.refuse_padding("the logit lens")
        return super().logit_lens(**{"positions": self.model.lens_positions} | kwargs)

    def apply_slice_to_batch_dim(self, *args: Any, **kwargs: Any) -> "CrateCache":
        """Returns TransformerLens' slice along the batch axis, as a CrateCache."""
        cut = super().apply_slice_to_batch_dim(*args, **kwargs)
        mask = self.mask
        if mask is not None:
            given: Any = kwargs.get("batch_slice", args[0] if args else None)
            mask = (given if isinstance(given, Slice) else Slice(given)).apply(mask, dim=0)
        return CrateCache(cut.cache_dict, self.model, cut.has_batch_dim, mask, self.mark)

    # TransformerLens' stacks, with its arguments. All but the first raise RefusedError if the step
    # replaces the stream (crate, crate-mae, crate-lm, cbt, tost-ista) or the stream is mixed anew
    # before each layer (nanochat-crate): there, parts of different layers do not add up to a logit.
    # For the heads of one layer, take compute_head_results() and cache["result", layer].
    accumulated_resid = _checked(ActivationCache.accumulated_resid, weights=False, stack=True)
    decompose_resid = _checked(ActivationCache.decompose_resid, weights=False, stack=True)
    stack_head_results = _checked(ActivationCache.stack_head_results, stack=True)
    stack_neuron_results = _checked(ActivationCache.stack_neuron_results, stack=True)
    get_full_resid_decomposition = _checked(
        ActivationCache.get_full_resid_decomposition, stack=True
    )

    def _check_stack(self, method: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises RefusedError for parts that do not add up, ValueError for cut padded rows.

        Also raises ValueError for the neurons of a model without a sparse step.
        """
        own = signature(getattr(ActivationCache, method))
        given = own.bind_partial(self, *args, **kwargs).arguments
        mixed = not self.model.cfg.residual or hasattr(self.model, "resid_lambdas")
        if mixed and method in REFUSALS:
            raise refuse(method)
        if method in _NEURONS and given.get("expand_neurons", True):
            check_atoms(self.model.cfg, "stack_neuron_results")
        if self.is_padded and given.get("pos_slice") is not None:
            self.refuse_padding(f"{method} at some positions")

    @_checked
    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: Answers,
        incorrect_tokens: Answers | None = None,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """Returns TransformerLens' logit attributions of a stack, with the same arguments.

        Unlike in TransformerLens, `tokens` and `incorrect_tokens` may also be lists of numbers and
        names. Raises ValueError if they differ in shape, for a token or class that the model does
        not have, and for ToST, whose CLS comes last; RefusedError as `decompose_resid` does.
        """
        self._check_stack("logit_attrs", (residual_stack, tokens), {"pos_slice": pos_slice})
        check_read_out(self.model.cfg, "logit_attrs")
        right, wrong = self.model.answer_ids(tokens), None
        if incorrect_tokens is not None:
            wrong = self.model.answer_ids(incorrect_tokens, "incorrect_tokens")
        options = pos_slice, batch_slice, has_batch_dim
        return super().logit_attrs(residual_stack, right, wrong, *options)

    compute_head_results = _checked(ActivationCache.compute_head_results)
    get_neuron_results = _checked(ActivationCache.get_neuron_results)

    def _part(self, name: str) -> "CrateCache":
        tower, start = getattr(self.model, name), f"{name}."
        kept = {key[len(start) :]: value for key, value in self.items() if key.startswith(start)}
        marks = (self.mark or {}).items()
        mark = {key[len(start) :]: one for key, one in marks if key.startswith(start)}
        return CrateCache(kept, tower, self.has_batch_dim, mark=mark)

    # the towers' parts of a CLIP's cache, without "visual." and "text." in the names of points
    visual = property(lambda self: self._part("visual"))
    text = property(lambda self: self._part("text"))

    @_checked
    def apply_ln_to_stack(
        self, residual_stack: Tensor, layer: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Returns a stack centred and scaled, as in TransformerLens, by the norm that reads it.

        The weight and bias of the norm are left out. For logits of a stream, take
        `cache.logit_lens()`, or `cache.accumulated_resid(apply_ln=True) @ model.W_U + model.b_U`,
        which include both.

        Unlike in TransformerLens, if the model has no final norm (CRATE-LM vanilla), the stack
        before the unembedding is not centred; only `batch_slice` is applied to it.
        """
        self._check_stack("apply_ln_to_stack", (residual_stack, layer, *args), kwargs)
        last = layer in (None, -1, self.model.cfg.n_layers)
        if last:
            check_read_out(self.model.cfg, "the last norm")
            if not kwargs.get("recompute_ln"):  # else ln_final itself runs, GELU and all
                check_linear(self.model.cfg, "the last norm")
        if last and isinstance(self.model.ln_final, NoNorm):
            if not kwargs.get("has_batch_dim", True):
                return residual_stack
            cut = kwargs.get("batch_slice")
            return (cut if isinstance(cut, Slice) else Slice(cut)).apply(residual_stack, dim=1)
        return super().apply_ln_to_stack(residual_stack, layer, *args, **kwargs)

    @property
    def decoder(self) -> "CrateCache":
        """The decoder's part of a masked autoencoder's cache, without "decoder_" in point names.

        For example `cache.decoder["pattern", 0]`.
        """

        return self.model.decoder_view(self)
