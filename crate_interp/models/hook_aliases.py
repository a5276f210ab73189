"""Names of TransformerLens that these models have, and those that they refuse."""

import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

# the part of a name after `blocks.{l}.`: in a TransformerBridge -> in our models
IN_BLOCK: dict[str, str] = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "ln1.hook_out": "ln1.hook_normalized",
    "hook_attn_in": "attn.hook_attn_in",
    "hook_q_input": "attn.hook_q_input",
    "hook_k_input": "attn.hook_k_input",
    "hook_v_input": "attn.hook_v_input",
    "attn.hook_in": "ln1.hook_normalized",
    "attn.q.hook_out": "attn.hook_q",
    "attn.k.hook_out": "attn.hook_k",
    "attn.v.hook_out": "attn.hook_v",
    "attn.o.hook_in": "attn.hook_z",
    "attn.o.hook_out": "hook_attn_out",
    "attn.hook_out": "hook_attn_out",
    "ln2.hook_in": "hook_resid_mid",
    "ln2.hook_out": "ln2.hook_normalized",
    "mlp.hook_in": "ln2.hook_normalized",
    "mlp.in.hook_out": "mlp.hook_pre",
    "mlp.out.hook_in": "mlp.hook_post",
    "mlp.out.hook_out": "hook_mlp_out",
    "mlp.hook_out": "hook_mlp_out",
}
# names outside the blocks: in a TransformerBridge -> in our models; of several names of ours, the
# first that a model has is used
IN_MODEL: dict[str, tuple[str, ...]] = {
    "embed.hook_out": ("hook_embed",),
    "pos_embed.hook_out": ("hook_pos_embed",),
    "ln_final.hook_out": ("ln_final.hook_normalized",),
    "unembed.hook_in": ("hook_features", "hook_pooled", "ln_final.hook_normalized"),
}
Value = TypeVar("Value")
_PARTS = re.compile(r"((?:visual\.|text\.)?)((?:decoder_)?blocks\.\d+\.)?(.+)", re.DOTALL)


def candidates(name: str) -> list[str]:
    """Returns our names that an alias may stand for; an empty list if the name is not an alias."""
    found = _PARTS.fullmatch(name)
    if found is None:
        return []
    tower, block, rest = found.group(1), found.group(2) or "", found.group(3)
    suffix = "_grad" if rest.endswith("_grad") else ""
    rest = rest.removesuffix("_grad")
    one = IN_BLOCK.get(rest)
    # TransformerLens' short name of a point that it lacks, such as ("pi", 0), names no module
    inside = (one,) if one else (f"attn.{rest}", f"mlp.{rest}")
    names = inside if block else IN_MODEL.get(rest, ())
    return [tower + block + each + suffix for each in names]


def resolve(name: str, names: Collection[str]) -> str:
    """Returns the name in `names` that `name` stands for, or `name` itself if it is unknown."""
    known = names.keys() if isinstance(names, dict) else names  # a Named also contains aliases
    if not isinstance(name, str) or name in known:
        return name
    return next((each for each in candidates(name) if each in known), name)


def aliases_of(names: Collection[str]) -> dict[str, str]:
    """Returns a dict `alias -> name` with every alias of these names."""
    found: dict[str, str] = {}
    for name in names:
        parts = _PARTS.fullmatch(name)
        if parts is None:
            continue
        tower, block = parts.group(1), parts.group(2) or ""
        for alias in IN_BLOCK if block else IN_MODEL:
            if resolve(tower + block + alias, names) == name:
                found[tower + block + alias] = name
    return found


def matching(names: Collection[str], filters: Callable[[str], bool]) -> list[str]:
    """Returns the names that the function `filters` selects.

    If it selects none of the names, it is applied to their aliases instead.
    """
    chosen = [name for name in names if filters(name)]
    if chosen:
        return chosen
    meant = {name for alias, name in aliases_of(names).items() if filters(alias)}
    return [name for name in names if name in meant]


class Named(dict[str, Value]):
    """A dict whose keys are names of hook points; an alias finds the value of its point.

    mark: identifies the model that made the activations.
    """

    mark: Any = None

    def __missing__(self, name: str) -> Value:
        meant = resolve(name, self)
        if meant not in self.keys():
            raise KeyError(name)
        return self[meant]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and resolve(name, self) in self.keys()


# name -> why it does not exist here, and what to use; hooks/README.md shows the same table
REFUSALS: dict[str, str] = {
    "enable_compatibility_mode": "names are TransformerLens', no weight is folded: leave it out",
    "process_weights": "no weight is folded or centred: leave it out, or fold a copy with torch",
    "fold_layer_norm": "the dictionary both reads and writes: use cache.apply_ln_to_stack",
    "fold_value_biases": "the codes have no value bias: use model.accumulated_bias(layer)",
    "center_writing_weights": "a code replaces the stream: use cache.apply_ln_to_stack",
    "center_unembed": "it is as trained: use model.W_U - model.W_U.mean(-1, keepdim=True)",
    "refactor_factored_attn_matrices": "q, k, v are one code: use model.QK.svd(), model.OV.svd()",
    "set_ungroup_grouped_query_attention": "every head has its own keys: leave out the call",
    "load_and_process_state_dict": "no weight is processed: use ci.load(state_dict, ...)",
    "init_weights": "weights are drawn as in the official code: make a new model",
    "original_model": "the model is not a bridge but the network itself: use model",
    "hf_generate": "there is no network of Hugging Face inside: use model.generate(...)",
    "diffusion_generate": "the model is causal: use model.generate(...)",
    "encoder_output": "there is no encoder of text: use model.run_with_cache(...)",
    "to_sentence_pair_tokens": "no model reads pairs of sentences: use model.to_tokens(...)",
    "predict_next_sentence": "no model reads pairs of sentences: use model(tokens)",
    "prepare_multimodal_inputs": "a model reads text or images: use model.preprocess(images)",
    "loss_fn": "labels take the place of next tokens: use model(images, labels=numbers).loss",
    "b_in": "a sparse step has thresholds: cfg.eta, cfg.lambd, or mlp.threshold of nanochat-crate",
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


class RefusedError(AttributeError, NotImplementedError, ValueError):
    """The error for a name of TransformerLens that has no meaning here.

    It is an AttributeError so that `hasattr`, which TransformerLens' tools use, is False. It is a
    NotImplementedError and a ValueError because TransformerLens raises these if an architecture
    lacks something.
    """


def refuse(name: str) -> RefusedError:
    """Returns the error for a name of REFUSALS."""
    return RefusedError(f"no {name} here: {REFUSALS[name]}.")
