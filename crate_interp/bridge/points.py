"""Names of points on TransformerLens' own bridges, and our points of the same tensors."""

from transformer_lens.hook_points import HookPoint

from crate_interp.models.hooked import HookedModel

# Within a layer: name on a bridge -> our name. Both are one HookPoint, which carries our name.
# `hook_out` is missing: JacobianLens looks for a point that carries this name, so a layer's part
# has one of its own, behind hook_resid_post.
_IN_BLOCK = {
    "hook_in": "hook_resid_pre",
    "hook_attn_in": "attn.hook_attn_in",
    "hook_q_input": "attn.hook_q_input",
    "hook_k_input": "attn.hook_k_input",
    "hook_v_input": "attn.hook_v_input",
    "ln1.hook_in": "hook_resid_pre",
    "ln1.hook_out": "ln1.hook_normalized",
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
_AT_ROOT = {
    "embed.hook_out": "hook_embed",
    "pos_embed.hook_out": "hook_pos_embed",
    "ln_final.hook_out": "ln_final.hook_normalized",
}


def bridge_names(model: HookedModel) -> dict[str, HookPoint]:
    """Returns the points of a model under the names that a bridge has for them."""
    names = _AT_ROOT | {
        f"blocks.{layer}.{name}": f"blocks.{layer}.{ours}"
        for layer in range(model.cfg.n_layers)
        for name, ours in _IN_BLOCK.items()
    }
    return {name: model.hook_dict[ours] for name, ours in names.items() if ours in model.hook_dict}
