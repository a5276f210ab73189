"""Multi-head subspace self-attention (MSSA), the compression step."""

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.compat.offload import at_hand
from crate_interp.models.layers.context import Context, rotate
from crate_interp.models.layers.norm import HookedNorm, is_hooked


class Attention(nn.Module):
    """What the attention of CRATE and that of a plain transformer have in common."""

    cfg: CrateConfig
    hook_attn_scores: HookPoint
    hook_pattern: HookPoint
    hook_result: HookPoint
    hook_attn_in: HookPoint
    hook_q_input: HookPoint
    hook_k_input: HookPoint
    hook_v_input: HookPoint
    _result_contribution_scale: float = 1.0  # the sign with which TransformerLens adds heads up

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """The output map of each head."""
        raise NotImplementedError

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The output bias; zeros if the layer has none."""
        raise NotImplementedError

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:
        """The bias of the queries; zeros if the layer has none, as b_K and b_V."""
        return self.W_O.new_zeros(self.cfg.n_heads, self.cfg.d_head)

    b_K = b_V = b_Q

    def split_inputs(
        self, z: Float[Tensor, "batch pos d_model"]
    ) -> tuple[Float[Tensor, "batch pos head d_model"], ...] | None:
        """Returns the stream as queries, keys and values of each head read it, if it is split.

        With `cfg.use_split_qkv_input` each role has a copy of its own, with `cfg.use_attn_in` the
        three share one. None if neither switch is on.
        """
        if not (self.cfg.use_split_qkv_input or self.cfg.use_attn_in):
            return None
        wide = z.unsqueeze(2).expand(-1, -1, self.cfg.n_heads, -1)  # [batch, pos, head, d_model]
        if self.cfg.use_attn_in:
            return (self.hook_attn_in(wide.clone()),) * 3
        points = (self.hook_q_input, self.hook_k_input, self.hook_v_input)
        return tuple(point(wide.clone()) for point in points)

    def of_stream(
        self, z: Float[Tensor, "batch pos d_model"], norm: HookedNorm, context: Context | None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Returns the attention of norm(z).

        The norm is called before the layer and not in it, so that tools that walk through the
        modules as they run count it once; but inside where each role has an input of its own.
        """
        if self.cfg.use_split_qkv_input or self.cfg.use_attn_in:
            return self(z, norm, context)
        return self(norm(z), None, context)


class MSSA(Attention):
    """Attention whose query, key and value are one code.

    `MSSA(X) = sum_k softmax(C_k C_k^T / sqrt(p)) C_k W_O,k (+ b)` with C_k = X U_k `[pos, d_head]`
    for X = LN(Z^l). Paper: arXiv 2306.01129 eq. 11-12; code: CRATE `model/crate.py` `Attention`. As
    in the code and unlike the paper there is a scale 1/sqrt(p) and no prefactor p/(N eps^2).

    The output map W_O `[head, d_head, d_model]` depends on `cfg.variant` (arXiv 2411.17182). crate:
    learned, with a bias if `cfg.output_bias`. fix: the same, frozen at its random start. c: U_k^T
    (tied). n: -U_k^T. t: the transpose of the stacked U^T. identity: the heads side by side. One
    head that spans the vision stream has no output matrix in variants crate and fix, as in the
    official code.

    In language models a query sees the keys that its `Context` shows. nanochat-crate rotates and
    normalises the codes first: hook_u is before that, hook_q, hook_k and hook_v after it, so its
    values are rotated too.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = cfg
        inner = cfg.n_heads * cfg.d_head
        self.u_proj = nn.Linear(cfg.d_model, inner, bias=False)
        self.out_proj = (
            nn.Linear(inner, cfg.d_model, bias=cfg.output_bias) if cfg.output_matrix else None
        )
        if cfg.variant == "fix" and self.out_proj is not None:
            self.out_proj.requires_grad_(False)
        self.hook_u = HookPoint()
        self.hook_q = HookPoint()
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        self.hook_attn_in = HookPoint()
        self.hook_q_input = HookPoint()
        self.hook_k_input = HookPoint()
        self.hook_v_input = HookPoint()
        self.hook_attn_scores = HookPoint()
        self.hook_pattern = HookPoint()
        self.hook_z = HookPoint()
        self.hook_result = HookPoint()

    @property
    def U(self) -> Float[Tensor, "head d_model d_head"]:
        """The subspace bases as stored; not orthonormal unless training made them so."""
        rows = at_hand(self.u_proj).view(self.cfg.n_heads, self.cfg.d_head, self.cfg.d_model)
        return rows.transpose(1, 2)  # [head, d_model, d_head]

    W_Q = W_K = W_V = U

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """The output map of each head."""
        return self._output_weight().T.reshape(self.cfg.n_heads, self.cfg.d_head, self.cfg.d_model)

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The output bias; zeros if the layer has none."""
        if self.out_proj is not None and self.out_proj.bias is not None:
            return at_hand(self.out_proj, "bias")
        return at_hand(self.u_proj).new_zeros(self.cfg.d_model)

    def _output_weight(self) -> Float[Tensor, "d_model inner"]:
        """Returns the output matrix as torch's Linear stores it."""
        if self.out_proj is not None:
            return at_hand(self.out_proj)
        weight = at_hand(self.u_proj)  # [inner, d_model]
        if self.cfg.variant == "c":
            return weight.T
        if self.cfg.variant == "n":
            return -weight.T
        if self.cfg.variant == "t":
            return weight
        return torch.eye(self.cfg.d_model, dtype=weight.dtype, device=weight.device)

    def forward(
        self,
        z: Float[Tensor, "batch pos d_model"],
        norm: HookedNorm | None = None,
        context: Context | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Returns MSSA(norm(z)), or MSSA(z) of a z that is normalised already.

        The norm is an argument where inputs are split, which are normalised once per role.
        """
        inputs = None if norm is None else self.split_inputs(z)
        roles = (
            self._tied_codes(z if norm is None else norm(z), context)
            if norm is None or inputs is None
            else self._split_codes(inputs, norm, context)
        )
        return self._combine(self.hook_z(attend(self, *roles, context)))

    def _tied_codes(
        self, x: Float[Tensor, "batch pos d_model"], context: Context | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the code in its three roles, each `[batch, pos, head, d_head]`.

        A hooked role gets a copy of its own: an in-place edit of q must not reach k and v, which
        are the same tensor.
        """
        u = self._placed(
            self.hook_u(self.u_proj(x).unflatten(-1, (self.cfg.n_heads, self.cfg.d_head))), context
        )
        roles = (self.hook_q, self.hook_k, self.hook_v)
        q, k, v = (role(u.clone() if is_hooked(role) else u) for role in roles)
        return q, k, v

    def _placed(
        self, u: Float[Tensor, "batch pos head d_head"], context: Context | None
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Returns the codes as the roles get them: rotated if positions are rotations."""
        return rotate(u, context.rotation, self.cfg.ln_eps) if context and context.rotation else u

    def _split_codes(
        self, inputs: tuple[Tensor, ...], norm: HookedNorm, context: Context | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the codes from an input per head, or per role and head; hook_u does not fire.

        These are TransformerLens' use_attn_in and use_split_qkv_input.
        """
        pattern = "batch pos head d_model, head d_model d_head -> batch pos head d_head"
        q, k, v = (
            point(self._placed(einsum(norm(given), self.U, pattern), context))
            for given, point in zip(inputs, (self.hook_q, self.hook_k, self.hook_v), strict=True)
        )
        return q, k, v

    def _combine(
        self, heads: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos d_model"]:
        if self.cfg.use_attn_result:
            return sum_of_results(self, heads)
        joined = heads.flatten(2)  # [batch, pos, head * d_head]
        if self.out_proj is not None:
            return self.out_proj(joined)
        return (
            joined
            if self.cfg.variant in ("identity", "crate", "fix")
            else F.linear(joined, self._output_weight())
        )


def attend(
    attn: Attention,
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos head d_head"],
    v: Float[Tensor, "batch pos head d_head"],
    context: Context | None,
) -> Float[Tensor, "batch pos head d_head"]:
    """Returns the values that each query gathers; `attn` has the hook points."""
    if context and context.past is not None:
        k, v = context.past.extend(context.layer, k, v)
    heads = torch.matmul(_pattern(attn, q, k, context), v.transpose(1, 2))
    return heads.transpose(1, 2)  # [batch, pos, head, d_head]


def _pattern(
    attn: Attention,
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    context: Context | None,
) -> Float[Tensor, "batch head query key"]:
    """Returns the attention pattern.

    It is a function of its own so that the scores are freed before the pattern is used.
    """
    scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1))
    scores *= q.shape[-1] ** -0.5  # the largest tensor of a layer: in place, before hooks see it
    if context:
        scores.masked_fill_(~context.mask, -torch.inf)
    scores = attn.hook_attn_scores(scores)
    if context and context.blind is not None:
        return attn.hook_pattern(_softmax_of_seen(scores, context.blind))
    return attn.hook_pattern(scores.softmax(dim=-1))


def _softmax_of_seen(
    scores: Float[Tensor, "batch head query key"], blind: Bool[Tensor, "batch one query one"]
) -> Float[Tensor, "batch head query key"]:
    """Returns the softmax, with zeros for queries that see no key.

    Their scores are all -inf, whose softmax and its gradient are NaN.
    """
    return scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)


def sum_of_results(
    attn: Attention, heads: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch pos d_model"]:
    """Returns the output as the sum of each head's own contribution, `hook_result`."""
    pattern = "batch pos head d_head, head d_head d_model -> batch pos head d_model"
    sign = attn._result_contribution_scale  # hook_result is what the head contributes
    return sign * attn.hook_result(sign * einsum(heads, attn.W_O, pattern)).sum(dim=2) + attn.b_O
