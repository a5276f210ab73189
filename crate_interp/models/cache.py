"""The activations of one forward: TransformerLens' cache, reading where an image classifier reads."""

from typing import Any

from torch import Tensor
from transformer_lens import ActivationCache, HookedRootModule
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
        if not hasattr(self.model, "lens_positions"):
            raise AttributeError(
                f"{type(self.model).__name__} has no single stream to read out: take cache.visual or cache.text of a CLIP, "
                "cache.decoder of a masked autoencoder."
            )
        return super().logit_lens(**{"positions": self.model.lens_positions} | kwargs)

    def apply_slice_to_batch_dim(self, *args: Any, **kwargs: Any) -> "CrateCache":
        """TransformerLens' function; the slice is a CrateCache too."""
        cut = super().apply_slice_to_batch_dim(*args, **kwargs)
        return CrateCache(cut.cache_dict, self.model, has_batch_dim=cut.has_batch_dim)

    def stack_neuron_results(self, *args: Any, **kwargs: Any) -> Any:
        """TransformerLens' function; ValueError where the sparse step replaces the stream, so that neurons of layers do not add up."""
        self._refuse_neurons()
        return super().stack_neuron_results(*args, **kwargs)

    def get_full_resid_decomposition(
        self, *args: Any, expand_neurons: bool = True, **kwargs: Any
    ) -> Any:
        """TransformerLens' function; ValueError for neurons where the sparse step replaces the stream."""
        if expand_neurons:
            self._refuse_neurons()
        return super().get_full_resid_decomposition(*args, expand_neurons=expand_neurons, **kwargs)

    def _refuse_neurons(self) -> None:
        if not self.model.cfg.residual:
            raise ValueError(
                "the sparse step of this family replaces the stream, so atoms of different layers do not add up to it: use "
                "expand_neurons=False, or read blocks.{l}.mlp.hook_post."
            )

    def _part(self, name: str) -> "CrateCache":
        if not isinstance(getattr(self.model, name, None), HookedRootModule):
            raise AttributeError(
                f"{type(self.model).__name__} has no {name} tower; a HookedCrateCLIP has."
            )
        kept = {
            key.removeprefix(f"{name}."): value
            for key, value in self.items()
            if key.startswith(f"{name}.")
        }
        return CrateCache(kept, getattr(self.model, name), has_batch_dim=self.has_batch_dim)

    @property
    def visual(self) -> "CrateCache":
        """Of a CLIP: the image tower's part, under the names of a model of its own."""
        return self._part("visual")

    @property
    def text(self) -> "CrateCache":
        """Of a CLIP: the text tower's part, under the names of a model of its own."""
        return self._part("text")

    def apply_ln_to_stack(
        self, residual_stack: Tensor, layer: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """TransformerLens' function; arguments as there.

        Different from it: where the model has no final norm (CRATE-LM vanilla) the stack before the unembedding is not
        centred, only sliced.
        """
        last = layer in (None, -1, self.model.cfg.n_layers)
        if last and isinstance(self.model.ln_final, NoNorm):
            batch = kwargs.get("batch_slice")
            cut = batch if isinstance(batch, Slice) else Slice(batch)
            return (
                cut.apply(residual_stack, dim=1)
                if kwargs.get("has_batch_dim", True)
                else residual_stack
            )
        return super().apply_ln_to_stack(residual_stack, layer, *args, **kwargs)

    @property
    def decoder(self) -> "CrateCache":
        """Of a masked autoencoder: the decoder's part, under the names of a model of its own (`cache.decoder["pattern", 0]`)."""
        if not hasattr(self.model, "decoder_view"):
            raise AttributeError(
                f"{type(self.model).__name__} has no decoder; a HookedCrateMAE has."
            )
        return self.model.decoder_view(self)
