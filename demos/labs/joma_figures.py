"""JoMA's Figures 2, 3 and 4 (arXiv 2310.00535) at the constants of the released scripts."""

import numpy as np
import torch
from torch import Tensor

from crate_interp.measures import attention_entropy

# Figure 4: v' = (mu - v) o softmax(v^2 / 3)

TOKENS, START, RATE, ITERATIONS = 10, 0.05, 0.02, 5000


def targets(seed: int) -> Tensor:
    """Returns mu of the script, [10]: sorted uniform numbers from 1 to 4; seed 0 is published."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(TOKENS, generator=generator) * 3 + 1).sort().values


def entropies(mu: Tensor, *, attends: bool = True, iterations: int = ITERATIONS) -> Tensor:
    """Returns the entropy of softmax(v^2 / 3) before each iteration, `[iteration, *batch]`, nats.

    Each adds `eta (mu - v) o softmax(v^2 / 3)` to v; without attention the factor is 1 / 10. The
    paper's text says softmax(v^2), its script softmax(v^2 / 3). mu `[*batch, 10]`.
    """
    v, found = torch.full_like(mu, START), []
    for _ in range(iterations):
        pattern = torch.softmax(v**2 / 3, dim=-1)
        found.append(attention_entropy(pattern[..., None, :])[..., 0])
        v = v + RATE * (mu - v) * (pattern if attends else 1 / TOKENS)
    return torch.stack(found)


def asymptote(mu: Tensor) -> Tensor:
    """Returns the entropy of softmax(mu^2 / 3), where v ends. mu `[*batch, 10]` -> `[*batch]`."""
    return attention_entropy(torch.softmax(mu**2 / 3, dim=-1)[..., None, :])[..., 0]


# Figures 2 and 3: softmax attention and a linear layer learn to name the class of a column of X

M_C, CLASSES, D, T, LEARNING_RATE = 20, 20, 30, 0.5, 0.1
KINDS = ("gauss", "random")  # of the inputs


def inputs(kind: str, generator: torch.Generator) -> Tensor:
    """Returns X [token, class]: ten common tokens, and ten that belong to classes if "gauss"."""
    x = torch.rand(M_C, CLASSES, generator=generator) / 2
    if kind == "gauss":
        token, label = torch.arange(M_C // 2), torch.arange(CLASSES)
        x[: M_C // 2] = torch.exp(-((token[:, None] - label / CLASSES * M_C / 2) ** 2) / 30)
    return x / x.sum(dim=0)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Returns the correlation over the last axis, `[...]`."""
    a, b = a - a.mean(dim=-1, keepdim=True), b - b.mean(dim=-1, keepdim=True)
    return (a * b).sum(dim=-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-8)


def joint_training(kind: str, seeds: int, iterations: int) -> dict[str, np.ndarray]:
    """Returns what Figures 2 and 3 draw, from full-batch descent, all seeds side by side.

    The embedding is the identity, so the rows of W [30, class] are V, the query's row, and nine
    rows that nothing moves; |W|^2 is of all of them, and b is the mean of X, as in the script.
    whole, squares, rest: correlation of the logits z with Theorem 1's estimate, its part
    `sum_k v_k^2 / 2T` and its part `-|W|^2 mean / 2T`, [iteration, seed]; v0: the weights of
    class 0, [iteration, seed, token]; x: the X of the first seed.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    x = torch.stack([inputs(kind, generator) for generator in generators])
    w = torch.stack([torch.randn(D, CLASSES, generator=g) for g in generators]) / 100
    z = torch.stack([torch.randn(M_C, generator=g) for g in generators]) / 100
    w.requires_grad_()
    z.requires_grad_()
    mean, labels = x.mean(dim=-1), torch.arange(CLASSES).expand(seeds, -1)
    found = {"whole": [], "squares": [], "rest": [], "v0": []}
    constant = None
    for _ in range(iterations):
        with torch.no_grad():
            squares = (w[:, :M_C] ** 2).sum(dim=-1) / 2 / T
            rest = -mean * (w**2).sum(dim=(-2, -1))[:, None] / 2 / T
            constant = z - squares - rest if constant is None else constant
            for name, part in [("whole", squares + rest + constant), ("squares", squares)]:
                found[name].append(correlation(z, part))
            found["rest"].append(correlation(z, rest))
            found["v0"].append(w[:, :M_C, 0].clone())
        b = torch.softmax(z[..., None] / T + x.log(), dim=-2)  # e^(z/T) x over its sum
        logits = b.mT @ w[:, :M_C] + w[:, M_C : M_C + 1]  # the query's row: the residual
        loss = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="sum") / CLASSES
        slopes = torch.autograd.grad(loss, [w, z])
        with torch.no_grad():
            for parameter, slope in zip((w, z), slopes, strict=True):
                parameter -= LEARNING_RATE * slope
    return {name: torch.stack(rows).numpy() for name, rows in found.items()} | {"x": x[0].numpy()}
