"""ci.from_bridge: a hooked model of ours over a TransformerLens bridge to a black box."""

from torch import nn

from crate_interp.bridge.bridged_config import config_of
from crate_interp.bridge.bridged_models import BridgedLM, BridgedModel, BridgedVision
from crate_interp.bridge.reading_check import check_reading
from crate_interp.config.families import SUBSPACES
from crate_interp.core import checks
from crate_interp.models.hooked import HookedModel


def from_bridge(bridge: nn.Module, *, subspaces: str = "value", **config: object) -> BridgedModel:
    """Returns a hooked model over a bridge, which sweeps, probes, audits and pages take as ours.

    bridge: TransformerLens' TransformerBridge to a network whose layers are norm, attention, norm
    and MLP, each added to the stream: ViT, DeiT, GPT-2, Llama and the like through TransformerLens'
    adapters, DINOv2 through ours (`ci.bridge.load`). Boot it without compatibility mode.

    subspaces: which maps of the heads stand in for U_k wherever the papers' U is needed
    (compression, alignment): "value" (the columns of W_V), "key" or "query". A black box ties
    none of them, so this is a choice; results carry it as config["subspaces"]. Where query heads
    share keys and values, subspaces belong to these groups, and there are fewer of them than heads.

    config: fields of its config that the bridge does not tell, such as mean, std, resize, crop,
    labels, n_ctx (shorter windows of text) or model_name.

    The model shares everything with the bridge: weights, and the hooks that are on it. It runs one
    small sample to check that each point holds what its name says. An edit of `attn.hook_pattern`
    reaches the network only if TransformerLens computes the attention itself (GPT-2 and Llama, but
    not ViT), and it warns where it does not. An edit of `hook_resid_mid` reaches the MLP alone.

    Raises ValueError for anything but such a bridge, and for a point that does not hold what its
    name says.
    """
    if isinstance(bridge, HookedModel):
        raise ValueError(
            f"this {type(bridge).__name__} is a hooked model already: use it as it is."
        )
    if not hasattr(bridge, "blocks") or not hasattr(bridge, "original_model"):
        raise ValueError(
            f"cannot read {type(bridge).__name__} as a bridge: give a TransformerBridge, such as "
            "TransformerBridge.boot_transformers(...) returns; ci.bridge.load takes folders and "
            "repos of transformers."
        )
    if isinstance(bridge.original_model, HookedModel):
        raise ValueError(
            f"this bridge is to a {type(bridge.original_model).__name__}, which is a hooked model "
            "already: use the model that ci.to_bridge was given, or bridge.original_model."
        )
    checks.one_of("subspaces", subspaces, SUBSPACES)
    cfg = config_of(bridge, subspaces, config)
    try:
        model = (BridgedVision if cfg.kind == "vision" else BridgedLM)(bridge, cfg)
    except AttributeError as error:
        raise ValueError(
            f"the layers of {cfg.architecture} cannot be read: {error}. Bridges to ViT, DeiT, "
            "DINOv2, GPT-2 and Llama can be."
        ) from None
    check_reading(model)
    return model
