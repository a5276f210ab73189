"""The steps after attention: ISTA, steps on overcomplete dictionaries, and a plain MLP."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from crate_interp.config import CrateConfig
from crate_interp.models.layers import Atoms, Hidden, Rows, Stream
from crate_interp.models.layers.norm import HookedPart
from crate_interp.models.runtimes import at_hand, bias_of


@dataclass(frozen=True)
class Lasso:
    """A sparse step, seen as proximal gradient steps on a lasso.

    The lasso is the minimum over z >= 0 of `|y - D z|^2 / 2 + <lambd, z>`; lambd is one number, or
    one for each atom. The sparse step takes `count` gradient steps of size `eta`, starting at its
    own input (`warm`) or at zero.
    """

    d: Float[Tensor, "d_model d_mlp"]
    eta: float
    lambd: Float[Tensor, "*atoms"]
    warm: bool
    count: int

    def start(self, y: Float[Tensor, "*batch pos d_model"]) -> Float[Tensor, "*batch pos d_mlp"]:
        """Returns the code from which the steps start: the input's positive part, or zero."""
        return torch.relu(y) if self.warm else y.new_zeros(*y.shape[:-1], self.d.shape[1])

    def run(
        self, y: Float[Tensor, "*batch pos d_model"], *penalties: Float[Tensor, "*atoms"]
    ) -> list[Float[Tensor, "*batch pos d_mlp"]]:
        """Returns the codes after the steps, one for each penalty in place of `lambd`."""
        start = y if self.warm else self.start(y)
        moved = start - self.eta * ((start @ self.d.mT - y) @ self.d)
        codes = []
        for lambd in penalties:
            code = torch.relu(moved - self.eta * lambd)
            for _ in range(self.count - 1):
                grad = (code @ self.d.mT - y) @ self.d
                code = torch.relu(code - self.eta * grad - self.eta * lambd)
            codes.append(code)
        return codes


class SparseStep(HookedPart):
    """The step that follows attention in a layer.

    A step is a subclass with `forward`, `lasso`, `linear`, and `W_out` or `written`. The forward
    takes the normalised stream `[batch, pos, d_model]` and returns the tensor that the layer adds
    to the stream, or that replaces the stream. `STEPS` below maps the name of a step in a config to
    its class.
    """

    def lasso(self) -> Lasso | str:
        """Returns the step's lasso, or a sentence that says why there is none.

        The lasso has the step's current weights, eta and lambd.
        """
        raise NotImplementedError

    def linear(self, y: Rows) -> Rows:
        """Returns the linear part of the step, with every atom switched on: `W_out W_in y`.

        Thresholds and biases only add constants if every atom is on, and are left out. y: rows of
        the normalised stream.
        """
        return (y @ self.W_in) @ self.W_out

    def written(self) -> Atoms:
        """Returns the direction in the stream that each atom writes."""
        return self.W_out


class ISTA(SparseStep):
    """One proximal gradient step of the non-negative lasso, started at its own input.

    The code is the new stream: `ISTA(y) = ReLU(y - eta D^T (D y - y) - eta lambd)` for y =
    LN(Z^{l+1/2}) as columns; in rows D y is `y @ D.T`. Paper: arXiv 2306.01129 eq. 17; code: CRATE
    `model/crate.py` `FeedForward`. Terms are added in the order of the official code, so that
    outputs agree bit for bit.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.eta, self.lambd = cfg.eta, cfg.lambd
        self.D = _kaiming(cfg.d_model, cfg.d_mlp)
        self.add_points(
            "hook_recon", "hook_gram", "hook_corr", "hook_grad", "hook_pre", "hook_post",
        )  # fmt: skip

    def forward(self, y: Stream) -> Hidden:
        """Returns the code after one step of ISTA, `relu(y + eta D^T (y - D y) - eta lambda)`."""
        pre = self.hook_pre(y + self._step(y))
        return self.hook_post(F.relu(pre))

    def _step(self, y: Stream) -> Hidden:
        """Returns `-eta grad - eta lambd`.

        This is a separate function so that the summands are freed before the sum is used.
        """
        gram = self.hook_gram(F.linear(self.hook_recon(F.linear(y, self.D)), self.D.T))
        corr = self.hook_corr(F.linear(y, self.D.T))
        # equal to -(eta * grad) to the bit, with one pass less
        step = self.hook_grad(gram - corr) * -self.eta
        step -= self.eta * self.lambd
        return step

    def lasso(self) -> Lasso:
        """Returns the step's lasso: one step, started at its own input."""
        return Lasso(self.D.detach(), self.eta, self.D.new_tensor(self.lambd), warm=True, count=1)

    def linear(self, y: Rows) -> Rows:
        """Returns `y - eta (D^T D y - D^T y)` in rows."""
        return y - self.eta * ((y @ self.D.T) @ self.D - y @ self.D)

    def written(self) -> Atoms:
        """Returns the axes of the stream, because the code is the stream."""
        return torch.eye(self.D.shape[1]).to(self.D)


class DecodedStep(SparseStep):
    """A sparse step with a dictionary D that encodes, a dictionary that decodes, and no bias."""

    D: nn.Parameter
    decoder = "D1"  # the name of the parameter that decodes

    # the dictionary that encodes, [d_model, d_mlp], the one that decodes, [d_mlp, d_model], zeros
    W_in = property(lambda self: at_hand(self, "D"))
    W_out = property(lambda self: at_hand(self, self.decoder).T)
    b_out = property(lambda self: at_hand(self, "D").new_zeros(self.D.shape[0]))


class OvercompleteODL(DecodedStep):
    """Two ISTA steps from zero on an overcomplete dictionary; a second dictionary decodes.

    `z1 = ReLU(eta D^T y - eta lambd)`, `z2 = ReLU(z1 - eta D^T (D z1 - y) - eta lambd)`, output
    `D1 z2`, for y = LN(Z^{l+1/2}) as columns; D and D1 are `[d_model, d_mlp]`. Paper: CRATE-alpha,
    arXiv 2405.20299; code: CRATE-alpha `torch_inference/model/crate_alpha.py`. With
    `sparse_step="tied-odl"` D1 is D: CRATE-LM `crate_overcomplete.py`, whose `ista.weight` is D^T.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.eta, self.lambd = cfg.eta, cfg.lambd
        self.D = _kaiming(cfg.d_model, cfg.d_mlp)
        if cfg.sparse_step == "tied-odl":
            self.decoder = "D"
        else:
            self.D1 = _kaiming(cfg.d_model, cfg.d_mlp)
        self.add_points(
            "hook_corr", "hook_pre_init", "hook_post_init", "hook_recon", "hook_error", "hook_grad",
            "hook_pre", "hook_post",
        )  # fmt: skip

    def forward(self, y: Stream) -> Stream:
        """Returns the decoded code after two ISTA steps on an overcomplete dictionary."""
        threshold = self.eta * self.lambd
        corr = self.hook_corr(y @ self.D)
        code = self.hook_post_init(F.relu(self.hook_pre_init(self.eta * corr - threshold)))
        error = self.hook_error(self.hook_recon(code @ self.D.T) - y)
        grad = self.hook_grad(error @ self.D)
        code = self.hook_post(F.relu(self.hook_pre(code + (grad * -self.eta - threshold))))
        return code @ self.W_out

    def lasso(self) -> Lasso:
        """Returns the step's lasso: two steps, started at zero."""
        return Lasso(self.D.detach(), self.eta, self.D.new_tensor(self.lambd), warm=False, count=2)

    def linear(self, y: Rows) -> Rows:
        """Returns `D1 (z1 - eta D^T (D z1 - y))` for `z1 = eta D^T y`, in rows."""
        code = self.eta * (y @ self.D)
        return (code - self.eta * ((code @ self.D.T - y) @ self.D)) @ self.W_out


class ThresholdODL(DecodedStep):
    """One step from zero with a learned threshold per atom, decoded with a second dictionary.

    `z = ReLU(D^T y - threshold)`, output `D1 z`, for y = rms(Z^{l+1/2}) as columns; D and D1 are
    `[d_model, d_mlp]`. Code: nanochat-crate `nanochat/crate.py`, which calls this step ODL. Unlike
    CRATE-alpha's step, it has no second step, no eta and no lambd.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.D = _kaiming(cfg.d_model, cfg.d_mlp)
        self.D1 = nn.Parameter(torch.zeros(cfg.d_model, cfg.d_mlp))
        self.threshold = nn.Parameter(torch.zeros(cfg.d_mlp))
        self.add_points("hook_pre", "hook_post")

    def forward(self, y: Stream) -> Stream:
        """Returns the decoded code, `relu(D^T y - threshold) D1^T`."""
        return self.hook_post(F.relu(self.hook_pre(y @ self.D - self.threshold))) @ self.D1.T

    def lasso(self) -> Lasso | str:
        """Returns the step's lasso, one step of size 1 from zero, unless a threshold is negative.

        The penalty of each atom is its threshold.
        """
        if bool((self.threshold < 0).any()):
            return "some learned thresholds are negative, but no penalty is negative"
        return Lasso(self.D.detach(), 1.0, self.threshold.detach(), warm=False, count=1)


class MLP(SparseStep):
    """`W_out act(W_in y + b_in) + b_out`, the MLP of a plain transformer.

    act is ReLU (gpt-baseline), GELU (ToST) or the tanh form of GELU (CLIP's text tower). gamma:
    with LayerScale, the learned factor of each feature of the output; W_out and b_out include it.
    """

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()
        self.fc_in = nn.Linear(cfg.d_model, cfg.d_mlp, bias=cfg.output_bias)
        self.fc_out = nn.Linear(cfg.d_mlp, cfg.d_model, bias=cfg.output_bias)
        self.gamma = nn.Parameter(torch.ones(cfg.d_model)) if cfg.layer_scale else None
        self.gelu = _GELUS.get(cfg.sparse_step)
        self.add_points("hook_pre", "hook_post")

    def forward(self, y: Stream) -> Stream:
        """Returns what the MLP adds to the stream."""
        out = self.fc_out(self.hook_post(self._hidden(y)))
        return out if self.gamma is None else self.gamma * out

    def _hidden(self, y: Stream) -> Hidden:
        """Returns the activations.

        This is a separate function so that the pre-activations are freed before the output is made.
        """
        pre = self.hook_pre(self.fc_in(y))
        return F.relu(pre) if self.gelu is None else F.gelu(pre, approximate=self.gelu)

    def lasso(self) -> str:
        """Returns why an MLP has no lasso."""
        return "the layer has an MLP, no dictionary"

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        """The map to the hidden units, `[d_model, d_mlp]`."""
        return at_hand(self.fc_in).T

    @property
    def W_out(self) -> Atoms:
        """The map from the hidden units, `[d_mlp, d_model]`."""
        weight = at_hand(self.fc_out).T
        return weight if self.gamma is None else weight * self.gamma

    @property
    def b_in(self) -> Float[Tensor, "d_mlp"]:
        """The bias of the hidden units, `[d_mlp]`; zeros if there is none."""
        return bias_of(self.fc_in)

    @property
    def b_out(self) -> Float[Tensor, "d_model"]:
        """The bias of the output, `[d_model]`; zeros if there is none."""
        bias = bias_of(self.fc_out)
        return bias if self.gamma is None else bias * self.gamma


class NoStep(SparseStep):
    """What an attention-only layer has after attention: nothing. It has no hook point."""

    def __init__(self, cfg: CrateConfig) -> None:
        super().__init__()

    def lasso(self) -> str:
        """Returns why there is no lasso."""
        return "the layer is attention alone, without a sparse step"


def _kaiming(d_model: int, d_mlp: int) -> nn.Parameter:
    """Returns a dictionary with the official initialisation: uniform, variance 2 / d_mlp."""
    return nn.Parameter(nn.init.kaiming_uniform_(torch.empty(d_model, d_mlp)))


# `sparse_step` of a config -> the step after attention
STEPS: dict[str, type[SparseStep]] = {
    "ista": ISTA,
    "odl": OvercompleteODL,
    "tied-odl": OvercompleteODL,
    "threshold": ThresholdODL,
    "mlp-relu": MLP,
    "mlp-gelu": MLP,
    "mlp-gelu-exact": MLP,
    "none": NoStep,
}
# the form of GELU of a step; the others have ReLU
_GELUS = {"mlp-gelu": "tanh", "mlp-gelu-exact": "none"}
