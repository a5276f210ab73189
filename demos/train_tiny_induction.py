"""Trains crate-tiny-induction, a CRATE-LM that continues what repeats, and its GPT twin.

    python demos/train_tiny_induction.py --out runs/crate-tiny-induction
    python demos/train_tiny_induction.py --out runs/gpt-tiny-induction --family gpt-baseline

It takes some minutes for each on one CPU core. A sequence is a separator and then a string of
random tokens, repeated to the end. The length of the string, the period, is 6 to 24; the periods 9,
14 and 19 are held out. A token of the first string cannot be known, and neither can the first of
the second; all others can, as they stand one period before. `--seed` gives another network and
other data.

You can interrupt it at any time: the same command goes on from the last save.
`crate_interp.load(folder)` loads the folder that it writes.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from training import learning_rate, save_resume, save_step, size_of

from crate_interp import CrateConfig, HookedCrateLM

SAVED_STEPS = (0, 40, 160, 320, 640, 1280, 2560)  # the last step is the model itself
HELD_OUT = (9, 14, 19)  # periods
PERIODS = tuple(period for period in range(6, 25) if period not in HELD_OUT)
TOKENS, SEPARATOR = 32, 32
N_CTX, BATCH, STEPS, PEAK, DECAY = 49, 64, 5000, 2e-3, 0.01

CARD = """---
license: apache-2.0
library_name: crate_interp
tags: [{family}, white-box-transformer, induction]
---
# {name}

A {family} model of {params:,} parameters ({n_layers} layers, {n_heads} heads, d_model {d_model}),
trained on nothing but repetition. Made for looking at a circuit that is there.

* Data: a separator, then {tokens} kinds of random tokens in a string that repeats to the end,
  {n_ctx} tokens in all. Periods 6 to 24 without {held}, drawn anew for each sequence.
* Recipe: official initialisation; AdamW, learning rate {peak:g} (cosine, 5 % warm-up), betas 0.9
  and 0.98, weight decay {decay:g}, {steps:,} steps of {batch} sequences, seed {seed}.
* Share of the tokens from the second of the second string on that it predicts, and their loss:

| | accuracy | nats per token |
|---|---|---|
{table}

* Two strings of the same tokens are now and then both right; chance is 1 in {tokens}.
* Wall time: {minutes:.1f} minutes. Script: demos/train_tiny_induction.py.
* steps/: the weights in float16 after steps {saved}.
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


@torch.no_grad()
def scores(model: HookedCrateLM, period: int, count: int = 512) -> tuple[float, float]:
    """Returns accuracy and loss over the tokens that can be known, on fresh sequences."""
    tokens = sequences(count, (period,), torch.Generator().manual_seed(10_000 + period))
    logits = model(tokens)[:, :-1]
    which, wanted = known(tokens, period), tokens[:, 1:]
    right = (logits.argmax(dim=-1) == wanted)[which].float().mean().item()
    loss = torch.nn.functional.cross_entropy(logits[which], wanted[which])
    return right, loss.item()


def table(models: dict[str, HookedCrateLM]) -> str:
    """Returns the rows of the card: periods that were trained, held out, and longer ones."""
    groups = {
        "periods of the training": PERIODS,
        f"held-out periods {', '.join(map(str, HELD_OUT))}": HELD_OUT,
        "longer periods, 25 to 30": tuple(range(25, 31)),
        "shorter periods, 2 to 5": tuple(range(2, 6)),
    }
    rows = []
    for name, model in models.items():
        for group, periods in groups.items():
            both = torch.tensor([scores(model, period) for period in periods]).mean(dim=0)
            rows.append(f"| {group}{name} | {both[0]:.3f} | {both[1]:.3f} |")
    return "\n".join(rows)


def make_model(family: str, seed: int) -> HookedCrateLM:
    """Returns the untrained network."""
    torch.manual_seed(seed)
    size: dict[str, Any] = dict(d_model=64, n_layers=3, n_heads=4, n_ctx=N_CTX, d_vocab=TOKENS + 1)
    name = f"{'crate' if family == 'crate-lm' else 'gpt'}-tiny-induction"
    return HookedCrateLM(CrateConfig(family=family, model_name=name, **size))


def train(args: argparse.Namespace) -> tuple[HookedCrateLM, float]:
    """Returns the trained model and the minutes that it took; saves resume.pt as it goes."""
    model, step, seconds = make_model(args.family, args.seed), 0, 0.0
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK, weight_decay=DECAY, betas=(0.9, 0.98)
    )
    resume, settings = args.out / "resume.pt", [args.family, args.seed, args.steps]
    if resume.exists():
        saved = torch.load(resume, weights_only=True)
        if saved["settings"] != settings:
            raise SystemExit(
                f"{resume} belongs to a run with other settings: remove it, or give another --out."
            )
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, seconds = saved["step"], saved["seconds"]
    bar = tqdm(total=args.steps, initial=step, desc="training", unit="step")
    while step < args.steps:
        started = time.perf_counter()
        if step in SAVED_STEPS:
            save_step(model, args.out, step)
        generator = torch.Generator().manual_seed(1_000_003 * (args.seed + 1) + step)
        tokens = sequences(BATCH, PERIODS, generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, PEAK)
        loss = model.train()(tokens, "loss")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, seconds = step + 1, seconds + time.perf_counter() - started
        bar.update()
        if step % 50 == 0:
            with open(args.out / "log.csv", "a") as log:
                log.write(f"{step},{loss.item():.4f},{seconds:.0f}\n")
        if step % 250 == 0 or step == args.steps:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
            save_resume(state | dict(settings=settings, seconds=seconds), resume)
    bar.close()
    return model.eval(), seconds / 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/crate-tiny-induction"))
    parser.add_argument("--family", choices=["crate-lm", "gpt-baseline"], default="crate-lm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model, minutes = train(args)
    rows = table({"": model, ", untrained": make_model(args.family, args.seed).eval()})
    model.save_pretrained(args.out)
    recipe = dict(peak=PEAK, decay=DECAY, steps=args.steps, batch=BATCH, seed=args.seed)
    data = dict(tokens=TOKENS, n_ctx=N_CTX, held=", ".join(map(str, HELD_OUT)))
    saved = ", ".join(map(str, SAVED_STEPS))
    names = dict(family=args.family, name=model.cfg.model_name, minutes=minutes)
    card = CARD.format(**names, **size_of(model), **recipe, **data, table=rows, saved=saved)
    (args.out / "README.md").write_text(card)
    print(json.dumps({"minutes": round(minutes, 2)}) + "\n" + rows)


if __name__ == "__main__":
    main()
