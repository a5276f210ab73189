"""HookedCrate: images to class logits, with a hook point at every equation."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models import hooked
from crate_interp.models.hook_aliases import REFUSALS
from crate_interp.models.layers import Pixels, Stream, embed
from crate_interp.models.layers.block import ClassBlock, CrateBlock
from crate_interp.models.layers.embed import ClassHead, cat_tokens
from crate_interp.models.layers.norm import HookedLayerNorm
from crate_interp.models.preprocess import ImageMixin
from crate_interp.models.runtimes import at_hand, onloaded
from crate_interp.models.text.losses import check_labels
from crate_interp.models.weights import Answers


class HookedCrate(ImageMixin, hooked.HookedModel):
    """An image classifier of the white-box family: `logits = LN(Z^L)_pooled W_U + b_U`.

    The families are crate, crate-alpha, tost, cbt, tost-ista and aot (config/families.py).

    Random weights are drawn with the official initialisation from torch's global generator.
    `pool="cls"`: LN on all tokens, then the CLS token (the official code takes CLS first, which
    gives the same numbers); `pool="mean"`: LN of the mean over all tokens. With `cfg.d_features` a
    linear map lies between pooling and classes (the ImageNet-21k demo model); W_U and b_U then
    combine both maps. With `cfg.n_classes=0` the model has no head, and its forward returns what
    the head would read. In ToST the layers see patches alone; a CLS token then reads them in
    `cls_blocks`, and Z^L is the stream after these. Code: Ma-Lab-Berkeley/CRATE `model/crate.py`,
    UCSC-VLAA/CRATE-alpha `torch_inference/model/crate_alpha.py`, RobinWu218/ToST
    `tost_vision/tost.py`, QishuaiWen/CBSA `CBSA_image_classification/models.py`. Hook points:
    hooks/README.md.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = cfg = hooked.own_config(cfg, "HookedCrate", ("vision",))
        linear = embed.ConvPatchEmbed if "conv_bias" in cfg.facts else embed.CratePatchEmbed
        self.embed: Any = embed.ConvStem(cfg) if cfg.stem == "conv" else linear(cfg)
        self.cls_token = nn.Parameter(torch.randn(1, 1, cfg.d_model))
        if cfg.fourier:
            self.pos_embed = embed.FourierPositions(cfg)
        else:
            self.pos_embed = nn.Parameter(torch.randn(1, cfg.n_ctx, cfg.d_model))
        self.hook_embed, self.hook_pos_embed = HookPoint(), HookPoint()
        self.blocks = nn.ModuleList(CrateBlock(cfg) for _ in range(cfg.n_layers))
        if cfg.class_layers:
            self.cls_blocks = nn.ModuleList(ClassBlock(cfg) for _ in range(cfg.class_layers))
        self.ln_final = HookedLayerNorm(cfg.d_model, cfg.ln_final_eps)
        self.hook_pooled = HookPoint()
        self.features = nn.Linear(cfg.d_model, cfg.d_features) if cfg.d_features else None
        if self.features is not None:
            self.hook_features = HookPoint()
        width, bias = cfg.d_features or cfg.d_model, cfg.head_bias
        self.unembed = ClassHead(width, cfg.n_classes, bias=bias) if cfg.n_classes else None
        self._follow()
        self.setup()

    def forward(
        self,
        images: Tensor | None = None,
        *,
        stop_at_layer: int | None = None,
        start_at_layer: int | None = None,
        labels: Tensor | Sequence[Any] | None = None,
        pixel_values: Tensor | None = None,
        return_type: str | None = "logits",
        check: bool = False,
    ) -> Any:
        """Returns logits `[batch, n_classes]` of preprocessed float images.

        Without a head it returns features `[batch, d_model]`, which the head would read.

        With `labels`, or with images given as `pixel_values`, it returns a transformers
        `ImageClassifierOutput` with `.loss` (if there are labels: the mean cross-entropy in nats)
        and `.logits`.

        Args:
            images: `[batch, channels, height, width]`.
            stop_at_layer: With l, the call returns Z^l `[batch, pos, d_model]`, the stream before
                layer l. Negative layers count from the end.
            start_at_layer: With l, give Z^l in place of images.
            labels: Class indices `[batch]`.
            pixel_values: Hugging Face's name of the images.
            return_type: TransformerLens'. It must be "logits", because images have no next token.
            check: Whether to look for NaN and Inf in the input first. The default does not look,
                because this reads the whole input, and on a GPU the program has to wait for the
                answer. A model that is compiled, exported or traced never looks.

        Raises:
            ValueError: For any other return_type, integer images (model.preprocess makes them
                float), a wrong image size (unless cfg.interpolate_pos), no images, labels of
                unknown classes, labels or pixel_values if the model has no head, and, with `check`,
                NaN or Inf.
        """
        self.watch_hooks()
        if return_type != "logits":
            raise ValueError(f"no return_type={return_type!r} here: {REFUSALS['loss_fn']}.")
        start, stop = hooked.layer_range(self.cfg.n_layers, start_at_layer, stop_at_layer)
        if (images is None) == (pixel_values is None):
            raise ValueError("give the model one input: images, or images as pixel_values=.")
        given: Any = images if pixel_values is None else pixel_values
        if labels is not None and stop_at_layer is not None:
            raise ValueError(f"labels need logits, but stop_at_layer={stop_at_layer} returns none.")
        if pixel_values is not None or labels is not None:
            self._head()
        if start_at_layer is None:
            given = self._check_images(given)
        else:
            given = self._check_dtype(hooked.check_stream(self, given))
        if check:
            hooked.check_finite(given)
        z = self._tokens(given) if start_at_layer is None else given
        for block in self.blocks[start:stop]:
            z = block(z)
        if stop_at_layer is not None:
            return z
        if self.cfg.class_layers:
            z = cat_tokens(self.cls_token.expand(z.shape[0], -1, -1), z)
            for block in self.cls_blocks:
                z = block(z)
        z = z.mean(dim=1, keepdim=True) if self.cfg.pool == "mean" else z
        logits = self.hook_pooled(self.ln_final(z)[:, 0])
        if self.features is not None:
            logits = self.hook_features(self.features(logits))
        logits = logits if self.unembed is None else self.unembed(logits)
        if labels is None and pixel_values is None:
            return logits
        from transformers.modeling_outputs import ImageClassifierOutput  # slow to import

        fields: Any = {"logits": logits}
        if labels is not None:
            n, count = logits.shape
            numbers = check_labels(labels, (n,), count, "classes", logits.device)
            fields = {"loss": F.cross_entropy(logits, numbers), "logits": logits}
        return ImageClassifierOutput(**fields)

    def _tokens(self, images: Pixels) -> Stream:
        patches = self.embed(images)
        batch = patches.shape[0]  # not len(), which torch.export would treat as a constant
        if self.has_cls:
            patches = cat_tokens(self.cls_token.expand(batch, -1, -1), patches)
        return self._with_positions(self.hook_embed(patches), images)

    def _head(self) -> ClassHead:
        """Returns the map to the classes; raises ValueError if there is none."""
        if self.unembed is None:
            raise ValueError("the model has no classifier head (n_classes=0), and so no logits.")
        return self.unembed

    @property
    def has_logits(self) -> bool:
        """Whether the forward returns logits; a model without a head returns features."""
        return self.cfg.n_classes > 0

    @property
    def lens_positions(self) -> int | None:
        """The position that `cache.logit_lens()` reads: the CLS token; None means every token."""
        return 0 if self.cfg.pool == "cls" else None

    @property
    def W_U(self) -> Float[Tensor, "d_model n_classes"]:
        """The unembedding: `hook_pooled @ W_U + b_U` are the logits.

        Raises ValueError if the model has no head.
        """
        head = at_hand(self._head()).T
        return head if self.features is None else at_hand(self.features).T @ head

    @property
    def b_U(self) -> Float[Tensor, "n_classes"]:
        """The bias of the unembedding; raises ValueError if the model has no head."""
        head, features = self._head(), self.features
        with onloaded(head):
            return super().b_U if features is None else head(at_hand(features, "bias"))

    @property
    def W_E(self) -> Float[Tensor, "patch_values d_model"]:
        """The linear part of the patch embedding; AttributeError for a convolutional stem."""
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "pos d_model"]:
        """The position embeddings, CLS first if it is there."""
        if self.cfg.fourier:
            return self.pos_embed(self.cfg.grid)[0]
        return at_hand(self, "pos_embed")[0]

    def to_single_token(self, label: str) -> int:
        """Returns the class index of a label; raises ValueError if cfg.labels lacks it."""
        if self.cfg.labels is None or label not in self.cfg.labels:
            some = ", ".join((self.cfg.labels or ("not known",))[:20])
            raise ValueError(
                f"there is no class {label!r}: the labels of the model are {some}. Give one of "
                "them, or the index of a class."
            )
        return self.cfg.labels.index(label)

    def to_tokens(self, labels: str | Sequence[str]) -> Int[Tensor, "batch"]:
        """Returns the class indices of labels.

        In an image classifier, classes are what TransformerLens calls tokens.
        """
        names = [labels] if isinstance(labels, str) else list(labels)
        return torch.tensor([self.to_single_token(name) for name in names], device=self.cfg.device)

    def tokens_to_residual_directions(self, tokens: Answers) -> Float[Tensor, "... d_model"]:
        """Returns the direction of each class in the stream before ln_final.

        It is the class's column of W_U times ln_final's weight. With this weight included,
        TransformerLens' logit attributions (centred, divided by `ln_final.hook_scale`) at the CLS
        token sum to the logit minus its constant part `ln_final.bias @ W_U + b_U`.

        tokens: a class's number or name, a list of these, or a tensor of numbers. Raises ValueError
        for an unknown class.
        """
        return self.W_U.T[self.answer_ids(tokens)] * at_hand(self.ln_final)
