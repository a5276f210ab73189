"""Measures of complexity of a trained network, after arXiv 2411.17182 Table 1.

The definitions are those of Dziugaite et al. 2020 (arXiv 2010.11924), whose names the table has.
MEASURES is the table of functions; each takes a `Trained`. Weights: the matrices of the linear
maps, so neither biases, LayerNorm, positions nor CLS. An output map that is tied to U counts once.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import layerwise
import torch
from torch import Tensor

from crate_interp import HookedCrate

DRAWS, HALVINGS, WIDEST, DROP = 10, 15, 2.0, 0.1  # of the search for sigma


@dataclass(frozen=True)
class Trained:
    """A trained network, its start, and the images and labels that it was trained on.

    sigma: the noise that `noise_level` found.
    """

    model: HookedCrate
    start: HookedCrate
    images: Tensor
    labels: Tensor
    sigma: float

    @property
    def m(self) -> int:
        """The number of training images."""
        return len(self.labels)

    @cached_property
    def weights(self) -> list[Tensor]:
        """The matrices, in float64."""
        return matrices(self.model)

    @cached_property
    def moves(self) -> list[Tensor]:
        """The matrices minus their start."""
        pairs = zip(self.weights, matrices(self.start), strict=True)
        return [weight - start for weight, start in pairs]

    @cached_property
    def spectral(self) -> list[float]:
        """The squared spectral norms |W|_2^2."""
        return [squared_norm(weight) for weight in self.weights]

    @cached_property
    def margin(self) -> float:
        """The 10th percentile over training images of f_y - max_{j != y} f_j."""
        return margin(self.model, self.images, self.labels)


def matrices(model: HookedCrate) -> list[Tensor]:
    """Returns the matrices of the linear maps in float64: every parameter with two axes."""
    return [weight.detach().double() for weight in model.parameters() if weight.ndim == 2]


def squared_norm(weight: Tensor) -> float:
    """Returns |W|_2^2, the largest squared singular value."""
    return float(torch.linalg.matrix_norm(weight, ord=2) ** 2)


def squares(weights: list[Tensor]) -> list[float]:
    """Returns the squared Frobenius norms |W|_F^2."""
    return [float(weight.square().sum()) for weight in weights]


@torch.no_grad()
def margin(model: HookedCrate, images: Tensor, labels: Tensor) -> float:
    """Returns the 10th percentile of the label's logit minus the best other.

    Raises ValueError unless it is above 0, as 1/margin^2 orders networks only then.
    """
    logits = model(images).double()
    right = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -math.inf).amax(dim=1)
    found = float(torch.quantile(right - others, 0.1))
    if found <= 0:
        raise ValueError(
            f"the 10th percentile of the margins is {found:.3g}: give a network that classifies "
            "nine tenths of its training images rightly, by training it longer."
        )
    return found


@torch.no_grad()
def noise_level(model: HookedCrate, images: Tensor, labels: Tensor) -> float:
    """Returns the sigma at which Gaussian noise on the matrices costs 0.1 of training accuracy.

    Bisection in [0, 2] in 15 steps, each the mean accuracy over 10 draws; the same draws at every
    step. Dziugaite et al.'s code has noise of deviation sigma^2 where sigma is meant: here it is
    sigma.
    """
    noisy = copy.deepcopy(model)
    pairs = list(zip(noisy.parameters(), model.parameters(), strict=True))
    pairs = [(into, weight) for into, weight in pairs if weight.ndim == 2]
    generator = torch.Generator().manual_seed(0)
    draws = [
        [torch.randn(weight.shape, generator=generator) for _, weight in pairs]
        for _ in range(DRAWS)
    ]

    def accuracy(sigma: float) -> float:
        hits = 0.0
        for draw in draws:
            for (into, weight), noise in zip(pairs, draw, strict=True):
                into.copy_(weight + sigma * noise)
            hits += float((noisy(images).argmax(dim=-1) == labels).double().mean())
        return hits / DRAWS

    low, high, whole = 0.0, WIDEST, accuracy(0.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if whole - accuracy(middle) > DROP else (middle, high)
    return (low + high) / 2


@torch.no_grad()
def path_norm(model: HookedCrate) -> float:
    """Returns the sum of the outputs on an image of ones with all weights squared, in float64.

    In a linear network it is the sum over all paths of the product of the squared weights. What has
    no path is settled so: LayerNorm is left out, as the paper does; attention averages with the
    softmax of the squared network; ISTA is its linear part I + eta (D - D^T D), entries squared,
    without the threshold. Tied output maps are squared as maps.
    """
    cfg: Any = model.cfg
    values = cfg.patch_size[0] * cfg.patch_size[1] * cfg.channels
    patch: Any = model.embed
    embedded = patch.proj.weight.double().square() @ torch.ones(values, dtype=torch.float64)
    embedded = embedded + patch.proj.bias.double().square()
    tokens = embedded.expand(cfg.n_tokens - 1, -1)
    z = torch.cat([model.cls_token[0].double().square(), tokens])
    z = z + model.pos_embed[0].double().square()
    blocks: Any = model.blocks
    for block in blocks:
        codes = z @ block.attn.U.double().square()  # [head, pos, d_head]
        pattern = (codes @ codes.mT / math.sqrt(cfg.d_head)).softmax(dim=-1)
        heads = pattern @ codes @ block.attn.W_O.double().square()
        mid = z + heads.sum(dim=0) + block.attn.b_O.double().square()
        z = mid @ block.mlp.linear(torch.eye(cfg.d_model)).double().square()
    out = z[0] @ model.unembed.W_U.double().square() + model.unembed.b_U.double().square()
    return float(out.sum())


def root(value: float, m: int) -> float:
    """Returns sqrt(value / m), the form in which other measures than logarithms enter the table."""
    return math.sqrt(value / m)


def halved(value: float, m: int) -> float:
    """Returns (value - ln m) / 2, the form in which logarithms enter the table."""
    return (value - math.log(m)) / 2


def log_product(norms: list[float]) -> float:
    """Returns the logarithm of a product."""
    return sum(math.log(norm) for norm in norms)


def pac_bayes(square: float, t: Trained) -> float:
    """Returns `square / (4 sigma^2) + ln(m / sigma) + 10`."""
    return square / (4 * t.sigma**2) + math.log(t.m / t.sigma) + 10


def over_margin(t: Trained) -> float:
    """Returns -2 ln(margin), what dividing by the squared margin adds to a logarithm."""
    return -2 * math.log(t.margin)


def shares(moves: list[Tensor], t: Trained) -> float:
    """Returns the sum over matrices of |moves|_F^2 / |W|_2^2."""
    return sum(square / norm for square, norm in zip(squares(moves), t.spectral, strict=True))


def spec_main(moves: list[Tensor], t: Trained) -> float:
    """Returns the logarithm of prod |W|_2^2 / margin^2 times `shares`."""
    return log_product(t.spectral) + over_margin(t) + math.log(shares(moves, t))


def _logs(norms: Callable[[Trained], list[float]], name: str) -> dict[str, Callable]:
    """Returns the four measures made from the squared norms of the matrices.

    A sum is their number times the geometric mean of the factors.
    """

    def of(t: Trained, summed: bool, margin: bool) -> float:
        log = log_product(norms(t)) + (over_margin(t) if margin else 0)
        n = len(t.weights)
        return halved(math.log(n) + log / n if summed else log, t.m)

    return {
        f"{'sum' if summed else 'prod'}-of-{name}{'/margin' * margin}":
            lambda t, summed=summed, margin=margin: of(t, summed, margin)
        for margin in (False, True) for summed in (True, False)
    }  # fmt: skip


MEASURES: dict[str, Callable[[Trained], float]] = {
    "l2-norm": lambda t: root(sum(squares(t.weights)), t.m),
    "l2-norm-init": lambda t: root(sum(squares(t.moves)), t.m),
    "params": lambda t: root(sum(weight.numel() for weight in t.weights), t.m),
    "1/margin": lambda t: root(1 / t.margin**2, t.m),
    **_logs(lambda t: t.spectral, "spec"),
    "fro/spec": lambda t: root(shares(t.weights, t), t.m),
    "spec-init-main": lambda t: halved(spec_main(t.moves, t), t.m),
    "spec-orig-main": lambda t: halved(spec_main(t.weights, t), t.m),
    **_logs(lambda t: squares(t.weights), "fro"),
    "fro-distance": lambda t: root(sum(squares(t.moves)), t.m),
    "spec-distance": lambda t: root(sum(map(squared_norm, t.moves)), t.m),
    "param-norm": lambda t: root(sum(squares(t.weights)), t.m),
    "path-norm": lambda t: root(path_norm(t.model), t.m),
    "pac-bayes-init": lambda t: root(pac_bayes(sum(squares(t.moves)), t), t.m),
    "pac-bayes-orig": lambda t: root(pac_bayes(sum(squares(t.weights)), t), t.m),
    "1/pac-bayes-flatness": lambda t: root(1 / t.sigma**2, t.m),
    # eq. 11 of arXiv 2411.17182: summed over layers, stream as it is
    "SRR": lambda t: float(layerwise.layer_measures(t.model, t.images, "stream").sum()),
}


def measured(trained: Trained) -> dict[str, float]:
    """Returns every measure of a network; larger should mean a larger gap of generalisation."""
    return {name: float(measure(trained)) for name, measure in MEASURES.items()}
