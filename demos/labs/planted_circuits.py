"""Language models whose circuits are known, because they are written into tied weights by hand.

The stream is a sum of orthonormal features without a mean: this token, its place, a pointer to a
place, the next token. Norms have an eps so large that they leave it as it is. Atoms are features,
so a sparse step keeps what it has atoms for. demos/docs/pages/labs/truth.md says why it is so.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import crate_interp as ci

HEADS, BUSY, WEAK = 6, 2, 2  # heads of a layer; of these write much, or little, to no purpose
LOUD, FAINT, EPS = 2.0, 0.05, 1e4  # lengths of what they write (features: 1); eps of the norms
TOKENS, PLACES, MODULUS = 13, 11, 7
Parts = list[tuple[str, int, Tensor]]  # a feature, a first column of a head, `[number, columns]`


class Network(NamedTuple):
    """A model and the truth about it."""

    model: Any
    tokens: Tensor  # texts; the last token but one is the query, the last the answer
    other: Tensor  # the same with other answers
    heads: set[tuple[int, int]]  # (layer, head) of those that do the work
    atoms: dict[tuple[int, str], Tensor]  # layer and feature -> numbers of its atoms
    sources: Tensor  # the place that the pointer of each text has


def place_codes(table: Tensor, width: int) -> Tensor:
    """Returns codes `[place, place]` of a tied head that attends by a causal table of logits.

    S = sym(L) + 4 |sym(L)| (N - max(p, j)); the second part, the ladder, is one for all keys of p.
    """
    both, place = table.tril() + table.tril(-1).T, torch.arange(len(table))
    steps = len(table) - torch.maximum(place[:, None], place)
    scores = both + 4 * torch.linalg.matrix_norm(both, 2) * steps
    values, vectors = torch.linalg.eigh(scores * width**0.5)
    return vectors * values.clamp(min=0).sqrt()


class Writer:
    """Writes heads and dictionaries into a model in the terms of features `[d_model, number]`."""

    def __init__(self, seed: int, layers: int, width: int, atoms: int, **sizes: int) -> None:
        self.random, d_model = torch.Generator().manual_seed(seed), 1 + sum(sizes.values())
        square = torch.randn(d_model, d_model, generator=self.random, dtype=torch.float64)
        square[:, 0] = 1  # so that the other columns have no mean
        columns = torch.linalg.qr(square)[0][:, 1:].split([*sizes.values()], dim=1)
        self.features, self.width = dict(zip(sizes, columns, strict=True)), width
        cfg = ci.CrateConfig(
            family="crate-lm", d_model=d_model, n_layers=layers, n_heads=HEADS, d_head=width,
            d_mlp=atoms, n_ctx=sizes["place"], d_vocab=sizes["token"], eta=1.0, ln_eps=EPS,
            lambd=0.1 * ("first" in sizes), ln_final_eps=EPS,
        )  # fmt: skip
        self.model: Any = ci.HookedCrateLM(cfg).double().eval()
        for name, weight in self.model.blocks.named_parameters():
            weight.data.fill_(EPS**0.5 if "ln" in name and "weight" in name else 0)
        embedded = self.features["token"] + self.features["next"]
        for column in self.features.get("mixed", embedded[:, :0]).T:  # of half of the tokens
            some = torch.randperm(sizes["token"], generator=self.random)[: sizes["token"] // 2]
            embedded[:, some] += column[:, None] / len(some)
        self.model.embed.weight.data = embedded.T.contiguous()
        self.model.pos_embed.data = self.features["place"].T.contiguous()
        self.order = [torch.randperm(HEADS, generator=self.random) for _ in range(layers)]
        self.atoms: dict[tuple[int, str], Tensor] = {}

    def head(self, layer: int, number: int, reads: Parts, writes: Parts) -> tuple[int, int]:
        """Writes a head, and returns it."""
        at, attn = int(self.order[layer][number]), self.model.blocks[layer].attn
        rows = slice(at * self.width, (at + 1) * self.width)
        for weight, parts in ((attn.u_proj.weight.data[rows], reads),
                              (attn.out_proj.weight.data[:, rows].T, writes)):  # fmt: skip
            for name, start, matrix in parts:
                features = self.features[name][:, : len(matrix)]
                weight[start : start + matrix.shape[1]] += (features @ matrix).T
        return layer, at

    def bystanders(self, layer: int, first: int) -> None:
        """Writes heads that no answer needs, loud ones and faint ones; the rest is dead."""
        places, eye = self.features["place"].shape[1], torch.eye(self.model.cfg.d_vocab).double()
        for number in range(BUSY):
            table, back = torch.zeros(places, places).double(), number + 1
            table[range(back, places), range(places - back)] = 16.0  # the token before is copied
            reads = [("place", 0, place_codes(table, self.width)), ("token", places, eye)]
            self.head(layer, first + number, reads, [(f"idle{number}", places, LOUD * eye)])
        for number in range(first + BUSY, first + BUSY + WEAK):
            drawn = [(name, 0, torch.randn(one.shape[1], self.width, generator=self.random).to(eye))
                     for name, one in self.features.items() if name != "place"]  # fmt: skip
            writes = [(name, 0, FAINT * self.width**-1.0 * one) for name, _, one in drawn]
            self.head(layer, number, drawn, writes)

    def dictionary(self, layer: int, **parts: Tensor) -> None:
        """Writes atoms `[d_model, number]` by name, in a random order."""
        d = self.model.blocks[layer].mlp.D
        order = torch.randperm(d.shape[1], generator=self.random)
        for name, columns in parts.items():
            self.atoms[layer, name], order = order.tensor_split([columns.shape[1]])
            d.data[:, self.atoms[layer, name]] = columns


def induction(seed: int, *, margin: float = 6.0, copies: int = 1, count: int = 64) -> Network:
    """Returns a network that goes on as a text went on after the earlier copy of a token.

    Texts are token 0, eight different tokens, a copy of one of the first seven, and the token after
    the one copied. margin: by how many nats the head of layer 1 prefers its token (6: attention of
    .97; at 12 it is hard). copies: how many equal heads share the work of each.
    """
    width, eye, place = 2 * PLACES + TOKENS, torch.eye(TOKENS).double(), torch.eye(PLACES).double()
    idle = {"idle0": TOKENS, "idle1": TOKENS}
    sizes = {"token": TOKENS, "place": PLACES, "pointer": PLACES, "mixed": 6} | idle
    writer, texts = Writer(seed, 2, width, sum(sizes.values()), **sizes, next=TOKENS), []
    for _ in range(count):
        words = 1 + torch.randperm(TOKENS - 1, generator=writer.random)
        copied = torch.randperm(7, generator=writer.random)[:2].tolist()
        texts.append([[0, *words[:8], words[at], words[at + 1], at + 1] for at in copied])
    (both, of), start = (torch.tensor(texts), writer.features), PLACES + TOKENS
    match, table = (16 * width**0.5) ** 0.5, -45 * place
    table[1:, 0] = 8.0  # the sink
    reads = [("place", 0, place_codes(table, width)), ("token", PLACES, match * eye),
             ("place", start, 8 * place)]  # fmt: skip
    said = [("pointer", start, place / 8 / copies)]
    heads = {writer.head(0, k, reads, said) for k in range(copies)}
    writer.bystanders(0, copies)
    writer.dictionary(0, **{name: of[name] for name in sizes})
    match, after, spoken = (margin * width**0.5) ** 0.5, torch.zeros_like(place), eye.clone()
    after[0, 0] = after[range(2, PLACES), range(1, PLACES - 1)] = 1.0  # where a pointer leads
    spoken[0, 0] = 0  # nothing is said of the first token
    codes = place_codes(-(4 * margin + 12) * place, width)
    reads = [("place", 0, codes), ("place", PLACES, match * after),
             ("pointer", PLACES, match * place), ("token", 2 * PLACES, 3 * spoken)]  # fmt: skip
    said = [("next", 2 * PLACES, eye / 3 / copies)]
    heads |= {writer.head(1, k, reads, said) for k in range(copies)}
    writer.bystanders(1, copies)
    writer.dictionary(1, **{name: of[name] for name in ("next", *idle)})
    writer.model.ln_final.weight.data.fill_(8 * EPS**0.5)
    ends = heads, writer.atoms, both[:, 0, -1]
    return Network(writer.model, both[:, 0, :-1], both[:, 1, :-1], *ends)


def modular_addition(seed: int, *, count: int = 64) -> Network:
    """Returns a network of one layer that says a + b mod 7 after the text "a b ="."""
    places, eye = 4, torch.eye(MODULUS + 1).double()
    sizes = dict.fromkeys(("token", "next", "idle0", "idle1"), len(eye)) | {"place": places}
    width, sizes = places + len(eye), sizes | {"first": MODULUS, "second": MODULUS}
    writer = Writer(seed, 1, width, MODULUS**2 + 2 * len(eye), **sizes)
    pairs = torch.randint(MODULUS, (count, 2), generator=writer.random)
    moved, rows = pairs.clone(), torch.arange(count)  # one summand becomes another
    moved[rows, rows % 2] += torch.randint(1, MODULUS, (count,), generator=writer.random)
    tokens, other = (
        torch.stack([*one.T, torch.full_like(rows, MODULUS), one.sum(dim=1) % MODULUS], dim=1)
        for one in (pairs, moved % MODULUS)
    )
    heads = set()
    for at, name in enumerate(("first", "second")):
        table = torch.zeros(places, places).double()
        table[at:, at] = 16.0
        reads = [("place", 0, place_codes(table, width)), ("token", places, 3 * eye)]
        heads.add(writer.head(0, at, reads, [(name, places, eye[:MODULUS] / 3)]))
    writer.bystanders(0, 2)
    (a, b), of = torch.cartesian_prod(*[torch.arange(MODULUS)] * 2).T, writer.features
    columns = of["first"][:, a] + of["second"][:, b] + of["next"][:, (a + b) % MODULUS]
    columns = (columns + 2 * of["place"][:, 2:3]) * 7**-0.5
    writer.dictionary(0, pair=columns, idle0=of["idle0"], idle1=of["idle1"])
    # the threshold lies between a pair at its place, 4, and what lacks one of these, 3 or less
    writer.model.blocks[0].ln2.weight.data.mul_(0.1 * 7**0.5 / 3.5)
    writer.model.ln_final.weight.data.fill_(2000 * EPS**0.5)
    return Network(writer.model, tokens, other, heads, writer.atoms, pairs[:, 0])
