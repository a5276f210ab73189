"""register: saved folders as models of the transformers library."""


def register() -> None:
    """Makes transformers know the models of this library: its AutoConfig, AutoModel and the like.

    Then a folder of `model.save_pretrained`, or a repo of `model.push_to_hub`, loads by
    `AutoConfig`, `AutoModel`, `AutoModelForImageClassification` or `AutoModelForCausalLM`, and
    `AutoTokenizer`, all `.from_pretrained(folder)`, without trust_remote_code. Logits are those of
    `ci.load(folder)` bit for bit, in the dtype of the file where ci.load takes float32. The hooked
    model is `.model` of what is loaded. Folders of versions without `model_type` in
    config.json are to be saved again.

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
        PreTrainedTokenizerFast,
    )

    from crate_interp.bridge import hugging_face as hub

    models = (
        (hub.CrateForImageClassification, (AutoModel, AutoModelForImageClassification)),
        (hub.CrateForCausalLM, (AutoModel, AutoModelForCausalLM)),
        (hub.CrateMAEModel, (AutoModel,)),
        (hub.CrateCLIPModel, (AutoModel,)),
    )
    for model, classes in models:
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        for auto in classes:
            auto.register(model.config_class, model, exist_ok=True)
    AutoTokenizer.register(
        hub.CrateTextConfig, tokenizer_class=PreTrainedTokenizerFast, exist_ok=True
    )
