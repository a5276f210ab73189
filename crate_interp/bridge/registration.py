"""register: saved folders as models of the transformers library."""

from typing import Any


def register() -> None:
    """Makes transformers know the models of this library: its AutoConfig, AutoModel and the like.

    Then a folder of `model.save_pretrained`, or a repo of `model.push_to_hub`, loads by
    `AutoConfig`, `AutoModel`, `AutoModelForImageClassification` or `AutoModelForCausalLM`, and
    `AutoTokenizer`, all `.from_pretrained(folder)`; no code of the folder runs. Logits are those of
    `ci.load(folder)` bit for bit, in the dtype of the file where ci.load takes float32, but the
    digests in config.json are not checked. The hooked model is `.model` of what is
    loaded. A folder of an earlier version, whose config.json has no `model_type`, is to be saved
    again.

    This is the one function here that changes another library for the whole process; nothing else
    calls it. It may be called more than once.

    TransformerLens' `TransformerBridge.boot_transformers(folder)` does not find the adapter even
    then: in 4.3 it looks architectures up in a list that no adapter from outside enters. These do:
    `ci.to_bridge(ci.load(folder))`, and
    `build_bridge_from_module(AutoModelForCausalLM.from_pretrained(folder), "CrateForCausalLM",
    hf_config=AutoConfig.from_pretrained(folder))` of `transformer_lens.model_bridge.sources`.
    """
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoTokenizer,
    )

    from crate_interp.bridge import transformers_models as hub

    models = (
        (hub.CrateForImageClassification, (AutoModel, AutoModelForImageClassification)),
        (hub.CrateForCausalLM, (AutoModel, AutoModelForCausalLM)),
        (hub.CrateMAEModel, (AutoModel,)),
        (hub.CrateCLIPModel, (AutoModel,)),
    )
    for model, classes in models:
        config: Any = model.config_class
        AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto in classes:
            auto.register(config, model, exist_ok=True)
    AutoTokenizer.register(hub.CrateTextConfig, tokenizer_class=hub.CrateTokenizer, exist_ok=True)
