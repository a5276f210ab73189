"""Attention without a pattern: ToST's TSSA, by statistics of tokens, and CBT's CBSA.

CBSA contracts the tokens into representatives, and broadcasts these back.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.config import CrateConfig
from crate_interp.models.layers import Codes, HeadBias, HeadCodes, Stream
from crate_interp.models.layers.attention import Attention, SubspaceCodes
from crate_interp.models.layers.context import Context
from crate_interp.models.runtimes import bias_of

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
        self.add_points("hook_u", "hook_pi", "hook_moment", "hook_weight", "hook_z", "hook_result")

    W_V = SubspaceCodes.U

    @property
    def b_V(self) -> HeadBias:
        """The bias of the codes; zeros if there is none."""
        return bias_of(self.u_proj).view(self.cfg.n_heads, self.cfg.d_head)

    def forward(self, x: Stream, context: Context | None = None) -> Stream:
        """Returns the attention of the normalised stream."""
        codes = self._codes(x).transpose(1, 2)  # [batch, head, pos, d_head]
        if context is None:
            pi = self._membership(F.normalize(codes, dim=-2).square())
            shares = pi / (pi.sum(dim=-1, keepdim=True) + _LEAST_MASS)
            moment = self.hook_moment(torch.matmul(shares[:, :, None], codes.square()))
        else:
            pi, moment = self._of_earlier_tokens(codes, context)
        heads = -(codes * pi[..., None]) * self.hook_weight(1 / (1 + moment))
        return self._written(self.hook_z(heads.transpose(1, 2)))  # [batch, pos, head, d_head]

    def _membership(self, squares: HeadCodes) -> Float[Tensor, "batch head pos"]:
        return self.hook_pi((squares.sum(dim=-1) * self.temp).softmax(dim=1))

    def _of_earlier_tokens(
        self, codes: HeadCodes, context: Context
    ) -> tuple[Float[Tensor, "batch head pos"], HeadCodes]:
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


SIDE = 8  # the representatives are a square of 8 x 8


class CBSA(SubspaceCodes, Attention):
    """Contract-and-broadcast self-attention with 64 representatives.

    With the codes w = Z U_k `[pos, d_head]` of a head and representatives r, the codes pooled to 8
    x 8: contraction `A = softmax(r w^T / sqrt(p))` `[rep, pos]`, `r' = r + step_rep A w`; broadcast
    `step_x A^T softmax(r' r'^T / sqrt(p)) r'`, then the output map. Paper: arXiv 2509.16875; code:
    CBSA `CBSA_image_classification/models.py` `CBSA`.

    The code pools all tokens but the last, laid out as a square. CLS comes first, so the square
    holds CLS and all patches but the last one, each patch one place late. The published weights
    were trained so, and here it is the same.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__(cfg)
        inner = cfg.n_heads * cfg.d_head
        self.u_proj = nn.Linear(cfg.d_model, inner, bias=cfg.code_bias)
        self.out_proj = nn.Linear(inner, cfg.d_model, bias=cfg.output_bias)
        self.step_x = nn.Parameter(torch.randn(cfg.n_heads, 1, 1))
        self.step_rep = nn.Parameter(torch.randn(cfg.n_heads, 1, 1))
        self.add_points(
            "hook_u", "hook_rep", "hook_contract", "hook_rep_post", "hook_rep_pattern", "hook_z",
            "hook_result",
        )  # fmt: skip

    W_V = SubspaceCodes.U

    def forward(self, x: Stream, context: Context | None = None) -> Stream:
        """Returns the attention of the normalised stream.

        Raises ValueError if the number of tokens minus 1 is not a square.
        """
        u = self._codes(x)
        rep = self.hook_rep(self.pooled(u)).transpose(1, 2)  # [batch, head, rep, d_head]
        codes, scale = u.transpose(1, 2), self.cfg.d_head**-0.5  # [batch, head, pos, d_head]
        contract = self.hook_contract((rep @ codes.mT * scale).softmax(dim=-1))
        rep = rep + self.step_rep * (contract @ codes)
        rep = self.hook_rep_post(rep.transpose(1, 2)).transpose(1, 2)
        pattern = self.hook_rep_pattern((rep @ rep.mT * scale).softmax(dim=-1))
        heads = self.step_x * (contract.mT @ (pattern @ rep))
        return self._written(self.hook_z(heads.transpose(1, 2)))  # [batch, pos, head, d_head]

    def pooled(self, u: Codes) -> Float[Tensor, "batch rep head d_head"]:
        """Returns the mean codes in each cell of an 8 x 8 grid over the square of tokens."""
        count, side = u.shape[1], math.isqrt(u.shape[1])
        if side * side != count - 1:
            raise ValueError(
                f"{count} tokens: CBSA lays all tokens but one out as a square, so it needs "
                f"{side * side} + 1 of them: give images as high as they are wide."
            )
        square = u[:, :-1].flatten(2).mT.unflatten(-1, (side, side))  # [batch, d, h, w]
        pooled = F.adaptive_avg_pool2d(square, SIDE)
        return pooled.flatten(2).mT.unflatten(-1, u.shape[2:])  # [batch, rep, head, d_head]

    def reading(
        self, contract: Float[Tensor, "batch head rep pos"]
    ) -> Float[Tensor, "batch head rep pos"]:
        """Returns the weight of each token's code in a representative r', `P + step_rep A`.

        P pools; contract: A. It has the dtype of A.
        """
        eye = torch.eye(contract.shape[-1], dtype=contract.dtype, device=contract.device)
        pooling = self.pooled(eye[None, :, None])[0, :, 0]  # [rep, pos]
        return pooling + self.step_rep.detach().to(contract) * contract
