"""Trains crate-tiny-induction, a CRATE-LM that continues what repeats, and its GPT twin.

    python demos/train_tiny_induction.py --out runs/crate-tiny-induction
    python demos/train_tiny_induction.py --out runs/gpt-tiny-induction --family gpt-baseline

It takes some minutes for each on one CPU core. A sequence is a separator and then a string of
random tokens, repeated to the end. The length of the string, the period, is 6 to 24; the periods 9,
14 and 19 are held out. A token of the first string cannot be known, and neither can the first of
the second; all others can, as they stand one period before. `--seed` gives another network and
other data: the embedded models are of seed 0, weights/ beside this file has seeds 1 and 2 of
crate-tiny-induction.

--beside: folders of other seeds, for the card. `crate_interp.load(folder)` loads the folder that it
writes.
"""

import copy
import json
import math
from argparse import Namespace
from pathlib import Path

import torch
import training
from safetensors.torch import load_file
from torch import Tensor

import crate_interp
from crate_interp import CrateConfig, HookedCrateLM

SAVED_STEPS = (0, 40, 160, 320, 640, 1280, 2560)  # the last step is the model itself
HELD_OUT = (9, 14, 19)  # periods
PERIODS = tuple(period for period in range(6, 25) if period not in HELD_OUT)
TOKENS, SEPARATOR = 32, 32
N_CTX, BATCH, STEPS, PEAK, DECAY = 49, 64, 5000, 2e-3, 0.01
COUNT = 512  # sequences of each period in the card's tables
GROUPS = {
    "of the training": PERIODS,
    "held out: " + ", ".join(map(str, HELD_OUT)): HELD_OUT,
    "longer: 25 to 30": tuple(range(25, 31)),
    "shorter: 2 to 5": tuple(range(2, 6)),
}

CARD = """---
license: apache-2.0
library_name: crate_interp
tags: [{family}, white-box-transformer, induction]
---
# {name}

A {family} model of {params:,} parameters ({n_layers} layers, {n_heads} heads, d_model {d_model}),
trained on nothing but repetition. Made for looking at a circuit; it knows nothing else.

* Data: a separator (token {separator}), then a string of random tokens (0 to {last}) that repeats
  to the end, {n_ctx} tokens in all. The length of the string, the period, is 6 to 24 without
  {held}, drawn anew for each sequence. The script makes all of it.
* Recipe: official initialisation; AdamW, learning rate {peak:g} (cosine, 5 % warm-up), betas 0.9
  and 0.98, weight decay {decay:g}, {steps:,} steps of {batch} sequences, seed {seed}.
* Share of the next tokens that it predicts, from the second token of the second string on:

{accuracy}

* Their loss, in nats per token:

{nats}

* Chance is 1 in {tokens}, {uniform:.3f} nats. "Last copy" predicts the token that followed the
  latest earlier copy of this one. It falls short of 1 because a string can have a token twice; the
  number is computed. "Shortest period" predicts by the shortest period that fits all tokens so far,
  on the sequences that the model is scored on.
* {count} sequences of each period. With a sequence as the unit the standard error of the accuracy
  on the held-out periods is {error:.4f}.
* Accuracy on the held-out periods along the training:
  {along}.
* Wall time: {minutes:.1f} minutes on one CPU core of two, shared. Script:
  demos/train_tiny_induction.py.
* The weights are float16, here and in steps/. The first are after step 0, before any training.
"""


def sequences(count: int, periods: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns random strings that repeat, each after a separator, [count, N_CTX]."""
    body = torch.arange(N_CTX - 1)
    chosen = torch.tensor(periods)[torch.randint(len(periods), (count,), generator=generator)]
    strings = torch.randint(TOKENS, (count, N_CTX - 1), generator=generator)
    tokens = strings.gather(1, body % chosen[:, None])
    return torch.cat([torch.full((count, 1), SEPARATOR), tokens], dim=1)


def known(tokens: Tensor, period: int) -> Tensor:
    """Returns which next tokens follow from those before, [batch, N_CTX - 1]."""
    places = torch.arange(tokens.shape[1] - 1)  # place t predicts token t + 1, body place t
    return (places > period).expand(len(tokens), -1)


def last_copy(period: int) -> float:
    """Returns the accuracy of predicting what followed the latest earlier copy of a token.

    The copy one period before is the latest one unless the string has the token again in between.
    Then the prediction is right by chance, but never if that copy is the wanted token itself.
    """
    other = 1 - 1 / TOKENS
    wrong = 1 - other ** (period - 2)  # a copy in between, other than the wanted token itself
    return 1.0 if period == 2 else other ** (period - 1) + wrong / TOKENS


def shortest_period(tokens: Tensor) -> Tensor:
    """Returns the next tokens by the shortest period that fits all before, [batch, N_CTX - 1].

    It is -1 where no period fits.
    """
    body = tokens[:, 1:]
    guess = torch.full_like(body, -1)
    for period in range(body.shape[1] - 1, 0, -1):  # a shorter one that fits takes its place
        fits = (body[:, period:] == body[:, :-period]).cummin(dim=1).values[:, :-1]
        ends = guess[:, period + 1 :]  # what follows body place period, period + 1, ...
        ends[fits] = body[:, 1:-period][fits]
    return guess


@torch.no_grad()
def scores(model: HookedCrateLM | None, period: int) -> tuple[float, float]:
    """Returns accuracy and loss over the tokens that can be known, on fresh sequences.

    None is the rule of the shortest period, which has no loss.
    """
    tokens = sequences(COUNT, (period,), torch.Generator().manual_seed(10_000 + period))
    which, wanted = known(tokens, period), tokens[:, 1:]
    if model is None:
        return (shortest_period(tokens) == wanted)[which].float().mean().item(), float("nan")
    logits = model(tokens)[:, :-1]
    right = (logits.argmax(dim=-1) == wanted)[which].float().mean().item()
    return right, torch.nn.functional.cross_entropy(logits[which], wanted[which]).item()


def mean_scores(model: HookedCrateLM | None, periods: tuple[int, ...]) -> list[float]:
    """Returns accuracy and loss, means over periods."""
    return torch.tensor([scores(model, period) for period in periods]).mean(dim=0).tolist()


def tables(models: dict[str, HookedCrateLM]) -> tuple[str, str]:
    """Returns the card's tables of accuracies and of losses, a column a model."""
    names = [*models, "last copy", "shortest period"]
    heads = [
        f"| periods | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
        for columns in (names, list(models))
    ]
    for group, periods in GROUPS.items():
        both = [mean_scores(model, periods) for model in models.values()]
        rules = [sum(map(last_copy, periods)) / len(periods), mean_scores(None, periods)[0]]
        for i, row in enumerate(([pair[0] for pair in both] + rules, [pair[1] for pair in both])):
            heads[i] += f"\n| {group} | " + " | ".join(f"{value:.3f}" for value in row) + " |"
    return heads[0], heads[1]


@torch.no_grad()
def sampled(model: HookedCrateLM, count: int, seed: int) -> tuple[float, float]:
    """Returns the accuracy on held-out periods and its standard error, a sequence as the unit."""
    shares = []
    for period in HELD_OUT:
        tokens = sequences(count, (period,), torch.Generator().manual_seed(seed + period))
        which = known(tokens, period)
        right = model(tokens)[:, :-1].argmax(dim=-1) == tokens[:, 1:]
        shares.append((right & which).sum(dim=1) / which.sum(dim=1))
    table = torch.stack(shares)  # [period, sequence]
    error = (table.var(dim=1) / count).sum().sqrt() / len(HELD_OUT)
    return table.mean().item(), error.item()


def along(model: HookedCrateLM, out: Path) -> str:
    """Returns the accuracies after the saved steps, in words."""
    step_model, parts = copy.deepcopy(model), []
    for step in SAVED_STEPS:
        state = load_file(out / "steps" / f"step-{step}.safetensors")
        step_model.load_state_dict(state)
        parts.append(f"{mean_scores(step_model, HELD_OUT)[0]:.3f} after {step:,} steps")
    parts.append(f"{mean_scores(model, HELD_OUT)[0]:.3f} at the end")
    return ",\n  ".join(", ".join(parts[i : i + 4]) for i in range(0, len(parts), 4))


def make_model(family: str, seed: int) -> HookedCrateLM:
    """Returns the untrained network."""
    torch.manual_seed(seed)
    name = f"{'crate' if family == 'crate-lm' else 'gpt'}-tiny-induction"
    return HookedCrateLM(CrateConfig(
        family=family, model_name=name, d_model=64, n_layers=3, n_heads=4, n_ctx=N_CTX,
        d_vocab=TOKENS + 1,
    ))  # fmt: skip


def train(args: Namespace) -> tuple[HookedCrateLM, float]:
    """Returns the trained model and the minutes that it took."""
    model = make_model(args.family, args.seed)

    def loss(step: int) -> Tensor:
        tokens = sequences(BATCH, PERIODS, training.draws(args.seed, step))
        return model.train()(tokens, "loss")

    minutes = training.fit(
        model, training.adamw(model, DECAY, 0.98), loss,
        lambda step: training.learning_rate(step, args.steps, PEAK), args.steps, args.out,
        [args.family, args.seed, args.steps], saved_steps=SAVED_STEPS,
    )  # fmt: skip
    return model.eval(), minutes


def main() -> None:
    args = training.arguments(
        __doc__, out=Path("runs/crate-tiny-induction"), family=("crate-lm", "gpt-baseline"), seed=0,
        steps=STEPS, beside=[Path()],
    )  # fmt: skip
    model, minutes = train(args)
    model.half().save_pretrained(args.out)
    model = crate_interp.load(args.out)  # the card is about the weights as they are saved
    models = {f"seed {args.seed} (this model)": model}
    models |= {folder.name: crate_interp.load(folder) for folder in args.beside}
    models["untrained"] = make_model(args.family, args.seed).eval()
    accuracy, nats = tables(models)
    training.write_card(
        args.out, CARD, model, vars(args), accuracy=accuracy, nats=nats, minutes=minutes,
        along=along(model, args.out), error=sampled(model, COUNT, 10_000)[1], peak=PEAK,
        decay=DECAY, batch=BATCH, tokens=TOKENS, last=TOKENS - 1, separator=SEPARATOR, n_ctx=N_CTX,
        count=COUNT, held=", ".join(map(str, HELD_OUT)), name=model.cfg.model_name,
        uniform=math.log(TOKENS),
    )  # fmt: skip
    print(json.dumps({"minutes": round(minutes, 2)}) + "\n" + accuracy)


if __name__ == "__main__":
    main()
