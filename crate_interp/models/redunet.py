"""ReduNet: a network built forward from data, whose layers are steps up the rate reduction."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from crate_interp.core import checks
from crate_interp.measures.rates import coding_rate, mcr2_coding_rate
from crate_interp.models.saving import SharedModel

Features = Float[Tensor, "sample d_model"]
Labels = Int[Tensor, "sample"]
DRAWS = 8  # how often the audit shuffles a layer's update over the samples
ALONG = 0.5  # the cosine from which an update is along the gradient, as in ci.audit


@dataclass(frozen=True, kw_only=True)
class ReduNetConfig:
    """The config of a ReduNet: its sizes, and eta, eps and lambd of `redunet`."""

    d_model: int
    n_layers: int
    n_classes: int
    eta: float
    eps: float
    lambd: float
    model_name: str | None = None
    family: str = "redunet"

    def __post_init__(self) -> None:
        for name, least in (("d_model", 1), ("n_layers", 1), ("n_classes", 2)):
            checks.count(name, getattr(self, name), least=least)
        checks.one_of("family", self.family, ("redunet",))
        checks.positive("eta", self.eta)
        checks.positive("eps", self.eps)
        checks.non_negative("lambd", self.lambd)
        if self.model_name is not None:
            checks.one_line("model_name", self.model_name)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain JSON values."""
        return dataclasses.asdict(self)


class ReduNetBlock(nn.Module):
    """One layer: `z+ = normalise(z + eta (E z - sum_j g_j pi_j(z) C_j z))`.

    E `[d_model, d_model]` expands all samples, C_j `[class, d_model, d_model]` compresses class j,
    and g_j `[class]` is the share of class j. pi_j(z) is the label where it is known, and
    `softmax_j(-lambd |C_j z|)` for a new sample.
    """

    E: nn.Parameter
    C: nn.Parameter
    g: nn.Parameter

    def __init__(self, cfg: ReduNetConfig) -> None:
        super().__init__()
        self.cfg, d, count = cfg, cfg.d_model, cfg.n_classes
        for name, shape in (("E", (d, d)), ("C", (count, d, d)), ("g", (count,))):
            setattr(self, name, nn.Parameter(torch.zeros(shape), requires_grad=False))
        for name in ("resid_pre", "expand", "compress", "pi", "step", "resid_post"):
            setattr(self, f"hook_{name}", HookPoint())

    def forward(self, z: Features, pi: Float[Tensor, "sample class"] | None = None) -> Features:
        """Returns the features after the layer, of length one."""
        points: Any = self
        z = points.hook_resid_pre(z)
        expand = points.hook_expand(z @ self.E.T)
        compress = points.hook_compress(torch.einsum("jde,ne->njd", self.C, z))
        soft = (-self.cfg.lambd * compress.norm(dim=-1)).softmax(dim=-1)
        member = points.hook_pi(soft if pi is None else pi)
        step = expand - torch.einsum("nj,j,njd->nd", member, self.g, compress)
        return points.hook_resid_post(F.normalize(z + self.cfg.eta * points.hook_step(step)))

    def fit(self, z: Features, labels: Labels, eps: float) -> None:
        """Sets the operators to the gradients of R and R^c of these samples."""
        eye = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)

        def operator(rows: Tensor) -> Tensor:
            a = z.shape[1] / (len(rows) * eps**2)
            return a * torch.linalg.inv(eye + a * rows.T @ rows).contiguous()

        parts = [z[labels == number] for number in range(len(self.g))]
        self.E.data, self.C.data = operator(z), torch.stack([operator(part) for part in parts])
        self.g.data = z.new_tensor([len(part) for part in parts]) / len(z)


class ReduNet(HookedRootModule, SharedModel):
    """A ReduNet, which `ci.redunet` builds; it maps features to features of length one.

    Hook points of layer l, under `blocks.{l}.`: hook_resid_pre and hook_resid_post, z before and
    after; hook_expand, E z; hook_compress, C_j z `[sample, class, d_model]`; hook_pi, the
    membership `[sample, class]`; hook_step, `E z - sum_j g_j pi_j C_j z`. `run_with_cache` and
    `run_with_hooks` are TransformerLens' own, and `save_pretrained` writes what `ci.load` reads.
    """

    def __init__(self, cfg: ReduNetConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.blocks = nn.ModuleList(ReduNetBlock(cfg) for _ in range(cfg.n_layers))
        self.setup()

    def forward(self, features: Features, labels: Labels | None = None) -> Features:
        """Returns features `[sample, d_model]` after all layers.

        Args:
            features: What the network was built from, or new samples; rows are scaled to length
                one.
            labels: The class of each sample, if it is known; then memberships are not estimated.
        """
        z, pi = _unit(features, self.cfg.d_model).to(self.blocks[0].E), None  # pyright: ignore
        if labels is not None:
            pi = F.one_hot(_classes(labels, z, self.cfg.n_classes), self.cfg.n_classes).to(z)
        for block in self.blocks:
            z = block(z, pi)
        return z

    @torch.no_grad()
    def audit(self, features: Features, labels: Labels, *, seed: int = 0) -> pd.DataFrame:
        """Tells of each layer whether it raised the rate reduction of samples, and how.

        A layer's update is compared with the gradient of `Delta R = R(Z) - sum_j g_j R(Z_j)` along
        the sphere, and with the same updates given to other samples. arXiv 2105.10446.

        Args:
            features: Samples `[sample, d_model]`.
            labels: Their classes, `[sample]`.
            seed: Draws the shuffled updates.

        Returns:
            A row for each layer: layer, rate_before, rate_after (Delta R in nats), shuffled (the
            largest Delta R after 8 shuffled updates), raises ("yes" if Delta R rises, and above
            all shuffled updates; "no" if it does not rise; else "can't tell"), cosine (of update
            and gradient), along ("yes" if it is at least .5, else "no").

        Raises:
            ValueError: For features or labels that do not fit the network.
        """
        _, cache = self.run_with_cache(features, labels)
        here, rows = ReduNetBlock(self.cfg), []
        random = torch.Generator().manual_seed(checks.count("seed", seed, least=0))
        labels = _classes(labels, cache["blocks.0.hook_resid_pre"], self.cfg.n_classes)
        pi = F.one_hot(labels, self.cfg.n_classes).double()
        if not bool(pi.any(dim=0).all()):
            raise ValueError(f"labels: give samples of each of {self.cfg.n_classes} classes.")
        for layer in range(self.cfg.n_layers):
            points = (f"blocks.{layer}.hook_resid_{side}" for side in ("pre", "post"))
            before, after = (cache[point].double() for point in points)
            here.fit(before, labels, self.cfg.eps)
            update, steepest = (_tangent(before, one - before) for one in (after, here(before, pi)))
            orders = [torch.randperm(len(before), generator=random) for _ in range(DRAWS)]
            others = (F.normalize(before + (after - before)[order]) for order in orders)
            start, end, *rest = (
                rate_reduction(z, labels, self.cfg.eps) for z in (before, after, *others)
            )
            raises = "no" if end <= start else "yes" if end > max(rest) else "can't tell"
            cosine = float(F.cosine_similarity(update.flatten(), steepest.flatten(), dim=0))
            along = "yes" if cosine >= ALONG else "no"
            rows.append((layer, start, end, max(rest), raises, cosine, along))
        columns = ["layer", "rate_before", "rate_after", "shuffled", "raises", "cosine", "along"]
        return pd.DataFrame(rows, columns=columns)


@torch.no_grad()
def redunet(
    features: Features,
    labels: Labels,
    *,
    layers: int = 30,
    eta: float = 0.5,
    eps: float = 0.5**0.5,
    lambd: float = 500.0,
) -> ReduNet:
    """Builds a ReduNet forward from labelled features: each layer raises their rate reduction.

    With samples as the columns of Z `[d, m]`, m_j of them in class j, `a = d / (m eps^2)` and
    `a_j = d / (m_j eps^2)`, a layer has the operators `E = a (I + a Z Z^T)^-1` and
    `C_j = a_j (I + a_j Z_j Z_j^T)^-1`. With `g_j = m_j / m` it maps z to
    `normalise(z + eta (E z - sum_j g_j pi_j(z) C_j z))`. Of the building samples pi_j is the
    label, so that the layer is one gradient step of `Delta R = R(Z) - sum_j g_j R(Z_j)`, projected
    to the sphere; then Z is what the layer returns, and the next layer is made. Of new samples
    `pi_j(z) = softmax_j(-lambd |C_j z|)`. Nothing is trained. Chan, Yu, You, Qi, Wright and Ma,
    arXiv 2105.10446. R has the prefactor 1/2 of `ci.measures.coding_rate`.

    Args:
        features: Samples `[sample, d_model]`, scaled here to length one.
        labels: Their classes `[sample]`: whole numbers from 0, each of them at least once.
        layers: How many layers to build.
        eta: The size of a step. If it is too large, Delta R falls.
        eps: The precision of the rates, which the formulas square.
        lambd: How strictly a new sample belongs to the class that compresses it best.

    Returns:
        The network, in the dtype of the features; it is built in float64.

    Raises:
        ValueError: For features or labels that cannot be used, and for a layer that does not raise
            Delta R, which a smaller eta mends.
    """
    checks.count("layers", layers)
    z = _unit(features).double()
    known = _classes(labels, z)
    count, sizes = int(known.max()) + 1, known.bincount()
    if count < 2 or not bool(sizes.all()):
        raise ValueError(f"labels: classes have {sizes.tolist()} samples; give 0, 1, ..., each.")
    cfg = ReduNetConfig(
        d_model=z.shape[1], n_layers=layers, n_classes=count, eta=eta, eps=eps, lambd=lambd
    )
    net, pi, rate = ReduNet(cfg).double(), F.one_hot(known).double(), rate_reduction(z, known, eps)
    for number, block in enumerate(net.blocks):
        block.fit(z, known, eps)  # pyright: ignore
        z = block(z, pi)
        before, rate = rate, rate_reduction(z, known, eps)
        if rate < before * (1 - 1e-9):
            raise ValueError(
                f"layer {number} lowers the rate reduction from {before:.4g} to {rate:.4g} nats: "
                f"give eta below {eta:g}, or fewer layers."
            )
    return net.to(features.dtype).eval()


def rate_reduction(z: Features, labels: Labels, eps: float) -> float:
    """Returns `R(Z) - sum_j g_j R(Z_j)` of labelled samples, in nats."""
    return float(coding_rate(z, eps) - mcr2_coding_rate(z, labels, eps))


def _tangent(z: Features, update: Features) -> Features:
    return update - z * (z * update).sum(dim=1, keepdim=True)


def _unit(features: Features, width: int | None = None) -> Features:
    """Returns the rows at length one; raises ValueError for features that cannot be used."""
    shape: Any = getattr(features, "shape", ())
    good = isinstance(features, Tensor) and features.is_floating_point() and len(shape) == 2
    if not good or 0 in shape or width not in (None, shape[1]):
        wanted = f"floats [sample, {width or 'd_model'}]"
        raise ValueError(f"features={checks.quote(features)}: give {wanted}.")
    if not bool(features.isfinite().all()) or not bool(features.any(dim=1).all()):
        raise ValueError("features hold NaN, Inf or a row of zeros: leave those samples out.")
    wide = features.double()  # also of numbers whose squares float32 does not hold
    return F.normalize(wide / wide.abs().amax(dim=1, keepdim=True)).to(features.dtype)


def _classes(labels: Labels, z: Features, count: int | None = None) -> Labels:
    """Returns labels as long integers; raises ValueError for labels that cannot be used."""
    kinds = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
    good = isinstance(labels, Tensor) and labels.dtype in kinds and labels.shape == z.shape[:1]
    if not good or int(labels.min()) < 0 or int(labels.max()) >= (count or len(z)):
        few = f" from 0 to {count - 1}" if count else " from 0"
        raise ValueError(f"labels={checks.quote(labels)}: give {len(z)} whole numbers{few}.")
    return labels.long().to(z.device)
