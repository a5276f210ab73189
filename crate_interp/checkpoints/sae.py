"""The published sparse autoencoders: N.pt with N_cfg.json beside it."""

from typing import Any

import torch

from crate_interp.checkpoints.tensors import Contents, check_weights
from crate_interp.errors import CheckpointError
from crate_interp.models.sae import SAEConfig, SparseAutoencoder

KEYS = ("W_enc", "b_enc", "W_dec", "b_dec")


def is_sae(contents: Contents) -> bool:
    """Tells whether a file has the keys of a sparse autoencoder."""
    return {"W_enc", "W_dec"} <= set(contents.tensors)


def from_contents(
    contents: Contents, given: dict[str, Any], where: str, dtype: torch.dtype
) -> SparseAutoencoder:
    """Returns the sparse autoencoder of a file.

    Raises CheckpointError for other keys, for shapes that do not fit, and where neither the
    file nor `given` says which point it reads.
    """
    tensors, config = contents.tensors, contents.config
    if set(tensors) != set(KEYS):
        raise CheckpointError(
            f"{where} has the keys {', '.join(tensors)}; "
            f"a sparse autoencoder has {', '.join(KEYS)}."
        )
    if unknown := set(given) - {"hook_name"}:
        raise CheckpointError(
            f"a sparse autoencoder has no {', '.join(sorted(unknown))}: "
            "only hook_name can be given."
        )
    hook_name = given.get("hook_name", config.get("act_name"))
    if not isinstance(hook_name, str):
        raise CheckpointError(
            f"{where}: nothing says which point it reads (no _cfg.json is beside it). Give it: "
            "ci.load(..., hook_name='blocks.0.mlp.hook_post')."
        )
    shape = tuple(tensors["W_enc"].shape)
    d_in, d_sae = shape if len(shape) == 2 else (0, 0)
    wanted = {"W_enc": (d_in, d_sae), "b_enc": (d_sae,), "W_dec": (d_sae, d_in), "b_dec": (d_in,)}
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size or not all(size):
            raise CheckpointError(
                f"{where}: {name} is {list(tensors[name].shape)}, wanted {list(size)}."
            )
    for name, value in (("act_size", d_in), ("dict_size", d_sae)):
        if config.get(name, value) != value:
            raise CheckpointError(
                f"{where}: its config says {name}={config[name]!r}, the tensors make it {value}."
            )
    if not isinstance(config.get("l1_coeff"), (int, float, type(None))):
        raise CheckpointError(
            f"{where}: its config says l1_coeff={config['l1_coeff']!r}, wanted a number."
        )
    check_weights(tensors, where, dtype)
    cfg = SAEConfig(
        hook_name=hook_name,
        d_in=d_in,
        d_sae=d_sae,
        l1_coeff=config.get("l1_coeff"),
        model_name=config.get("model_name"),
    )
    with torch.device("meta"):
        sae = SparseAutoencoder(cfg)
    copied = {
        name: value.detach().to("cpu", dtype, copy=True).contiguous()
        for name, value in tensors.items()
    }
    sae.load_state_dict(copied, assign=True)
    return sae.eval()
