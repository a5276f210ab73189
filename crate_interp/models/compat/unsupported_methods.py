"""Names of TransformerLens that have no meaning here, each with what to use instead."""

# name -> why it does not exist here, and what to use; hooks/README.md shows the same table
REFUSALS: dict[str, str] = {
    "enable_compatibility_mode": (
        "the hook points have TransformerLens' names from the start and no weight is folded: "
        "leave the call out"
    ),
    "process_weights": (
        "no weight is folded or centred: leave the call out, or fold in a copy with torch"
    ),
    "fold_layer_norm": (
        "the dictionary both reads and writes, so a norm cannot be folded into it: "
        "cache.logit_attrs and cache.apply_ln_to_stack take the norm into account"
    ),
    "fold_value_biases": (
        "the codes have no value bias: model.accumulated_bias(layer) sums the output biases"
    ),
    "center_writing_weights": (
        "a code of non-negative entries replaces the stream, and centring would change it: "
        "cache.apply_ln_to_stack centres what a norm reads"
    ),
    "center_unembed": (
        "the unembedding is kept as trained: use model.W_U - model.W_U.mean(-1, keepdim=True)"
    ),
    "refactor_factored_attn_matrices": (
        "query, key and value are one code, which refactoring would take apart: "
        "use model.QK.svd() and model.OV.svd()"
    ),
    "set_ungroup_grouped_query_attention": ("every head has its own keys: leave out the call"),
    "load_and_process_state_dict": "no weight is processed: use ci.load(state_dict, ...)",
    "init_weights": (
        "weights are drawn as in the official code when a model is made: make a new model"
    ),
    "original_model": "the model is not a bridge but the network itself: use model",
    "hf_generate": "there is no network of Hugging Face inside: use model.generate(...)",
    "diffusion_generate": "the model is causal: use model.generate(...)",
    "encoder_output": "there is no encoder of text: use model.run_with_cache(...)",
    "to_sentence_pair_tokens": "no model reads pairs of sentences: use model.to_tokens(...)",
    "predict_next_sentence": "no model reads pairs of sentences: use model(tokens)",
    "prepare_multimodal_inputs": "a model reads text or images: use model.preprocess(images)",
    "loss_fn": (
        "an image model has labels in place of next tokens: use model(images, labels=numbers).loss"
    ),
    "b_in": (
        "a sparse step has thresholds in place of a bias: read cfg.eta and cfg.lambd, or "
        "blocks[l].mlp.threshold of nanochat-crate"
    ),
} | dict.fromkeys(
    (
        "decompose_resid",
        "get_full_resid_decomposition",
        "logit_attrs",
        "stack_head_results",
        "stack_neuron_results",
    ),
    "the sparse step replaces the stream (nanochat-crate mixes it anew in each layer), so that "
    "parts of different layers do not add up to a logit: use ci.circuits.path_patch, in "
    "nanochat-crate ci.circuits.logit_attribution; cache.accumulated_resid() reads the stream",
)

# uses of a model that raise an error of their own; hooks/README.md lists these uses too
ASSIGNED: dict[str, str] = {
    "cfg.field = value": (
        "a config is frozen, because weights and hook points follow from it: move a model with "
        "model.to(...), switch hook points with model.set_use_attn_result(True) and the like, and "
        "make a new model for another shape"
    ),
    "attention_mask [batch, 1, query, key]": (
        "the model decides which earlier tokens a token sees: give a mask [batch, pos] that says "
        "which tokens are padding; positions follow from it"
    ),
}


class RefusedError(AttributeError, NotImplementedError, ValueError):
    """The error for a name of TransformerLens that has no meaning here.

    It is an AttributeError so that `hasattr`, which TransformerLens' tools use, is False. It is a
    NotImplementedError and a ValueError because TransformerLens raises these if an architecture
    lacks something.
    """


def refuse(name: str) -> RefusedError:
    """Returns the error for a name of REFUSALS."""
    return RefusedError(f"no {name} here: {REFUSALS[name]}.")
