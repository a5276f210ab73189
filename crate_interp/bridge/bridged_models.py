"""Hooked models over a TransformerLens bridge, for sweeps, probes and pages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.bridge.adapter import build
from crate_interp.bridge.bridged_layers import BridgedBlock, BridgedNorm
from crate_interp.config import CrateConfig
from crate_interp.core import checks
from crate_interp.models import hook_aliases, preprocess
from crate_interp.models.hooked import HookedModel
from crate_interp.models.layers.context import padding_of
from crate_interp.models.text.text_and_tokens import TextMixin, check_ids, rows_of


class _Stopped(Exception):
    """Carries the stream before the part at which a forward stops, as its argument."""


def _input_of(end: nn.Module, run: Callable[[], object]) -> Tensor:
    """Runs a network up to the module `end`, and returns the stream that `end` would read."""

    def stop(module: nn.Module, args: tuple, named: dict) -> None:
        raise _Stopped(args[0] if args else named["hidden_states"])

    handle = end.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        run()
    except _Stopped as stopped:
        return stopped.args[0]
    finally:
        handle.remove()
    raise ValueError("the network never reached the part at which it should stop.")


class BridgedModel(HookedModel):
    """A black box behind a TransformerLens bridge, with the names of our own models.

    Every forward runs `bridge`, the bridge itself: its hooks stay on, and nothing is copied. Each
    point here shows the activation of a point of the bridge, and an edit is written back through
    the bridge's point. `ci.from_bridge` makes a BridgedModel.
    """

    bridge: Any

    def __init__(self, bridge: nn.Module, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg, self.bridge = cfg, bridge
        self.blocks = nn.ModuleList(BridgedBlock(cfg, block) for block in self.bridge.blocks)
        self.ln_final = BridgedNorm(self.bridge.ln_final)
        self._follow()
        self.setup()
        super().train(self.network.training)

    def setup(self) -> None:
        """Names the points of this model. The bridge's points keep their names."""
        self.mod_dict, self.hook_dict = {}, hook_aliases.Named()
        for name, module in self.named_modules():
            if name and name != "bridge" and not name.startswith("bridge."):
                module.name = name
                self.mod_dict[name] = module
                if isinstance(module, HookPoint):
                    self.hook_dict[name] = module

    @property
    def network(self) -> Any:
        """The network itself, as transformers made it, with the bridge's parts in it."""
        return self.bridge.original_model

    def fresh(self) -> "BridgedModel":
        """Returns the same architecture with random weights drawn by its own class.

        They are drawn from torch's global generator.
        """
        kind, config = type(self.network), self.network.config
        values, dtype = type(config).from_dict(config.to_dict()), torch.get_default_dtype()
        network = kind._from_config(values, attn_implementation="eager", dtype=dtype)
        bridge = build(network, type(self.bridge.adapter))
        return type(self)(bridge, CrateConfig.from_dict(self.cfg.to_dict()))

    def _stopping(self, layer: int, run: Callable[[], object]) -> Tensor:
        """Returns the stream before a layer; `run` runs the network."""
        ends = [*self.bridge.blocks, self.bridge.ln_final]
        return _input_of(ends[checks.layer("stop_at_layer", layer, len(self.blocks))], run)

    def _apply(self, fn: Any, recurse: bool = True) -> "BridgedModel":
        super()._apply(fn, recurse)
        self.bridge.cfg.device, self.bridge.cfg.dtype = str(self.cfg.device), self.cfg.dtype
        return self

    # this method raises, and so returns nothing
    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: str | Path, **kwargs: object
    ) -> Path:
        """Raises ValueError: transformers saves black boxes."""
        raise ValueError("a bridged model is not saved: save the network before it is bridged.")


class BridgedVision(preprocess.ImageMixin, BridgedModel):
    """An image network behind a bridge. Tokens are CLS, any other special tokens, then patches.

    `forward` returns the logits of a classifier, else the CLS token after the last norm.
    """

    def forward(self, images: Tensor, *, stop_at_layer: int | None = None) -> Float[Tensor, "..."]:
        """Returns logits `[batch, n_classes]` of preprocessed float images.

        images: `[batch, channels, height, width]`. `stop_at_layer=l` returns the stream before
        layer l. Raises ValueError for images that the model does not take.
        """
        given = self._check_images(images)
        own = checks.size("image_size", self.network.config.image_size)
        # DINOv2 interpolates its positions by itself and has no such argument
        told = given.shape[2:] != own and "Dinov2" not in str(self.cfg.architecture)
        more = {"interpolate_pos_encoding": True} if told else {}
        run = partial(self.network, pixel_values=given, **more)
        if stop_at_layer is not None:
            return self._stopping(stop_at_layer, run)
        out = run()
        if self.has_logits:
            return out.logits
        # a classifier of no labels passes on what it reads: the CLS token, in DINOv2 with a mean
        no_labels = hasattr(self.network, "classifier")
        return out.logits[:, : self.cfg.d_model] if no_labels else out.last_hidden_state[:, 0]

    @property
    def has_logits(self) -> bool:
        """Whether the forward returns logits; if not, it returns the CLS token's features."""
        return isinstance(self._head(), nn.Linear)

    @property
    def unembed(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The map from the CLS token after the last norm to the classes."""
        head = self._head()
        if not self.has_logits or head.weight.shape[1] != self.cfg.d_model:
            raise AttributeError(f"{self.cfg.architecture} has no map from CLS to classes.")
        return head

    def _head(self) -> Any:
        head = getattr(self.network, "classifier", None)
        return getattr(head, "original_component", head)


class BridgedLM(TextMixin, BridgedModel):
    """A causal language model behind a bridge."""

    def forward(
        self,
        tokens: Tensor | str | Sequence[str],
        return_type: str | None = "logits",
        *,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        stop_at_layer: int | None = None,
        **options: object,
    ) -> Any:
        """Returns logits `[batch, pos, d_vocab]` of tokens `[batch, pos]`, or of text.

        Texts of unequal length are padded on the `padding_side` (None: the tokenizer's) and masked,
        so each text has the logits that it has alone (in float64, transformers' own Llama gives NaN
        for padding on the left). Token ids are all read unless `attention_mask` `[batch, pos]`
        marks padding with 0. return_type: "logits", "loss", "both", or None, which computes no
        logits. options: further arguments of the bridge's forward. `stop_at_layer=l` returns the
        stream before layer l.

        Raises ValueError for text without a tokenizer, for tokens that the network cannot look up,
        and for an `attention_mask` without one number per token.
        """
        past = options.get("past_key_values")
        if getattr(past, "get_seq_length", lambda: 1)() == 0:
            # the attention of TransformerLens 4.3 puts nothing into a past of transformers 5.24
            raise ValueError("the past holds no tokens: give the text, or use transformers<5.24.")
        given, mask = self._read(tokens, prepend_bos, padding_side, attention_mask, past)
        if mask is not None:
            options["attention_mask"] = mask
        if stop_at_layer is None and return_type is not None:
            return self.bridge(given, return_type=return_type, **options)
        run = partial(self.bridge, given, **({"use_cache": False} | options))
        if stop_at_layer is not None:
            return self._stopping(stop_at_layer, run)
        head = self.network.get_output_embeddings()
        run() if head is None else _input_of(head, run)
        return None

    def real_tokens(self, *args: object, **kwargs: object) -> Bool[Tensor, "batch pos"] | None:
        """Returns which tokens of a forward with these arguments are real, or None if all are."""
        asked: Any = signature(self.forward).bind(*args, **kwargs).arguments
        begin, side, mask = map(asked.get, ("prepend_bos", "padding_side", "attention_mask"))
        past = asked.get("options", {}).get("past_key_values")
        given, mask = self._read(asked["tokens"], begin, side, mask, past)
        return None if mask is None else mask.bool()[:, -given.shape[1] :]

    def _read(
        self, input: Any, prepend_bos: bool | None, padding_side: str | None, mask: Any, past: Any
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch all_pos"] | None]:
        """Returns token ids, and the mask of real tokens, or None if all are real."""
        tokens, mask = super()._read(input, prepend_bos, padding_side, mask, None)
        # rotations work beyond the training length; learned positions do not
        config, rotates = self.network.config, getattr(self.cfg, "rotations", False)
        most = None if rotates else getattr(config, "max_position_embeddings", None)
        check_ids(tokens, config.vocab_size, tokens.shape[-1], most)
        if past is not None:  # the mask covers earlier tokens too, which only the network knows
            return tokens, mask
        padding = padding_of(mask, len(tokens), tokens.shape[1], None, tokens.device)
        return tokens, None if padding is None else padding.real.long()

    # the bridge's own padding is not used: it finds padding by an id that may begin a text
    cuts_texts = False

    def _encode(self, text: Any, prepend_bos: bool | None) -> list[int]:
        self._tokenizer()
        return self.bridge.to_tokens(text, prepend_bos)[0].tolist()

    def _find_tokenizer(self) -> Any:
        return self.bridge.tokenizer

    @property
    def full_options(self) -> dict[str, Any]:
        """The keyword arguments of a forward through every layer, without logits."""
        return {"return_type": None}

    @TextMixin.tokenizer.setter
    def tokenizer(self, tokenizer: object) -> None:
        """Sets the bridge's tokenizer."""
        self.bridge.tokenizer = tokenizer

    @property
    def unembed(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The map to logits."""
        head = self.network.get_output_embeddings()
        return getattr(head, "original_component", head)

    lens_positions = None  # `cache.logit_lens()` reads every token

    def window_rows(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yields the rows of `windows` one by one, as the texts are read."""
        net = self._tokenizer()
        between = net.eos_token_id if net.eos_token_id is not None else net.bos_token_id
        options = {"add_special_tokens": False, "verbose": False}
        ids = (net(text, **options)["input_ids"] for text in texts)
        advice = "give longer texts, or a smaller n_ctx to ci.from_bridge."
        return rows_of(ids, self.cfg.n_ctx, between, advice=advice)
