"""The config of the masked autoencoder."""

from dataclasses import dataclass
from typing import ClassVar

from crate_interp.config.base import Check
from crate_interp.config.images import ImageConfig
from crate_interp.config.types import DEFAULT, Filled
from crate_interp.core import checks


@dataclass(frozen=True, kw_only=True)
class MAEConfig(ImageConfig):
    """The config of a masked autoencoder.

    `decoder_n_layers` and `decoder_n_heads` are those of the encoder where they are None.
    `norm_pix_loss` normalises the target patch by patch.
    """

    kind: ClassVar[str] = "mae"
    derived: ClassVar[tuple[str, ...]] = ("n_ctx", "d_vocab")
    checked: ClassVar[dict[str, Check]] = ImageConfig.checked | {
        "decoder_n_layers": checks.count,
        "decoder_n_heads": checks.count,
        "norm_pix_loss": checks.flag,
    }

    decoder_n_layers: Filled[int] = DEFAULT
    decoder_n_heads: Filled[int] = DEFAULT
    norm_pix_loss: bool = False

    def _check_kind(self) -> None:
        super()._check_kind()
        self._derive(n_ctx=self.n_tokens, d_vocab=self.patch_values)
        self._set(
            decoder_n_layers=self.decoder_n_layers or self.n_layers,
            decoder_n_heads=self.decoder_n_heads or self.n_heads,
        )
