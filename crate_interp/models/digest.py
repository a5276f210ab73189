"""One number for a model: the same weights and config give the same."""

import hashlib
import json
from typing import Any

import torch


def model_digest(model: Any) -> str:
    """sha256 over the config and every parameter's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(model.cfg.to_dict(), sort_keys=True).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"
