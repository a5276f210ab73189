"""A model's weights under TransformerLens' names, their digest, and values computed from them."""

import hashlib
import json
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash  # comes with datasets
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import FactoredMatrix

from crate_interp.config import CrateConfig
from crate_interp.core import checks
from crate_interp.models.runtimes import at_hand, onloaded

if TYPE_CHECKING:
    from transformer_lens.model_bridge.composition_scores import CompositionScores

# part of a block -> TransformerLens' names of its weights
_OF_BLOCK: dict[str, tuple[str, ...]] = {
    "ln1": ("w", "b"),
    "attn": ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"),
    "ln2": ("w", "b"),
    "mlp": ("W_in", "b_in", "W_out", "b_out"),
}
# part of a model -> TransformerLens' names of its weights
_OF_MODEL = {"embed": ("W_E",), "ln_final": ("w", "b"), "unembed": ("W_U", "b_U")}

# classes or tokens, by number or name; in lists, or as a tensor of numbers
Answer = int | np.integer | str
Answers = Answer | Tensor | np.ndarray | Sequence[Answer] | Sequence[Sequence[Answer]]


class Labels(list[str]):
    """The names of the heads: a list that can also be called, like TransformerLens 3's method."""

    def __call__(self) -> "Labels":
        """Returns the list itself."""
        return self


def stacked(path: str) -> Any:
    """Returns a property: a weight of every block, by its part and TransformerLens' name, stacked.

    It raises AttributeError for a weight that the layers do not have.
    """
    read = attrgetter(path)
    return property(lambda model: torch.stack([*map(read, model.blocks)]))


class WeightsMixin:
    """Weights under TransformerLens' names; a model has `cfg`, `blocks` and `unembed`."""

    cfg: CrateConfig
    blocks: nn.ModuleList
    unembed: Any

    # of every layer: [layer, head, d_model, d_head] the maps (U, except in a plain transformer) and
    # [layer, head, d_head] the biases (zeros if query, key and value are one code) of the roles
    W_Q, W_K, W_V = stacked("attn.W_Q"), stacked("attn.W_K"), stacked("attn.W_V")
    b_Q, b_K, b_V = stacked("attn.b_Q"), stacked("attn.b_K"), stacked("attn.b_V")
    # [layer, head, d_head, d_model] and [layer, d_model], zeros for layers without a bias
    W_O, b_O = stacked("attn.W_O"), stacked("attn.b_O")
    # dictionaries [layer, d_model, d_mlp] and decoders [layer, d_mlp, d_model], which CRATE's ISTA
    # has not, and biases, of which b_in belongs to a plain transformer's MLP
    W_in, W_out, b_in, b_out = map(stacked, ("mlp.W_in", "mlp.W_out", "mlp.b_in", "mlp.b_out"))

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of every layer and head, as factors."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every layer and head, as factors."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding: `hook_pooled @ W_U + b_U` are the logits of a vision model."""
        return at_hand(self.unembed).T

    @property
    def b_U(self) -> Float[Tensor, "d_vocab"]:
        """The bias of the unembedding; zeros if it has none."""
        bias = self.unembed.bias
        return self.unembed.weight.new_zeros(self.unembed.weight.shape[0]) if bias is None else bias

    def answer_ids(self, answers: Answers, name: str = "tokens") -> Int[Tensor, "..."]:
        """Returns the numbers of classes or tokens, on the device of the weights.

        answers: a number or a name, a list of them, or a tensor of numbers. name: the argument that
        errors name. Raises ValueError for anything else, and for a class or token that the model
        does not have.
        """

        model: Any = self

        def number(answer: Any) -> Any:
            if isinstance(answer, str):
                return model.to_single_token(answer)
            if isinstance(answer, (list, tuple)):
                return [number(one) for one in answer]
            return answer if isinstance(answer, Tensor) or checks.is_int(answer) else torch.nan

        count = self.W_U.shape[1]
        given: Any = answers if isinstance(answers, (Tensor, np.ndarray)) else number(answers)
        try:
            ids = torch.as_tensor(given, device=self.W_U.device)
        except (TypeError, ValueError, RuntimeError):  # lists of different lengths
            ids = torch.tensor(torch.nan)
        whole = not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool
        if not whole or not ids.numel() or bool(((ids < 0) | (ids >= count)).any()):
            ways = f"a number from 0 to {count - 1}, a name, or a list of these"
            raise ValueError(f"{name}={checks.quote(answers)}: give {ways}.")
        return ids.long()

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """Returns the sum of output biases before `layer`, `[d_model]`.

        The sparse steps of CRATE have no bias. Negative layers count from the end. Raises
        ValueError for a layer that the model does not have.
        """
        layer = checks.layer("layer", layer, self.cfg.n_layers)
        total = self.b_O[: layer + 1 if mlp_input else layer].sum(dim=0)
        if include_mlp_biases and self.cfg.has_mlp:
            total = total + self.b_out[:layer].sum(dim=0)
        return total

    def tl_parameters(self) -> dict[str, Tensor]:
        """Returns every weight under TransformerLens' names, such as "blocks.0.attn.W_Q".

        Biases that a model lacks are zeros. Unlike in TransformerLens, weights without a meaning in
        CRATE (the `b_in` of a sparse step, `W_in` and `W_out` of ISTA) are left out. Shapes are
        TransformerLens': W_Q `[head, d_model, d_head]`, W_in `[d_model, d_mlp]`.
        """
        parts: dict[str, Any] = {"": (self, _OF_MODEL)}
        parts |= {f"blocks.{layer}.": (one, _OF_BLOCK) for layer, one in enumerate(self.blocks)}
        named = {
            f"{prefix}{part}.{name}": getattr(getattr(whole, part, None), name, None)
            for prefix, (whole, table) in parts.items()
            for part, names in table.items()
            for name in names
        }
        found = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        if hasattr(self, "W_pos"):
            found["pos_embed.W_pos"] = cast(Any, self).W_pos
        # the W_U and b_U of the model combine both maps if the class head has two
        for name in ("W_U", "b_U") if getattr(self.cfg, "n_classes", 1) else ():
            found[f"unembed.{name}"] = getattr(self, name)
        return found

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Returns the (name, weight) pairs of `tl_parameters()`."""
        return iter(self.tl_parameters().items())

    get_params = tl_parameters  # TransformerLens' other name

    @property
    def n_params_total(self) -> int:
        """The number of values in all parameters; shared parameters count once."""
        return sum(one.numel() for one in cast(nn.Module, self).parameters())

    @property
    def all_head_labels(self) -> Labels:
        """The heads "L0H0", "L0H1", ... in the order of TransformerLens' stacks of heads."""
        cfg = self.cfg
        return Labels(f"L{i}H{head}" for i in range(cfg.n_layers) for head in range(cfg.n_heads))

    attn_head_labels = all_head_labels  # every layer has attention

    def composition_layer_indices(self) -> list[int]:
        """Returns the layers that have attention, which is every layer."""
        return list(range(self.cfg.n_layers))

    def all_composition_scores(self, mode: str) -> "CompositionScores":
        """Returns how much each head writes into what each later head reads.

        `|W_OV W| / (|W_OV| |W|)` in Frobenius norms, where W is the later head's QK ("Q"), its
        transpose ("K") or its OV ("V"): `[layer, head, later layer, later head]`, zero unless the
        second layer is later. This is TransformerLens' function, with TransformerLens' type of
        result; `ci.circuits.composition` adds nulls. Raises ValueError for an unknown mode.
        """
        from transformer_lens.model_bridge.composition_scores import CompositionScores
        from transformer_lens.utilities.matrix import composition_scores

        checks.one_of("mode", mode, ("Q", "K", "V"))
        right = {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode]
        scores = composition_scores(self.OV, right, broadcast_dims=True)
        layers = torch.arange(self.cfg.n_layers, device=scores.device)
        later = layers[:, None, None, None] < layers[None, None, :, None]
        return CompositionScores(
            scores=torch.where(later, scores, torch.zeros_like(scores)),
            layer_indices=self.composition_layer_indices(),
            head_labels=list(self.all_head_labels),
        )


Mark = dict[str, Hashable]  # name of a parameter or config -> what tells its values from others

# model -> mark of its weights, and values computed from them; an entry disappears with its model
_VALUES: WeakKeyDictionary[nn.Module, tuple[tuple, dict[Hashable, Any]]] = WeakKeyDictionary()


def model_digest(model: nn.Module) -> str:
    """Returns the SHA-256 of the config and of every tensor's name, dtype, shape and bytes.

    A setting that was assumed and the same setting when given make the same network.
    """
    cfg: Any = model.cfg
    settings = {name: value for name, value in cfg.to_dict().items() if name != "assumed"}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    with onloaded(model):
        for name, value in sorted(_tensors(model).items()):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(_bytes(value))
    return f"sha256:{digest.hexdigest()}"


def values_of_weights(model: nn.Module) -> dict[Hashable, Any]:
    """Returns a dict for values computed from a model, by name; a change of the model empties it.

    The values must not refer to the model.
    """
    with onloaded(model):
        now = _mark(model), [value.device for value in model.parameters()]
    if model not in _VALUES or _VALUES[model][0] != now:
        _VALUES[model] = now, {}
    return _VALUES[model][1]


def weight_mark(model: nn.Module) -> Mark | None:
    """Returns what tells a model from models with other weights or settings.

    The settings are the configs of the model and its towers, and lambd and eta of each layer. Each
    call reads all weights, because torch's version counter misses edits through `.data`. Returns
    None if the weights are not in memory.
    """
    return None if any(value.is_meta for value in model.parameters()) else _mark(model)


def check_mark(mark: Mark | None, model: nn.Module) -> None:
    """Raises ValueError if activations with a mark were made by another model, or before an edit.

    mark: None, for activations that users made and for offloaded weights, passes.
    """
    if mark and (not hasattr(model, "towers") or weight_mark(model) != mark):
        raise ValueError(
            "the model's weights have changed since this cache was made, or the cache is of "
            "another model: call model.run_with_cache(x) again."
        )


def _mark(model: Any) -> Mark:
    mark: Mark = {}
    parts = {"": model} | {f"{name}.": getattr(model, name) for name in model.towers}
    for start, part in parts.items():
        mark[f"{start}cfg"] = json.dumps(part.cfg.to_dict(), sort_keys=True)
        for layer, block in enumerate(getattr(part, "blocks", ())):
            step = getattr(block, "mlp", None)
            numbers = (getattr(step, name, None) for name in ("lambd", "eta"))
            mark[f"{start}step {layer}"] = str([x for x in numbers if checks.is_number(x)])
    digests: dict[int, bytes] = {}  # a bridge has several names for one tensor
    for name, value in _tensors(model).items():
        if id(value) not in digests:
            # SHA-256 reads at a tenth of this speed
            digests[id(value)] = xxhash.xxh3_128_digest(_bytes(value))
        mark[name] = value.dtype, value.shape, digests[id(value)]
    return mark


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns every parameter and every buffer, those too that a saved file leaves out."""
    return model.state_dict(keep_vars=True) | dict(model.named_buffers(remove_duplicate=False))


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
