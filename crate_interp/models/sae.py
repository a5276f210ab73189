"""The sparse autoencoders published beside CRATE-LM: they read one hook point of it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp import checks
from crate_interp.models.sharing import SharedModel


@dataclass(frozen=True, kw_only=True)
class SAEConfig:
    """The config of a sparse autoencoder, with the point of the language model that it reads.

    hook_name: that point; d_in: its width; d_sae: number of features; l1_coeff, model_name: of the
    training, as published.

    Raises ValueError, naming the field, for a value that cannot be used.
    """

    hook_name: str
    d_in: int
    d_sae: int
    l1_coeff: int | float | None = None
    model_name: str | None = None
    family: str = "sae"

    def __post_init__(self) -> None:
        checks.one_line("hook_name", self.hook_name)
        checks.count("d_in", self.d_in)
        checks.count("d_sae", self.d_sae)
        checks.one_of("family", self.family, ("sae",))
        if self.model_name is not None:
            checks.one_line("model_name", self.model_name)
        if self.l1_coeff is not None and not checks.is_number(self.l1_coeff):
            raise ValueError(f"l1_coeff={checks.shown(self.l1_coeff)}: give a number, or None.")

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-native values."""
        return dataclasses.asdict(self)


class SparseAutoencoder(nn.Module, SharedModel):
    """`acts = ReLU((x - b_dec) W_enc + b_enc)`, `x' = acts W_dec + b_dec`.

    x: `[..., d_in]`, activations at `cfg.hook_name`; acts: `[..., d_sae]`. Code:
    neelnanda-io/1L-Sparse-Autoencoder `utils.py`, in whose format the CRATE-LM autoencoders are
    published.
    """

    def __init__(self, cfg: SAEConfig) -> None:
        super().__init__()
        self.cfg = cfg
        directions = torch.randn(cfg.d_sae, cfg.d_in)
        self.W_enc = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(cfg.d_in, cfg.d_sae)))
        self.W_dec = nn.Parameter(directions / directions.norm(dim=-1, keepdim=True))
        self.b_enc = nn.Parameter(torch.zeros(cfg.d_sae))
        self.b_dec = nn.Parameter(torch.zeros(cfg.d_in))

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_sae"]:
        """Returns the features of activations; raises ValueError if their width is not d_in."""
        if x.shape[-1] != self.cfg.d_in:
            raise ValueError(
                f"x has width {x.shape[-1]}, this autoencoder reads {self.cfg.hook_name} of width "
                f"{self.cfg.d_in}."
            )
        return torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)

    def decode(self, acts: Float[Tensor, "*batch d_sae"]) -> Float[Tensor, "*batch d_in"]:
        """Returns the activations that features stand for."""
        return acts @ self.W_dec + self.b_dec

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_in"]:
        """Returns the reconstruction of x."""
        return self.decode(self.encode(x))
