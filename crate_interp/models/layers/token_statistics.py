"""TSSA, the attention of ToST: tokens are compressed by their statistics, without a pattern."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.compat.offload import bias_of
from crate_interp.models.layers.attention import Attention, SubspaceCodes
from crate_interp.models.layers.context import Context

_LEAST_MASS = 1e-8  # is added to the mass of a subspace, as in the official code
_LEAST_SQUARE = 1e-12  # the smallest sum of squares that a code is divided by


class TSSA(SubspaceCodes, Attention):
    """Token statistics self-attention, whose cost is linear in the number of tokens.

    With the codes w = Z U_k (+ bias) `[pos, d_head]` of a head: membership `Pi_k = softmax over
    heads of temp_k |n|^2`, where n is w with each column at unit length over the tokens; second
    moments `m = sum_i Pi_ki w_i^2 / (sum_i Pi_ki + 1e-8)`; output `-w Pi / (1 + m)`, then the
    output map. In causal models all three sums over tokens end at the token itself, and n^2 has
    the learned `denom_bias` of its position added. Paper: arXiv 2412.17810 eq. 13 to 16; code: ToST
    `tost_vision/tost.py` and `tost_lang/model_TSSA.py` `AttentionTSSA`. As in the code and unlike
    the paper, U is not orthonormal, the factor of each moment is one, and `temp` is learned.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__(cfg)
        inner = cfg.n_heads * cfg.d_head
        self.u_proj = nn.Linear(cfg.d_model, inner, bias=cfg.code_bias)
        self.out_proj = nn.Linear(inner, cfg.d_model, bias=cfg.output_bias)
        self.temp = nn.Parameter(torch.ones(cfg.n_heads, 1))
        if cfg.causal:
            self.denom_bias = nn.Parameter(torch.zeros(cfg.n_heads, cfg.n_ctx, 1))
        self.hook_u = HookPoint()
        self.hook_pi = HookPoint()
        self.hook_moment = HookPoint()
        self.hook_weight = HookPoint()
        self.hook_z = HookPoint()
        self.hook_result = HookPoint()

    W_V = SubspaceCodes.U

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:
        """The bias of the codes; zeros if there is none."""
        return bias_of(self.u_proj).view(self.cfg.n_heads, self.cfg.d_head)

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], context: Context | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Returns the attention of the normalised stream."""
        codes = self._codes(x).transpose(1, 2)  # [batch, head, pos, d_head]
        if context is None:
            pi, moment = self._of_all_tokens(codes)
        else:
            pi, moment = self._of_earlier_tokens(codes, context)
        weight = self.hook_weight(1 / (1 + moment))
        heads = -(codes * pi[..., None]) * weight
        return self._written(self.hook_z(heads.transpose(1, 2)))  # [batch, pos, head, d_head]

    def _membership(
        self, squares: Float[Tensor, "batch head pos d_head"]
    ) -> Float[Tensor, "batch head pos"]:
        return self.hook_pi((squares.sum(dim=-1) * self.temp).softmax(dim=1))

    def _of_all_tokens(
        self, codes: Float[Tensor, "batch head pos d_head"]
    ) -> tuple[Float[Tensor, "batch head pos"], Float[Tensor, "batch head one d_head"]]:
        """Returns the membership of each token, and the moments of each subspace."""
        pi = self._membership(F.normalize(codes, dim=-2).square())
        shares = pi / (pi.sum(dim=-1, keepdim=True) + _LEAST_MASS)
        return pi, self.hook_moment(torch.matmul(shares[:, :, None], codes.square()))

    def _of_earlier_tokens(
        self, codes: Float[Tensor, "batch head pos d_head"], context: Context
    ) -> tuple[Float[Tensor, "batch head pos"], Float[Tensor, "batch head pos d_head"]]:
        """Returns membership and moments at each token, from the tokens up to it.

        Padding counts for nothing. `context.past` has the sums of earlier tokens.
        """
        count = codes.shape[2]
        squares = codes.square()
        real = None
        bias = self.denom_bias[:, context.start : context.start + count]
        if context.padding is not None:
            real = context.padding.of_new(count)[:, None, :, None]  # [batch, 1, pos, 1]
            squares = squares.masked_fill(~real, 0.0)
            places = context.padding.positions[:, -count:]
            bias = self.denom_bias[:, places].transpose(0, 1)  # [batch, head, pos, 1]
        past, layer = context.past, context.layer
        total = squares.cumsum(dim=-2)
        if past is not None:
            total = past.continued(layer, "squares", total)
        pi = self._membership(squares / total.clamp_min(_LEAST_SQUARE) + bias)
        mass = pi[..., None] if real is None else pi[..., None].masked_fill(~real, 0.0)
        moment, mass = (squares * mass).cumsum(dim=-2), mass.cumsum(dim=-2)
        if past is not None:
            moment = past.continued(layer, "moment", moment)
            mass = past.continued(layer, "mass", mass)
            past.count(layer, count)
        return pi, self.hook_moment(moment / (mass + _LEAST_MASS))
