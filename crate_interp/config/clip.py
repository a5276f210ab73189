"""The config of the CLIP models: an image tower and a text tower."""

from dataclasses import dataclass
from typing import ClassVar

from crate_interp.config.base import DEFAULT, Check, Filled, choice
from crate_interp.config.families import TOKENIZERS
from crate_interp.config.images import ImageConfig
from crate_interp.config.text import check_context
from crate_interp.core import checks


@dataclass(frozen=True, kw_only=True)
class CLIPConfig(ImageConfig):
    """The config of a CLIP. The fields of every family are those of its image tower.

    `d_embed` is the width in which both towers end. `text_d_model`, `text_n_layers`,
    `text_n_heads`, `n_ctx`, `d_vocab`, `tokenizer` and `prepend_bos` are those of the text
    tower. All but the last two are required.
    """

    kind: ClassVar[str] = "clip"
    checked: ClassVar[dict[str, Check]] = ImageConfig.checked | {
        "d_embed": checks.count,
        "text_d_model": checks.count,
        "text_n_layers": checks.count,
        "text_n_heads": checks.count,
        "tokenizer": choice(TOKENIZERS),
        "prepend_bos": checks.flag,
    }

    tokenizer: str | None = None
    prepend_bos: bool | None = None
    d_embed: Filled[int] = DEFAULT
    text_d_model: Filled[int] = DEFAULT
    text_n_layers: Filled[int] = DEFAULT
    text_n_heads: Filled[int] = DEFAULT

    def _check_kind(self) -> None:
        super()._check_kind()
        self.check_given(
            "n_ctx", "d_vocab", "d_embed", "text_d_model", "text_n_layers", "text_n_heads"
        )
        check_context(self.n_ctx)
        self.share("text_n_heads", "text_d_model")

    @property
    def default_prepend_bos(self) -> bool:
        """Whether texts begin with the token BOS."""
        return bool(self.prepend_bos)
