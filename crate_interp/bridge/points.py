"""Names of points on TransformerLens' own bridges, and our points of the same tensors."""

from transformer_lens.hook_points import HookPoint

from crate_interp.models.hooked import HookedModel

# Within a layer: name on a bridge -> our name. Both are one HookPoint, which carries our name.
# `hook_out` is missing: JacobianLens looks for a point that carries this name, so a layer's part
# has one of its own, behind hook_resid_post.
_IN_BLOCK = {
    "hook_in": "hook_resid_pre",
    "ln1.hook_in": "hook_resid_pre",
    "ln1.hook_out": "ln1.hook_normalized",
    "attn.hook_in": "ln1.hook_normalized",
    "attn.hook_out": "hook_attn_out",
    "attn.o.hook_in": "attn.hook_z",
    "attn.o.hook_out": "hook_attn_out",
    "ln2.hook_in": "hook_resid_mid",
    "ln2.hook_out": "ln2.hook_normalized",
    "mlp.hook_in": "ln2.hook_normalized",
    "mlp.hook_out": "hook_mlp_out",
}
# what the three projections return: before rotations, if there are any
_ROLES = {f"attn.{role}.hook_out": f"attn.hook_{role}" for role in "qkv"}
_ROTATED = dict.fromkeys(_ROLES, "attn.hook_u")
# by the config's `sparse_step`: what D^T (or W_in) returns, and what the decoder reads
_STEPS = {
    "ista": {},
    "odl": {"mlp.in.hook_out": "mlp.hook_corr", "mlp.out.hook_in": "mlp.hook_post"},
    "tied-odl": {"mlp.in.hook_out": "mlp.hook_corr", "mlp.out.hook_in": "mlp.hook_post"},
    "threshold": {"mlp.out.hook_in": "mlp.hook_post"},
    "mlp-relu": {"mlp.in.hook_out": "mlp.hook_pre", "mlp.out.hook_in": "mlp.hook_post"},
    "mlp-gelu": {"mlp.in.hook_out": "mlp.hook_pre", "mlp.out.hook_in": "mlp.hook_post"},
}
_AT_ROOT = {
    "embed.hook_out": "hook_embed",
    "pos_embed.hook_out": "hook_pos_embed",
    "ln_final.hook_out": "ln_final.hook_normalized",
}


def bridge_names(model: HookedModel) -> dict[str, HookPoint]:
    """Returns the points of a model under the names that a bridge has for them."""
    cfg = model.cfg
    inside = _IN_BLOCK | (_ROTATED if cfg.rotary else _ROLES) | _STEPS[cfg.sparse_step]
    names = _AT_ROOT | {
        f"blocks.{layer}.{name}": f"blocks.{layer}.{ours}"
        for layer in range(cfg.n_layers)
        for name, ours in inside.items()
    }
    return {name: model.hook_dict[ours] for name, ours in names.items() if ours in model.hook_dict}
