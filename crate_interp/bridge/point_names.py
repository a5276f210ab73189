"""Names of points on TransformerLens' own bridges, and our points of the same tensors."""

from transformer_lens.hook_points import HookPoint

from crate_interp.models.compat.hook_aliases import IN_BLOCK, IN_MODEL
from crate_interp.models.hooked import HookedModel

# Both names are of one HookPoint, which carries ours. JacobianLens looks for a point that carries
# the name `hook_out`, so a layer's part has one of its own, behind hook_resid_post; the unembedding
# has points of its own too.
_OWN = ("hook_out", "unembed.hook_in")
_IN_BLOCK = IN_BLOCK | {"ln1.hook_in": "hook_resid_pre"}


def bridge_names(model: HookedModel) -> dict[str, HookPoint]:
    """Returns the points of a model under the names that a bridge has for them."""
    names = {name: ours[0] for name, ours in IN_MODEL.items() if name not in _OWN} | {
        f"blocks.{layer}.{name}": f"blocks.{layer}.{ours}"
        for layer in range(model.cfg.n_layers)
        for name, ours in _IN_BLOCK.items()
        if name not in _OWN
    }
    points = dict(model.hook_dict)
    return {name: points[ours] for name, ours in names.items() if ours in points}
