"""Small methods that TransformerLens' language models have beside their forward."""

from collections.abc import Sequence
from typing import Any, cast

from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities.lm_utils import lm_cross_entropy_loss

from crate_interp.config import CrateConfig


class LanguageParity:
    """What TransformerLens' language models have; a model has a forward and TextMixin's methods."""

    cfg: CrateConfig

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab"],
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, "..."]:
        """Returns the cross-entropy in nats of each token given those before it.

        It is the mean `[]`, or `[batch, pos - 1]` with `per_token`. attention_mask
        `[batch, pos]`: a pair of tokens of which one is masked (0) counts nothing. It is
        TransformerLens' function.
        """
        tokens = tokens.to(logits.device)
        mask = None if attention_mask is None else attention_mask.to(logits.device).bool()
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}, the tokens {list(tokens.shape)}: "
                "give one entry for each token."
            )
        return lm_cross_entropy_loss(logits, tokens, mask, per_token)

    def input_to_embed(
        self,
        input: str | Sequence[str] | Tensor,
        prepend_bos: bool | None = None,
        **options: Tensor | str | None,
    ) -> tuple[Float[Tensor, "batch pos d_model"], Tensor, None, Tensor | None]:
        """Returns `(stream before layer 0, tokens, None, attention_mask)` of tokens or text.

        The stream goes on by `model(stream, start_at_layer=0)`. options: `padding_side` for texts
        and `attention_mask`, as the forward takes them. The third is TransformerLens' place for
        position embeddings that are no part of the stream, which no model here has.
        """
        model: Any = self
        options = {name: value for name, value in options.items() if value is not None}
        side = {name: options.pop(name) for name in ("padding_side",) if name in options}
        text = not isinstance(input, Tensor)
        tokens: Any = model.to_tokens(input, prepend_bos, **side) if text else input
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        stream = model(tokens, stop_at_layer=0, **options)
        return stream, tokens, None, cast("Tensor | None", options.get("attention_mask"))
