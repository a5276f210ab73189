"""A digest of a model: the same weights and config give the same one."""

import hashlib
import json

import torch

from crate_interp.models.compat.offload import onloaded
from crate_interp.models.hooked import HookedModel


def model_digest(model: HookedModel) -> str:
    """Returns sha256 over the config and every parameter's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(model.cfg.to_dict(), sort_keys=True).encode())
    with onloaded(model):
        for name, value in sorted(model.state_dict().items()):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
