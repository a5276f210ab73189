"""Sparse autoencoders from tensors: the published ones, N.pt with N_cfg.json beside it, and ours.

Those in SAELens' format are read in crate_interp/checkpoints/saelens_format.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from crate_interp.checkpoints.formats.tensor_files import Contents, check_weights
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.models.sae import SAEConfig, SparseAutoencoder, bias_shapes

KEYS = ("W_enc", "b_enc", "W_dec", "b_dec")


def is_sae(contents: Contents) -> bool:
    """Tells whether a file has the keys of a sparse autoencoder."""
    return {"W_enc", "W_dec"} <= set(contents.tensors)


def from_contents(
    contents: Contents, given: dict[str, Any], where: str, dtype: torch.dtype
) -> SparseAutoencoder:
    """Returns the published sparse autoencoder of a file.

    Raises CheckpointError for other keys, for shapes that do not fit, and where neither the
    file nor `given` says which point it reads.
    """
    tensors, config = contents.tensors, contents.config
    if set(tensors) != set(KEYS):
        raise CheckpointError(
            f"{where} has the keys {', '.join(tensors)}; "
            f"a sparse autoencoder has {', '.join(KEYS)}."
        )
    hook_name = hook_name_of(given, config.get("act_name"), where)
    d_in, d_sae = sizes(tensors, where)
    for name, value in (("act_size", d_in), ("dict_size", d_sae)):
        check_said(config, name, value, where)
    if not isinstance(config.get("l1_coeff"), (int, float, type(None))):
        raise CheckpointError(
            f"{where}: its config says l1_coeff={checks.shown(config['l1_coeff'])}, "
            "wanted a number."
        )
    cfg = SAEConfig(
        hook_name=hook_name,
        d_in=d_in,
        d_sae=d_sae,
        l1_coeff=config.get("l1_coeff"),
        model_name=config.get("model_name"),
    )
    return build(cfg, tensors, where, dtype)


def from_own(
    cfg: SAEConfig,
    tensors: Mapping[str, Tensor],
    given: dict[str, Any],
    where: str,
    dtype: torch.dtype,
) -> SparseAutoencoder:
    """Returns the sparse autoencoder of a folder that save_pretrained wrote.

    Raises CheckpointError where the tensors are not those of the config.
    """
    hook_name_of(given, cfg.hook_name, where)
    found = sizes(tensors, where)
    for name, value in zip(("d_in", "d_sae"), found, strict=True):
        check_said(cfg.to_dict(), name, value, where)
    return build(SAEConfig(**cfg.to_dict() | given), tensors, where, dtype)


def hook_name_of(given: dict[str, Any], said: object, where: str) -> str:
    """Returns the point that an autoencoder reads: a given one, or the one its config names.

    Raises CheckpointError if there is neither, and if something else is given.
    """
    if unknown := set(given) - {"hook_name"}:
        raise CheckpointError(
            f"a sparse autoencoder has no {', '.join(sorted(unknown))}: "
            "only hook_name can be given."
        )
    hook_name = given.get("hook_name", said)
    if not isinstance(hook_name, str):
        raise CheckpointError(
            f"{where}: nothing says which point it reads (no _cfg.json is beside it). Give it: "
            "ci.load(..., hook_name='blocks.0.mlp.hook_post')."
        )
    return hook_name


def sizes(tensors: Mapping[str, Tensor], where: str) -> tuple[int, int]:
    """Returns d_in and d_sae; raises CheckpointError unless W_enc is `[d_in, d_sae]`."""
    shape = tuple(tensors["W_enc"].shape) if "W_enc" in tensors else ()
    if len(shape) != 2 or not all(shape):
        raise CheckpointError(f"{where}: W_enc is {list(shape)}, wanted [d_in, d_sae].")
    return shape


def check_said(config: Mapping[str, Any], name: str, value: int, where: str) -> None:
    """Raises CheckpointError if a config says another size than the tensors have."""
    if config.get(name, value) != value:
        raise CheckpointError(
            f"{where}: its config says {name}={checks.shown(config[name])}, "
            f"the tensors make it {value}."
        )


def build(
    cfg: SAEConfig, tensors: Mapping[str, Tensor], where: str, dtype: torch.dtype
) -> SparseAutoencoder:
    """Returns the autoencoder of a config with these weights, copied.

    Raises CheckpointError for a tensor that is missing, too many, of another shape or not finite.
    """
    wanted = {"W_enc": (cfg.d_in, cfg.d_sae), "W_dec": (cfg.d_sae, cfg.d_in)} | bias_shapes(cfg)
    if set(tensors) != set(wanted):
        raise CheckpointError(
            f"{where} has the keys {', '.join(tensors)}; a sparse autoencoder of architecture "
            f"{cfg.architecture!r} has {', '.join(wanted)}."
        )
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size:
            raise CheckpointError(
                f"{where}: {name} is {list(tensors[name].shape)}, wanted {list(size)}."
            )
    check_weights(tensors, where, dtype)
    with torch.device("meta"):
        sae = SparseAutoencoder(cfg)
    copied = {
        name: value.detach().to("cpu", dtype, copy=True).contiguous()
        for name, value in tensors.items()
    }
    sae.load_state_dict(copied, assign=True)
    return sae.eval()
