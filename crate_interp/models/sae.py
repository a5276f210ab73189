"""Sparse autoencoders of one hook point: CRATE-LM's published autoencoders, and SAELens' kinds."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.core import checks
from crate_interp.models.saving import SharedModel

NORMALIZATIONS = ("none", "constant_norm_rescale", "layer_norm")
# the parameters of each architecture besides W_enc, W_dec and b_dec
_BIASES = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
ARCHITECTURES = tuple(_BIASES)
_LN_EPS = 1e-5  # SAELens adds this to the standard deviation


@dataclass(frozen=True, kw_only=True)
class SAEConfig:
    """The config of a sparse autoencoder, and the point of the model that it reads.

    hook_name: the name of that point; d_in: the point's width; d_sae: number of features; l1_coeff,
    model_name: settings of the training, as published. architecture, normalize_activations: see
    `SparseAutoencoder`; k: for "topk", the most features a token may have. apply_b_dec_to_input:
    whether b_dec is subtracted from the input. scaling_factor: a number by which activations are
    multiplied first of all, and reconstructions divided last of all.

    Raises ValueError, naming the field, for a value that cannot be used.
    """

    hook_name: str
    d_in: int
    d_sae: int
    l1_coeff: int | float | None = None
    model_name: str | None = None
    architecture: str = "standard"
    k: int | None = None
    apply_b_dec_to_input: bool = True
    normalize_activations: str = "none"
    scaling_factor: int | float = 1.0
    family: str = "sae"

    def __post_init__(self) -> None:
        checks.one_line("hook_name", self.hook_name)
        checks.count("d_in", self.d_in)
        checks.count("d_sae", self.d_sae)
        checks.one_of("family", self.family, ("sae",))
        checks.one_of("architecture", self.architecture, ARCHITECTURES)
        checks.one_of("normalize_activations", self.normalize_activations, NORMALIZATIONS)
        checks.flag("apply_b_dec_to_input", self.apply_b_dec_to_input)
        checks.positive("scaling_factor", self.scaling_factor)
        if self.model_name is not None:
            checks.one_line("model_name", self.model_name)
        if self.l1_coeff is not None:
            checks.non_negative("l1_coeff", self.l1_coeff)
        if self.architecture == "topk" and checks.count("k", self.k) > self.d_sae:
            raise ValueError(f"k={self.k} is more than the d_sae={self.d_sae} features.")

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain JSON values."""
        return dataclasses.asdict(self)


class SparseAutoencoder(nn.Module, SharedModel):
    """`acts = f((x - b_dec) W_enc + b_enc)`, `x' = acts W_dec + b_dec`.

    x: `[..., d_in]`, activations at `cfg.hook_name`; acts: `[..., d_sae]`. f depends on the
    architecture; p is the argument of f. "standard": ReLU(p). "topk": ReLU(p) where p is among the
    k largest of its token, else 0. "jumprelu": ReLU(p) where p > threshold, else 0. "gated":
    `ReLU((x - b_dec) W_enc exp(r_mag) + b_mag)` where `(x - b_dec) W_enc + b_gate > 0`, else 0;
    "gated" has no b_enc.

    normalize_activations: "constant_norm_rescale" scales each token to the length sqrt(d_in) first;
    "layer_norm" subtracts each token's mean and divides by its standard deviation (ddof 1) + 1e-5.
    `decode` undoes this, for which it needs x too. The module stores nothing from a run.

    Code: neelnanda-io/1L-Sparse-Autoencoder `utils.py`, the format of the published CRATE-LM
    autoencoders, and decoderesearch/SAELens `sae_lens/saes` for the other architectures.
    """

    b_enc: nn.Parameter
    b_dec: nn.Parameter
    b_gate: nn.Parameter
    b_mag: nn.Parameter
    r_mag: nn.Parameter
    threshold: nn.Parameter

    def __init__(self, cfg: SAEConfig) -> None:
        super().__init__()
        self.cfg = cfg
        directions = torch.randn(cfg.d_sae, cfg.d_in)
        self.W_enc = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(cfg.d_in, cfg.d_sae)))
        self.W_dec = nn.Parameter(directions / directions.norm(dim=-1, keepdim=True))
        for name in _BIASES[cfg.architecture]:
            setattr(self, name, nn.Parameter(torch.zeros(cfg.d_sae)))
        self.b_dec = nn.Parameter(torch.zeros(cfg.d_in))

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_sae"]:
        """Returns the features of activations; raises ValueError if their width is not d_in."""
        if x.shape[-1] != self.cfg.d_in:
            raise ValueError(
                f"x has width {x.shape[-1]}, but this autoencoder reads {self.cfg.hook_name} of "
                f"width {self.cfg.d_in}."
            )
        x, _, _ = self._normalised(x)
        x = x - self.b_dec if self.cfg.apply_b_dec_to_input else x
        if self.cfg.architecture == "gated":
            gate = x @ self.W_enc + self.b_gate > 0
            return gate * torch.relu(x @ (self.W_enc * self.r_mag.exp()) + self.b_mag)
        before = x @ self.W_enc + self.b_enc
        acts = torch.relu(before)
        if self.cfg.architecture == "jumprelu":
            return acts * (before > self.threshold)
        if self.cfg.architecture == "topk":
            kept = before.topk(self.cfg.k or 1, dim=-1).indices
            return torch.zeros_like(acts).scatter(-1, kept, acts.gather(-1, kept))
        return acts

    def decode(
        self, acts: Float[Tensor, "*batch d_sae"], x: Float[Tensor, "*batch d_in"] | None = None
    ) -> Float[Tensor, "*batch d_in"]:
        """Returns the activations reconstructed from features.

        x: the activations that were encoded. Only autoencoders that normalise activations read x,
        to restore each token's mean and scale. Raises ValueError if such an autoencoder gets no x,
        or an x whose shape does not fit that of acts.
        """
        recons = acts @ self.W_dec + self.b_dec
        if self.cfg.normalize_activations != "none":
            if x is None or x.shape != recons.shape:
                came = "no x" if x is None else f"x of shape {list(x.shape)}"
                raise ValueError(
                    f"decode got features of shape {list(acts.shape)} and {came}. Give the "
                    f"activations that were encoded, of shape {list(recons.shape)}, as x."
                )
            _, mean, scale = self._normalised(x)
            recons = recons * scale + mean
        return recons if self.cfg.scaling_factor == 1 else recons / self.cfg.scaling_factor

    def _normalised(self, x: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Returns scaled and normalised activations, and each token's mean and scale."""
        x = x if self.cfg.scaling_factor == 1 else x * self.cfg.scaling_factor
        if self.cfg.normalize_activations == "none":
            return x, 0.0, 1.0
        if self.cfg.normalize_activations == "layer_norm":
            mean = x.mean(dim=-1, keepdim=True)
            scale = (x - mean).std(dim=-1, keepdim=True)
            return (x - mean) / (scale + _LN_EPS), mean, scale
        scale = x.norm(dim=-1, keepdim=True) / self.cfg.d_in**0.5
        return x / scale, 0.0, scale

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_in"]:
        """Returns the reconstruction of x."""
        return self.decode(self.encode(x), x)
