"""ci.from_bridge: a hooked model of ours over a TransformerLens bridge to a black box."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from crate_hooks import read
from crate_interp.bridge.bridged_layers import ROLES, at_path, eps_of
from crate_interp.bridge.bridged_models import BridgedLM, BridgedModel, BridgedVision
from crate_interp.config import CrateConfig, families
from crate_interp.core import checks
from crate_interp.models.hooked import HookedModel

POINTS = (
    "hook_resid_pre", "ln1.hook_normalized", "attn.hook_u", "attn.hook_q", "attn.hook_k",
    "attn.hook_v", "attn.hook_pattern", "attn.hook_z", "hook_attn_out", "hook_resid_mid",
    "ln2.hook_normalized", "mlp.hook_pre", "mlp.hook_post", "hook_mlp_out", "hook_resid_post",
)  # fmt: skip
# tolerance as a share of the largest entry; networks of any dtype compute the softmax in float32
_CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}
# names in transformers' configs for the largest number of tokens
_CONTEXT = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")
Pair = tuple[str, Tensor, Tensor]  # what is wrong if the two tensors differ
_UNNAMED = "LABEL_0"  # transformers' name for a class without a name


def _config_of(bridge: nn.Module, subspaces: str, fields: dict[str, Any]) -> CrateConfig:
    """Returns the config of a bridge, with these fields, which must not contradict the weights."""
    network: Any = bridge.original_model
    theirs, sizes = getattr(network, "config", None), _sizes(bridge)
    for name, size in sizes.items():
        if fields.get(name, size) != size:
            raise ValueError(f"{name}={fields[name]!r} contradicts the bridge, which says {size}.")
    name = getattr(theirs, "_name_or_path", "") or ""
    is_folder = name.count("/") > 1 or name.startswith((".", "/", "~"))
    values = sizes | {"architecture": type(network).__name__, "subspaces": subspaces}
    values["model_name"] = None if is_folder else name or None
    images = bool(getattr(bridge.cfg, "is_visual_model", False))
    values |= _of_images(network, theirs, sizes) if images else _of_text(bridge, theirs)
    return CrateConfig(**values | fields)


def _sizes(bridge: Any) -> dict[str, Any]:
    """Returns the sizes shown by the weights of the first layer."""
    block = bridge.blocks[0]
    queries, values = at_path(block, "attn.W_Q"), at_path(block, "attn.W_V")
    norm, mlp = at_path(block, "ln1.original_component"), at_path(block, "mlp.W_out")

    return {
        "n_layers": len(bridge.blocks),
        "n_heads": len(queries),
        "d_model": queries.shape[1],
        "d_head": queries.shape[2],
        "value_heads": len(values),
        "d_mlp": len(mlp),
        "ln_eps": eps_of(norm),
        "ln_final_eps": eps_of(bridge.ln_final.original_component),
        "rms_norm": "RMS" in type(norm).__name__,
    }


def _of_images(network: Any, theirs: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    head = getattr(network, "classifier", None)
    head = getattr(head, "original_component", head)
    # DeiT has a second token before the patches, for distillation; DINOv2 may have registers
    special = ("cls_token", "distillation_token", "register_tokens")
    parameters = network.named_parameters()
    names = getattr(theirs, "id2label", None) or {}
    ordered = [names[key] for key in sorted(names)]
    wide = isinstance(head, nn.Linear)
    values: dict[str, Any] = {
        "family": "vit",
        "image_size": theirs.image_size,
        "patch_size": theirs.patch_size,
        "channels": theirs.num_channels,
        "special_tokens": sum(
            value.shape[1] for name, value in parameters if name.rsplit(".", 1)[-1] in special
        ),
        "n_classes": head.out_features if wide else sizes["d_model"],
    }
    if wide and len(ordered) == head.out_features and ordered[0] != _UNNAMED:
        values["labels"] = ordered
    return values


def _of_text(bridge: Any, theirs: Any) -> dict[str, Any]:
    lengths = [getattr(theirs, name, None) for name in _CONTEXT]
    return {
        "family": "gpt",
        "n_ctx": next((n for n in lengths if isinstance(n, int) and n > 0), int(bridge.cfg.n_ctx)),
        "d_vocab": int(theirs.vocab_size),
        "rotations": bridge.cfg.positional_embedding_type == "rotary",
    }


@torch.no_grad()
def check_reading(model: BridgedModel) -> None:
    """Raises ValueError, naming the layer, if a point's activation contradicts its name.

    Every layer must be `mid = pre + attention`, `post = mid + MLP`. The rows of a pattern must sum
    to 1, and the heads' outputs must follow from the patterns.
    """
    seen: dict[int, dict[str, Tensor]] = {}
    try:
        with read(model, POINTS, seen.__setitem__):
            model.full_forward(_one_sample(model))
    except RuntimeError as error:  # read() names the points that did not fire
        raise ValueError(f"the bridge to {model.cfg.architecture} is unreadable: {error}") from None
    for layer, block in enumerate(model.blocks):
        for what, one, other in _pairs(block, seen[layer], model):
            tolerance = _CLOSE.get(model.cfg.dtype, 0.2) * float(other.abs().max().clamp(min=1e-6))
            if one.shape != other.shape or not float((one - other).abs().max()) <= tolerance:
                words = (
                    f"cannot be measured: in layer {layer} {what}. Boot it without compatibility"
                )
                words += " mode; layers must be norm, attention, norm and MLP, added to the stream."
                raise ValueError(f"the bridge to {model.cfg.architecture} {words}")


def _pairs(block: Any, acts: dict[str, Tensor], model: BridgedModel) -> list[Pair]:
    """Returns pairs of tensors that must be equal, each with the error text if the pair differs."""
    pattern, z = acts["attn.hook_pattern"], acts["attn.hook_z"]
    normed, normed_mid = acts["ln1.hook_normalized"], acts["ln2.hook_normalized"]
    pre, mid, post = (acts[f"hook_resid_{place}"] for place in ("pre", "mid", "post"))
    attn_out, mlp_out, values = acts["hook_attn_out"], acts["hook_mlp_out"], acts["attn.hook_v"]
    values = values.repeat_interleave(model.cfg.n_heads // values.shape[2], dim=2)
    gathered = torch.einsum("bhqk,bkhp->bqhp", pattern, values)
    codes = torch.einsum("bnd,hdp->bnhp", normed, block.attn.U.to(normed))
    written = torch.einsum("bnhp,hpd->bnd", z, block.attn.W_O.to(z)) + block.attn.b_O.to(z)
    mlp = acts["mlp.hook_post"] @ block.mlp.W_out.to(z) + block.mlp.b_out.to(z)
    sums, role = pattern.sum(-1), ROLES[model.cfg.subspaces]
    wrong_role = f"hook_{role} is not the norm of the stream times W_{role.upper()}"
    return [
        ("the rows of hook_pattern do not sum to 1", sums, torch.ones_like(sums)),
        ("hook_z is not hook_pattern times hook_v", z, gathered),
        ("hook_attn_out is not hook_z times W_O plus b_O", attn_out, written),
        ("hook_mlp_out is not hook_post times W_out plus b_out", mlp_out, mlp),
        (wrong_role, acts["attn.hook_u"], codes),
        ("attention's input is not the norm of hook_resid_pre", normed, block.ln1.plain(pre)),
        ("the MLP's input is not the norm of hook_resid_mid", normed_mid, block.ln2.plain(mid)),
        ("attention is not added to the stream", mid, pre + attn_out),
        ("the MLP is not added to the stream", post, mid + mlp_out),
    ]


def _one_sample(model: BridgedModel) -> Tensor:
    """Returns one image of full size, or a few token ids; the same on every machine."""
    if model.cfg.kind == "vision":
        first, shape = next(model.parameters()), (1, model.cfg.channels, *model.cfg.image_size)
        wave = torch.arange(prod(shape), dtype=torch.float64).sin()
        return wave.to(first.device, first.dtype).view(shape)
    count = min(5, model.cfg.n_ctx)
    return (torch.arange(count, device=model.cfg.device)[None] * 7919 + 13) % model.cfg.d_vocab


@torch.no_grad()
def check_network(model: BridgedModel) -> None:
    """Raises ValueError if the bridge computes another function than the network.

    A bridge computes attention and norms itself, by the settings that its adapter reads. One small
    sample runs through the bridge, and through the network with its own parts.
    """
    sample, text = _one_sample(model), model.cfg.kind == "text"
    ours = model(sample)
    with _without_bridge(model.network):
        theirs = model.network(sample, use_cache=False).logits if text else model(sample)
    size, difference = theirs.abs(), (ours - theirs).abs()
    if not bool((difference <= _CLOSE.get(model.cfg.dtype, 0.2) * (size + size.mean())).all()):
        raise ValueError(
            f"the bridge to {model.cfg.architecture} computes another function than the network: "
            "its adapter does not know a setting of the config. Give a network without it."
        )


@contextmanager
def _without_bridge(network: nn.Module) -> Iterator[None]:
    """Puts a network's own parts back into their places while the context is open."""
    places = [
        (parent, name, part)
        for parent in network.modules()
        if not isinstance(parent, GeneralizedComponent)
        for name, part in parent.named_children()
        if isinstance(part, GeneralizedComponent)
    ]
    try:
        for parent, name, part in places:
            parent._modules[name] = part.original_component
        yield
    finally:
        for parent, name, part in places:
            parent._modules[name] = part


def from_bridge(bridge: nn.Module, *, subspaces: str = "value", **config: object) -> BridgedModel:
    """Returns a hooked model over a bridge, for sweeps, probes, audits and pages.

    The model shares the bridge's weights, and the hooks on the bridge. One small sample is run to
    check that the activation at each point agrees with the point's name, and that the bridge
    computes what the network computes without it. An edit of `attn.hook_pattern` reaches the
    network only if TransformerLens computes the attention itself (GPT-2 and Llama, but not ViT);
    otherwise TransformerLens warns. An edit of `hook_resid_mid` reaches the MLP but not the stream.

    Args:
        bridge: TransformerLens' TransformerBridge to a network whose layers are norm, attention,
            norm and MLP, with attention and MLP added to the stream: ViT, DeiT, GPT-2, Llama and
            the like through TransformerLens' adapters, DINOv2 through ours (`ci.bridge.load`). Boot
            it without compatibility mode.
        subspaces: Which maps of the heads stand in for U_k wherever the papers' U is needed
            (compression, alignment): "value" (the columns of W_V), "key" or "query". A black box
            does not tie these maps, so this is a choice; results record it as config["subspaces"].
            If several query heads share keys and values, a group of heads has one key or value
            subspace.
        config: Fields of the config that cannot be read from the bridge, such as mean, std, resize,
            crop, labels, n_ctx (shorter windows of text) or model_name.

    Raises:
        ValueError: For anything but such a bridge, for a point whose activation contradicts its
            name, and for a bridge whose adapter does not know a setting of the network's config.
    """
    network = getattr(bridge, "original_model", bridge)
    if isinstance(network, HookedModel) or not hasattr(bridge, "blocks"):
        given = f"cannot read {type(bridge).__name__} as a bridge"
        raise ValueError(f"{given}: give a TransformerBridge to a network of transformers.")
    checks.one_of("subspaces", subspaces, families.SUBSPACES)
    try:
        cfg = _config_of(bridge, subspaces, config)
        model = (BridgedVision if cfg.kind == "vision" else BridgedLM)(bridge, cfg)
    except (AttributeError, IndexError, TypeError) as error:
        given = f"the layers of {type(network).__name__} cannot be read ({error})"
        raise ValueError(f"{given}: give a ViT, DeiT, DINOv2, GPT-2 or Llama.") from None
    training = model.training
    model.eval()
    try:
        check_reading(model)
        check_network(model)
    finally:
        model.train(training)
    return model
