"""The activations of one forward: TransformerLens' cache, reading where an image classifier reads."""

from typing import Any

from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities.slice import Slice

from crate_interp.models.norm import NoNorm


class CrateCache(ActivationCache):
    """TransformerLens' ActivationCache; `logit_lens()` reads the CLS token and not the last one."""

    model: Any

    def logit_lens(self, **kwargs: Any) -> Any:
        """TransformerLens' logit lens; arguments as there.

        Different from it: `positions` is `model.lens_positions` where it is not given. At the CLS token the last entry
        is the model's logits. A model that pools the mean reads no single token, and each one is read.
        """
        return super().logit_lens(**{"positions": self.model.lens_positions} | kwargs)

    def apply_ln_to_stack(self, residual_stack: Tensor, layer: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """TransformerLens' function; arguments as there.

        Different from it: where the model has no final norm (CRATE-LM vanilla) the stack before the unembedding is not
        centred, only sliced.
        """
        last = layer in (None, -1, self.model.cfg.n_layers)
        if last and isinstance(self.model.ln_final, NoNorm):
            batch = kwargs.get("batch_slice")
            cut = batch if isinstance(batch, Slice) else Slice(batch)
            return cut.apply(residual_stack, dim=1) if kwargs.get("has_batch_dim", True) else residual_stack
        return super().apply_ln_to_stack(residual_stack, layer, *args, **kwargs)

    @property
    def decoder(self) -> "CrateCache":
        """Of a masked autoencoder: the decoder's part, under the names of a model of its own (`cache.decoder["pattern", 0]`)."""
        if not hasattr(self.model, "decoder_view"):
            raise AttributeError(f"{type(self.model).__name__} has no decoder; a HookedCrateMAE has.")
        return self.model.decoder_view(self)
