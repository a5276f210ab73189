"""JoMA's hierarchical latent tree and network (arXiv 2310.00535, Table 1), as its release has them.

The released generator is not the paper's tree of probabilities: a class names N_ch latents of layer
1, each of them N_ch of layer 0, each of those N_ch tokens, and a sample is the union. A class has
one sample, so there are only as many inputs as classes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, LAYERS = 100, 30, 3  # M, T; the last token of the vocabulary fills up
PAD = VOCABULARY - 1


@dataclass(frozen=True)
class Tree:
    """The inputs of all classes, and which latents are on in them.

    tokens [class, pos]: the distinct columns, which are the first filling token and all that some
    class has others in; fills: how many equal filling tokens the first column stands for.
    latents: for layers 0 and 1, [class, latent] of 0 and 1.
    """

    tokens: Tensor
    fills: int
    latents: tuple[Tensor, Tensor]


def combinations(count: int, size: int, below: int, generator: torch.Generator) -> Tensor:
    """Returns `count` different sets of `size` numbers, as [count, below] of 0 and 1."""
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        chosen = torch.randperm(below, generator=generator)[:size]
        found[tuple(sorted(chosen.tolist()))] = None
    sets = torch.zeros(count, below)
    return sets.scatter_(1, torch.tensor(list(found)), 1.0)


def tree(classes: int, children: int, latents: tuple[int, int], seed: int) -> Tree:
    """Returns a random tree. latents: how many layers 0 and 1 have; children: N_ch."""
    generator = torch.Generator().manual_seed(seed)
    widths = (PAD, *latents, classes)
    below = [
        combinations(n, children, wide, generator)
        for wide, n in zip(widths[:-1], widths[1:], strict=True)
    ]
    on = [(below[2] > 0).float()]  # of layer 1, [class, latent]
    for sets in (below[1], below[0]):
        on.insert(0, (on[0] @ sets > 0).float())
    present, layer_0, layer_1 = on
    # the tokens of a class in order (the release has those of a Python set), behind filling tokens
    tokens = torch.arange(PAD).where(present > 0, -1).sort(dim=1).values[:, -LENGTH:]
    tokens = tokens.where(tokens >= 0, PAD)
    fills = int((tokens == PAD).all(dim=0).sum())  # at least 3: a class has at most 27 tokens
    return Tree(tokens[:, fills - 1 :], fills, (layer_0, layer_1))


class Layer(nn.Module):
    """Attention of one head with no output map, a ReLU MLP, and a LayerNorm after each."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.k, self.q, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.ln_attn, self.ln_mlp = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the stream and the hidden units, [batch, pos, d] and [batch, pos, hidden]."""
        scores = self.q(x) @ self.k(x).mT / math.sqrt(x.shape[-1])
        mixed = self.ln_attn(torch.softmax(scores + mask, dim=-1) @ self.v(x) + x)
        units = torch.relu(self.up(mixed))
        return self.ln_mlp(self.down(units) + mixed), units


class Network(nn.Module):
    """The network of Table 1: token embeddings without positions, three layers, a linear map."""

    def __init__(self, d: int, hidden: int, classes: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCABULARY, d)
            self.layers = nn.ModuleList([Layer(d, hidden) for _ in range(LAYERS)])
            self.out = nn.Linear(d, classes)

    def forward(self, tokens: Tensor, fills: int) -> tuple[Tensor, list[Tensor]]:
        """Returns logits at the last token, [batch, class], and each layer's hidden units.

        There are no positions, and attention is causal, so equal filling tokens at the start are
        equal in all layers: the first key counts `fills` times, and stands for all of them.
        """
        n = tokens.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)
        mask[:, 0] += math.log(fills)
        x, units = self.embed(tokens), []
        for layer in self.layers:
            x, hidden = layer(x, mask)
            units.append(hidden)
        return self.out(x[:, -1]), units


def train(model: Network, data: Tree, steps: int, rate: float, seed: int) -> float:
    """Trains as the release does, and returns the last accuracy.

    Adam with weight decay 1e-4 on batches of 128 labels. A label has one input, so a batch is the
    inputs of all classes, weighted by how often the label was drawn.
    """
    classes = len(data.tokens)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        drawn = torch.randint(classes, (128,), generator=generator)
        logits, _ = model(data.tokens, data.fills)
        losses = nn.functional.cross_entropy(logits, torch.arange(classes), reduction="none")
        optimizer.zero_grad()
        (losses @ torch.bincount(drawn, minlength=classes).float() / 128).backward()
        optimizer.step()
    with torch.no_grad():
        logits, _ = model(data.tokens, data.fills)
    return (logits.argmax(dim=1) == torch.arange(classes)).float().mean().item()


def best_correlation(latents: Tensor, units: Tensor, weights: Tensor) -> Tensor:
    """Returns NCorr: each latent's largest correlation with a unit over weighted samples, [latent].

    latents [sample, latent] and units [sample, unit], weights [sample] sum to one. A latent of zero
    variance gives 0: it correlates with nothing. So does a unit. The paper's code divides by a
    norm plus 1e-9, which gives the same 0.
    """
    a, b = (x.double() - weights.double() @ x.double() for x in (latents, units))
    root = weights.double().sqrt()[:, None]
    a, b = a * root, b * root
    norms = [x.norm(dim=0) for x in (a, b)]
    # what is constant leaves a norm of rounding alone
    a, b = (
        (x / norm).where(norm > 1e-6 * raw.abs().amax(dim=0).clamp_min(1e-30), 0.0)
        for x, norm, raw in zip((a, b), norms, (latents, units), strict=True)
    )
    return (a.mT @ b).amax(dim=1)
