"""The layers of a network, and the shapes of what they pass on (Float, Int, Bool: jaxtyping's)."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

Stream = Float[Tensor, "batch pos d_model"]
Codes = Float[Tensor, "batch pos head d_head"]
Pixels = Float[Tensor, "batch channels height width"]
Ids = Int[Tensor, "batch pos"]
Mask = Bool[Tensor, "batch pos"]
Rows = Float[Tensor, "*rows d_model"]
Vectors = Float[Tensor, "*batch d_model"]
HeadCodes = Float[Tensor, "batch head pos d_head"]
Bases = Float[Tensor, "head d_model d_head"]
HeadBias = Float[Tensor, "head d_head"]
Atoms = Float[Tensor, "d_mlp d_model"]
Patches = Float[Tensor, "batch patch d_model"]
Hidden = Float[Tensor, "batch pos d_mlp"]
