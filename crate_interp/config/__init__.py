"""The numbers that define a CRATE: one class of configs for each kind of model.

Axes and symbols that the signatures of this library use (tokens are rows):

batch, pos (tokens, the CLS token included), head (K heads), d_model (d), d_head (p), d_mlp (width
of the sparse code), patch, layer. U_k: subspace bases `[head, d_model, d_head]`. D: dictionary
`[d_model, d_mlp]`; a code z (a row) reconstructs as `z @ D.T`. Z^l: the stream before layer l;
Z^{l+1/2}: after MSSA. eta: step size of the sparse step; lambd: its threshold. eps always
means the papers' epsilon, not its square.
"""

from crate_interp.config.base import CrateConfig, check_names
from crate_interp.config.families import FAMILIES
from crate_interp.config.kinds import (
    BridgedImageConfig,
    BridgedTextConfig,
    CLIPConfig,
    ImageConfig,
    MAEConfig,
    TextConfig,
    VisionConfig,
)

# kind of the family -> the class that CrateConfig(family=...) makes
CrateConfig.classes = {
    "vision": VisionConfig,
    "mae": MAEConfig,
    "text": TextConfig,
    "clip": CLIPConfig,
    "bridged vision": BridgedImageConfig,
    "bridged text": BridgedTextConfig,
}

__all__ = [
    "FAMILIES", "BridgedImageConfig", "BridgedTextConfig", "CLIPConfig", "CrateConfig",
    "ImageConfig", "MAEConfig", "TextConfig", "VisionConfig", "check_names",
]  # fmt: skip
