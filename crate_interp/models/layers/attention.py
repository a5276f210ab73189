"""Attention: MSSA, the compression step of CRATE, and the attention of a plain transformer."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from crate_interp.config import CrateConfig
from crate_interp.models.layers import Bases, Codes, HeadBias, Stream
from crate_interp.models.layers.context import Context, rotate
from crate_interp.models.layers.norm import HookedNorm, HookedPart, is_hooked
from crate_interp.models.runtimes import at_hand, bias_of

Inputs = tuple[Float[Tensor, "batch pos head d_model"], ...]  # of query, key and value
Roles = Iterable[Codes]  # query, key and value
_INTO_HEADS = "batch pos head d_model, head d_model d_head -> batch pos head d_head"


class Attention(HookedPart):
    """What every attention has: an output map of its heads.

    A subclass adds its own weights and `forward`. gamma: with LayerScale, the learned factor of
    each feature of the output; W_O and b_O include it.
    """

    out_proj: nn.Linear | None
    hook_z: HookPoint
    hook_result: HookPoint
    # the sign that TransformerLens applies when it sums heads
    _result_contribution_scale: float = 1.0

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gamma = nn.Parameter(torch.ones(cfg.d_model)) if cfg.layer_scale else None

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """The output map of each head."""
        weight = self._output_weight().T
        weight = weight if self.gamma is None else weight * self.gamma
        return weight.reshape(self.cfg.n_heads, self.cfg.d_head, self.cfg.d_model)

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The output bias; zeros if the layer has none."""
        if self.out_proj is None:
            return self.W_O.new_zeros(self.cfg.d_model)
        bias = bias_of(self.out_proj)
        return bias if self.gamma is None else bias * self.gamma

    @property
    def b_Q(self) -> HeadBias:
        """The bias of the queries; zeros if the layer has none, as for b_K and b_V."""
        return self.W_O.new_zeros(self.cfg.n_heads, self.cfg.d_head)

    b_K = b_V = b_Q

    def of_stream(self, z: Stream, norm: HookedNorm, context: Context | None) -> Stream:
        """Returns the attention of norm(z)."""
        return self(norm(z), context=context)

    def _output_weight(self) -> Float[Tensor, "d_model inner"]:
        """Returns the output matrix as torch's Linear stores it."""
        assert self.out_proj is not None
        return at_hand(self.out_proj)

    def _written(self, heads: Codes) -> Stream:
        """Returns what the heads write into the stream."""
        if self.cfg.use_attn_result:
            pattern = "batch pos head d_head, head d_head d_model -> batch pos head d_model"
            # hook_result holds each head's contribution with this sign
            sign = self._result_contribution_scale
            results = self.hook_result(sign * einsum(heads, self.W_O, pattern))
            return sign * results.sum(dim=2) + self.b_O
        out = self._output(heads)
        return out if self.gamma is None else self.gamma * out

    def _output(self, heads: Codes) -> Stream:
        assert self.out_proj is not None
        return self.out_proj(heads.flatten(2))  # [batch, pos, head * d_head]


class SubspaceCodes(nn.Module):
    """The map to the codes Z U_k, which CRATE, ToST and CBT have in place of three maps."""

    cfg: CrateConfig
    u_proj: nn.Linear
    hook_u: HookPoint

    @property
    def U(self) -> Bases:
        """The subspace bases as stored; they are orthonormal only if training made them so."""
        rows = at_hand(self.u_proj).view(self.cfg.n_heads, self.cfg.d_head, self.cfg.d_model)
        return rows.transpose(1, 2)  # [head, d_model, d_head]

    def _codes(self, x: Stream) -> Codes:
        return self.hook_u(self.u_proj(x).unflatten(-1, (self.cfg.n_heads, self.cfg.d_head)))


class PatternAttention(Attention):
    """Attention by a pattern of queries and keys, as in CRATE and in a plain transformer.

    A subclass adds the weights, `codes` and `split_codes`.
    """

    def _add_points(self) -> None:
        self.add_points(
            "hook_q", "hook_k", "hook_v", "hook_attn_in", "hook_q_input", "hook_k_input",
            "hook_v_input", "hook_attn_scores", "hook_pattern", "hook_z", "hook_result",
        )  # fmt: skip

    def codes(self, x: Stream, context: Context | None) -> Sequence[Codes]:
        """Returns queries, keys and values of the normalised stream, before their hooks."""
        raise NotImplementedError

    def split_codes(self, inputs: Inputs, norm: HookedNorm, context: Context | None) -> Roles:
        """Returns queries, keys and values from separate inputs `[batch, pos, head, d_model]`."""
        raise NotImplementedError

    def forward(
        self,
        z: Stream,
        norm: HookedNorm | None = None,
        context: Context | None = None,
        *,
        queries: int | None = None,
    ) -> Float[Tensor, "batch query d_model"]:
        """Returns the attention of norm(z), or of z if it is already normalised.

        The norm is an argument because with split inputs the input of each role (query, key, value)
        is normalised separately. queries: how many of the first tokens ask; None means all.
        """
        inputs = None if norm is None else self.split_inputs(z)
        if norm is None or inputs is None:
            roles: Iterable[Tensor] = self.codes(z if norm is None else norm(z), context)
        else:
            roles = self.split_codes(inputs, norm, context)
        # a hooked role gets its own copy: the roles are the same tensor or views of one tensor, so
        # an edit in place would change the other roles too
        q, k, v = (
            point(role.clone() if is_hooked(point) else role)
            for point, role in zip((self.hook_q, self.hook_k, self.hook_v), roles, strict=True)
        )
        q = q if queries is None else q[:, :queries]
        if context and context.past is not None:
            k, v = context.past.extend(context.layer, k, v)
        gathered = torch.matmul(self._pattern(q, k, context), v.transpose(1, 2))
        return self._written(self.hook_z(gathered.transpose(1, 2)))  # [batch, pos, head, d_head]

    def split_inputs(self, z: Stream) -> Inputs | None:
        """Returns the separate inputs of queries, keys and values, if inputs are split.

        With `cfg.use_split_qkv_input` query, key and value each have a copy; with `cfg.use_attn_in`
        they share one copy. Returns None if neither switch is on.
        """
        if not (self.cfg.use_split_qkv_input or self.cfg.use_attn_in):
            return None
        wide = z.unsqueeze(2).expand(-1, -1, self.cfg.n_heads, -1)  # [batch, pos, head, d_model]
        if self.cfg.use_attn_in:
            return (self.hook_attn_in(wide.clone()),) * 3
        points = (self.hook_q_input, self.hook_k_input, self.hook_v_input)
        return tuple(point(wide.clone()) for point in points)

    def of_stream(self, z: Stream, norm: HookedNorm, context: Context | None) -> Stream:
        """Returns the attention of norm(z).

        The norm runs before the attention module, so that tools that watch modules count it once.
        With split inputs, the norm runs inside the module.
        """
        if self.cfg.use_split_qkv_input or self.cfg.use_attn_in:
            return self(z, norm, context)
        return super().of_stream(z, norm, context)

    def _pattern(
        self,
        q: Float[Tensor, "batch query head d_head"],
        k: Float[Tensor, "batch key head d_head"],
        context: Context | None,
    ) -> Float[Tensor, "batch head query key"]:
        """Returns the attention pattern.

        This is a separate function so that the scores are freed before the pattern is used.
        """
        scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1))
        # the scores are a layer's largest tensor, so they are scaled in place, before hooks see
        # them
        scores *= q.shape[-1] ** -0.5
        if context and context.mask is not None:
            scores.masked_fill_(~context.mask, -torch.inf)
        scores = self.hook_attn_scores(scores)
        if context and context.blind is not None:
            # a query that sees no key has only scores of -inf; their softmax would be NaN
            seen = scores.masked_fill(context.blind, 0.0).softmax(dim=-1)
            return self.hook_pattern(seen.masked_fill(context.blind, 0.0))
        pattern = scores.softmax(dim=-1)
        if context and context.cut is not None:
            pattern = pattern.masked_fill(context.cut, 0.0)
        return self.hook_pattern(pattern)


class MSSA(SubspaceCodes, PatternAttention):
    """Attention whose query, key and value are the same code.

    `MSSA(X) = sum_k softmax(C_k C_k^T / sqrt(p)) C_k W_O,k (+ b)` with C_k = X U_k `[pos, d_head]`
    for X = LN(Z^l). Paper: arXiv 2306.01129 eq. 11-12; code: CRATE `model/crate.py` `Attention`. As
    in the code and unlike the paper, there is a scale 1/sqrt(p) and no prefactor p/(N eps^2).

    The output map W_O `[head, d_head, d_model]` depends on `cfg.variant` (arXiv 2411.17182). crate:
    learned, with a bias if `cfg.output_bias`. fix: the same, frozen at its random start. c: U_k^T
    (tied). n: -U_k^T. t: the transpose of the stacked U^T. identity: the concatenated heads. One
    head that spans the vision stream has no output matrix in variants crate and fix, as in the
    official code.

    In language models a query sees the keys that its `Context` shows. nanochat-crate rotates and
    normalises the codes first: hook_u sees them before this change; hook_q, hook_k and hook_v see
    them after it. So the values are rotated too.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__(cfg)
        inner, bias = cfg.n_heads * cfg.d_head, cfg.output_bias
        self.u_proj = nn.Linear(cfg.d_model, inner, bias=cfg.code_bias)
        self.out_proj = nn.Linear(inner, cfg.d_model, bias=bias) if cfg.output_matrix else None
        if cfg.variant == "fix" and self.out_proj is not None:
            self.out_proj.requires_grad_(False)
        self.hook_u = HookPoint()
        self._add_points()

    W_Q = W_K = W_V = SubspaceCodes.U

    def _output_weight(self) -> Float[Tensor, "d_model inner"]:
        if self.out_proj is not None:
            return super()._output_weight()
        weight = at_hand(self.u_proj)  # [inner, d_model]
        if self.cfg.variant == "c":
            return weight.T
        if self.cfg.variant == "n":
            return -weight.T
        if self.cfg.variant == "t":
            return weight
        return torch.eye(self.cfg.d_model, dtype=weight.dtype, device=weight.device)

    def codes(self, x: Stream, context: Context | None) -> Sequence[Codes]:
        """Returns the code in its three roles, which are the same tensor."""
        return (self._placed(self._codes(x), context),) * 3

    def split_codes(self, inputs: Inputs, norm: HookedNorm, context: Context | None) -> Roles:
        """Returns the code of each role's own input; hook_u does not fire."""
        return (self._placed(einsum(norm(given), self.U, _INTO_HEADS), context) for given in inputs)

    def _placed(self, u: Codes, context: Context | None) -> Codes:
        """Returns the codes that the roles use: rotated if positions are rotations."""
        return rotate(u, context.rotation, self.cfg.ln_eps) if context and context.rotation else u

    def _output(self, heads: Codes) -> Stream:
        if self.out_proj is not None:
            return super()._output(heads)
        if self.cfg.variant in ("identity", "crate", "fix"):
            return heads.flatten(2)
        return F.linear(heads.flatten(2), self._output_weight())


class SelfAttention(PatternAttention):
    """The attention of a plain transformer: query, key and value differ, and there is no U.

    Code: crate-lm/crate-lm `gpt.py` `CausalSelfAttention`; CRATE-alpha `clipa_model.py`, text
    tower. The hook points are the same as in TransformerLens; hook_u is missing.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__(cfg)
        inner = cfg.n_heads * cfg.d_head
        self.qkv_proj = nn.Linear(cfg.d_model, 3 * inner, bias=cfg.output_bias)
        self.out_proj = nn.Linear(inner, cfg.d_model, bias=cfg.output_bias)
        self._add_points()

    def _role(self, index: int) -> Bases:
        rows = at_hand(self.qkv_proj).unflatten(0, (3, self.cfg.n_heads, self.cfg.d_head))[index]
        return rows.transpose(1, 2)  # [head, d_model, d_head]

    W_Q, W_K, W_V = (property(lambda self, role=role: self._role(role)) for role in range(3))
    b_Q, b_K, b_V = (  # pyright: ignore[reportIncompatibleMethodOverride]
        property(lambda self, role=role: self._biases()[role]) for role in range(3)
    )

    def codes(self, x: Stream, context: Context | None) -> Sequence[Codes]:
        """Returns queries, keys and values, which are views of one tensor."""
        return self.qkv_proj(x).unflatten(-1, (3, self.cfg.n_heads, self.cfg.d_head)).unbind(dim=2)

    def split_codes(self, inputs: Inputs, norm: HookedNorm, context: Context | None) -> Roles:
        """Returns queries, keys and values, each from its own input."""
        return [
            einsum(norm(given), self._role(index), _INTO_HEADS) + bias
            for index, (given, bias) in enumerate(zip(inputs, self._biases(), strict=True))
        ]

    def _biases(self) -> Float[Tensor, "role head d_head"]:
        return bias_of(self.qkv_proj).view(3, self.cfg.n_heads, self.cfg.d_head)
