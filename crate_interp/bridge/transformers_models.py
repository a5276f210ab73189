"""Hooked models as models of the transformers library: thin wrappers that use the same files.

Importing this module takes seconds and registers nothing; `ci.bridge.register()` registers them.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput, ImageClassifierOutput

from crate_interp.config import CrateConfig
from crate_interp.models import autoencoder, clip, language, vision
from crate_interp.models.hooked import HookedModel

SEPARATORS = ("<|bos|>", "<|endoftext|>")


class CrateHubConfig(transformers.PreTrainedConfig):
    """The content of a saved folder's config.json; `config`: the fields of the CrateConfig.

    Raises ValueError if the fields do not make a CrateConfig. The class has an __init__ because
    transformers would otherwise add one that takes only the annotated fields.
    """

    config: dict[str, Any] | None

    def __init__(self, **values: object) -> None:
        fields: Any = values
        super().__init__(**fields)

    def __post_init__(self, **kwargs: Any) -> None:
        self.config = kwargs.pop("config", None)
        cfg: Any = self.crate()
        if cfg.kind == "vision" and self.id2label is None:
            labels = cfg.labels or [f"LABEL_{index}" for index in range(cfg.n_classes)]
            self.id2label = dict(enumerate(labels))
            self.label2id = {label: index for index, label in enumerate(labels)}
        super().__post_init__(**kwargs)

    def crate(self) -> CrateConfig:
        """Returns the CrateConfig; raises ValueError if the fields make none."""
        if not isinstance(self.config, dict):
            raise ValueError(f"{type(self).__name__} takes config=: give model.cfg.to_dict().")
        return CrateConfig.from_dict(self.config)

    # the names that transformers and TransformerLens read
    hidden_size = property(lambda self: self.crate().d_model)
    num_hidden_layers = property(lambda self: self.crate().n_layers)
    num_attention_heads = property(lambda self: self.crate().n_heads)
    head_dim = property(lambda self: self.crate().d_head)
    intermediate_size = property(lambda self: self.crate().d_mlp)


class CrateVisionConfig(CrateHubConfig):
    """The config of a CrateForImageClassification."""

    model_type, __init__ = "crate_vision", CrateHubConfig.__init__


class CrateTextConfig(CrateHubConfig):
    """The config of a CrateForCausalLM."""

    model_type, __init__ = "crate_text", CrateHubConfig.__init__
    vocab_size = property(lambda self: self.crate().d_vocab)
    max_position_embeddings = property(lambda self: self.crate().n_ctx)


class CrateMAEConfig(CrateHubConfig):
    """The config of a CrateMAEModel."""

    model_type, __init__ = "crate_mae", CrateHubConfig.__init__


class CrateCLIPConfig(CrateHubConfig):
    """The config of a CrateCLIPModel."""

    model_type, __init__ = "crate_clip", CrateHubConfig.__init__


class CrateHubModel(transformers.PreTrainedModel):
    """A transformers model around a hooked model, `.model`, which ci.probe and other calls take.

    It reads and writes the folders of `model.save_pretrained`, with the same weights, in the dtype
    of the file unless another is given.
    """

    base_model_prefix = "model"
    hooked: ClassVar[type[HookedModel]]

    def __init__(self, config: CrateHubConfig) -> None:
        super().__init__(config)
        self.model: Any = self.hooked(config.crate())
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the hooked model drew its weights, or they come from a file."""

    @classmethod
    def from_pretrained(cls, *args: object, **kwargs: object) -> Any:  # pyright: ignore
        """Loads a folder or repo with the arguments of transformers' from_pretrained.

        Parameters that the hooked model keeps frozen are frozen here too.
        """
        load: Any = super().from_pretrained
        loaded = load(*args, **kwargs)
        model = loaded[0].model if isinstance(loaded, tuple) else loaded.model
        with torch.device("meta"):
            fresh = dict(type(model)(model.cfg).named_parameters())
        for name, value in model.named_parameters():
            value.requires_grad_(fresh[name].requires_grad)
        return loaded

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory: str | Path, **kwargs: object
    ) -> None:
        """Writes the hooked model's folder, which ci.load and AutoModel read.

        `push_to_hub` and `repo_id` are as in transformers; other options are ignored.
        """
        shared: Any = {name: kwargs[name] for name in ("push_to_hub", "repo_id") if name in kwargs}
        self.model.save_pretrained(save_directory, **shared)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Returns the output of the hooked model."""
        return self.model(*args, **kwargs)


class CrateForImageClassification(CrateHubModel):
    """A HookedCrate with the interface of transformers' image classifiers."""

    config_class = CrateVisionConfig
    main_input_name = "pixel_values"
    hooked = vision.HookedCrate

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        pixel_values: Float[Tensor, "batch channels height width"],
        labels: Int[Tensor, "batch"] | None = None,
        **kwargs: object,
    ) -> ImageClassifierOutput:
        """Returns logits `[batch, n_classes]`, and the cross-entropy if there are labels.

        Other arguments, such as output_attentions, are ignored, because hooks give access to
        activations. Raises ValueError if the model has no head; `.model(images)` gives features.
        """
        if not self.model.has_logits:
            raise ValueError("the model has no head: model.model(images) gives features.")
        logits = self.model(pixel_values)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class CrateForCausalLM(CrateHubModel):
    """A HookedCrateLM with the interface of transformers' language models.

    `.model.generate` writes text.
    """

    config_class = CrateTextConfig
    main_input_name = "input_ids"
    hooked = language.HookedCrateLM

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Tensor | None = None,
        labels: Int[Tensor, "batch pos"] | None = None,
        inputs_embeds: Float[Tensor, "batch pos d_model"] | None = None,
        **kwargs: object,
    ) -> CausalLMOutput:
        """Returns logits `[batch, pos, d_vocab]`, and the loss if there are labels.

        The loss is the cross-entropy of each label given the tokens before it (in crate-bert, of
        the label at each masked token); -100 is left out.
        inputs_embeds: works only in a bridge. Other arguments, such as use_cache, are ignored.
        """
        given: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask}
        if inputs_embeds is not None:
            logits = self.model(inputs_embeds=inputs_embeds, **given)
        else:
            segments = kwargs.get("token_type_ids") if self.model.cfg.segments else None
            given |= {} if segments is None else {"segments": segments}
            logits = self.model(input_ids, **given)
        if labels is None:
            return CausalLMOutput(logits=logits)
        after = labels[:, int(self.model.cfg.causal) :].to(logits.device)
        told = logits[:, : after.shape[1]].flatten(0, 1)
        loss = F.cross_entropy(told, after.flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits)


class CrateTokenizer:
    """The class that AutoTokenizer uses for a saved folder; it makes a PreTrainedTokenizerFast.

    If this were a subclass of PreTrainedTokenizerFast, transformers would rebuild the tokenizer
    from the vocabulary, without the folder's rules.
    """

    @classmethod
    def from_pretrained(cls, *args: object, **kwargs: object) -> PreTrainedTokenizerFast:
        """Returns the tokenizer of tokenizer.json; its separator is bos, eos and padding token.

        As in the hooked model, nothing is added to a text, and the name of a special token in a
        text is ordinary text. `tokenizer(text, split_special_tokens=False)` reads the name as the
        token.
        """
        load: Any = PreTrainedTokenizerFast.from_pretrained
        tokenizer = load(*args, **{"split_special_tokens": True} | kwargs)
        added = tokenizer.get_added_vocab()
        separator = next((name for name in SEPARATORS if name in added), None)
        for role in ("bos_token", "eos_token", "pad_token"):
            if separator is not None and getattr(tokenizer, role) is None:
                setattr(tokenizer, role, separator)
        return tokenizer


class CrateMAEModel(CrateHubModel):
    """Wraps a HookedCrateMAE; its forward is that of `.model`."""

    config_class = CrateMAEConfig
    main_input_name = "images"
    hooked = autoencoder.HookedCrateMAE


class CrateCLIPModel(CrateHubModel):
    """Wraps a HookedCrateCLIP; its forward is that of `.model`."""

    config_class = CrateCLIPConfig
    main_input_name = "images"
    hooked = clip.HookedCrateCLIP


def register() -> None:
    """Registers the models of this library with transformers' AutoConfig, AutoModel and the like.

    Then `.from_pretrained(folder)` of `AutoConfig`, `AutoModel`, `AutoModelForImageClassification`
    or `AutoModelForCausalLM`, and `AutoTokenizer` loads a folder of `model.save_pretrained` or a
    repo of `model.push_to_hub`; no code of the folder runs. The model takes the dtype of the file,
    while ci.load takes float32; in one dtype, their logits are equal bit for bit. The digests in
    config.json are not checked. The hooked model is the loaded model's `.model`. Folders of an
    earlier version, whose config.json has no `model_type`, must be saved again.

    This is the only function here that changes another library for the whole process; nothing else
    calls it. It may be called more than once.

    TransformerLens' `TransformerBridge.boot_transformers(folder)` does not find the adapter even
    then: in 4.3 it looks architectures up in a list that external adapters cannot enter. Use
    `ci.to_bridge(ci.load(folder))`, or
    `build_bridge_from_module(AutoModelForCausalLM.from_pretrained(folder), "CrateForCausalLM",
    hf_config=AutoConfig.from_pretrained(folder))` of `transformer_lens.model_bridge.sources`.
    """
    images, texts = transformers.AutoModelForImageClassification, transformers.AutoModelForCausalLM
    images.register(CrateVisionConfig, CrateForImageClassification, exist_ok=True)
    texts.register(CrateTextConfig, CrateForCausalLM, exist_ok=True)
    for model in (CrateForImageClassification, CrateForCausalLM, CrateMAEModel, CrateCLIPModel):
        config: Any = model.config_class
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        transformers.AutoModel.register(config, model, exist_ok=True)
    AutoTokenizer.register(CrateTextConfig, tokenizer_class=CrateTokenizer, exist_ok=True)
