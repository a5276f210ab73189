"""The activations of one forward: TransformerLens' cache, reading where an image classifier reads."""

from typing import Any

from transformer_lens import ActivationCache


class CrateCache(ActivationCache):
    """TransformerLens' ActivationCache; `logit_lens()` reads the CLS token and not the last one."""

    model: Any

    def logit_lens(self, **kwargs: Any) -> Any:
        """TransformerLens' logit lens; arguments as there.

        Different from it: `positions` is `model.lens_positions` where it is not given. At the CLS token the last entry
        is the model's logits. A model that pools the mean reads no single token, and each one is read.
        """
        return super().logit_lens(**{"positions": self.model.lens_positions} | kwargs)

    @property
    def decoder(self) -> "CrateCache":
        """Of a masked autoencoder: the decoder's part, under the names of a model of its own (`cache.decoder["pattern", 0]`)."""
        if not hasattr(self.model, "decoder_view"):
            raise AttributeError(f"{type(self.model).__name__} has no decoder; a HookedCrateMAE has.")
        return self.model.decoder_view(self)
