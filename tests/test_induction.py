"""The models that continue what repeats: the rules beside them, what they reach, their training."""

import argparse
import re
import sys
from pathlib import Path

import pytest
import torch

import crate_interp as ci
from crate_interp.checkpoints.hub import ASSETS

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import train_tiny_induction as demo

WEIGHTS = Path(demo.__file__).parent / "weights"
HELD_OUT = "held out: 9, 14, 19"


def drawn(period, count, seed=0):
    return demo.sequences(count, (period,), torch.Generator().manual_seed(seed))


def column(card, row):
    """The numbers of a row of the card's first table, by the names of the columns."""
    lines = [line for line in card.splitlines() if line.startswith("|")]
    names, values = (
        [cell.strip() for cell in next(line for line in lines if line.startswith(start)).split("|")]
        for start in ("| periods", f"| {row}")
    )
    return {name: float(value) for name, value in zip(names[2:-1], values[2:-1], strict=True)}


def test_sequences_repeat_and_only_what_follows_is_known():
    tokens = drawn(7, 5)
    assert tokens.shape == (5, demo.N_CTX) and (tokens[:, 0] == demo.SEPARATOR).all()
    assert torch.equal(tokens[:, 8:], tokens[:, 1:-7]) and tokens[:, 1:].max() < demo.TOKENS
    # tokens 1 to 7 are the first string, token 8 is the first that repeats, token 9 is known
    wanted = torch.arange(demo.N_CTX - 1) + 1 >= 9
    assert torch.equal(demo.known(tokens, 7), wanted.expand(5, -1))
    assert not set(demo.HELD_OUT) & set(demo.PERIODS) and len(demo.PERIODS) == 16


def by_last_copy(row, place):
    """A slow way to what followed the latest earlier copy of the token at `place`."""
    earlier = [i for i in range(1, place) if row[i] == row[place]]
    return row[earlier[-1] + 1]


def by_shortest_period(row, place):
    """A slow way to the next token by the shortest period that fits, -1 if none does."""
    body = row[1 : place + 1]
    for period in range(1, len(body)):
        if all(body[i] == body[i - period] for i in range(period, len(body))):
            return body[len(body) - period]
    return -1


@pytest.mark.parametrize("period", [2, 3, 9, 25])
def test_the_rules_beside_the_models(period):
    tokens = drawn(period, 60, seed=3)
    guess, which = demo.shortest_period(tokens), demo.known(tokens, period)
    slow = [[by_shortest_period(row, i) for i in range(demo.N_CTX - 1)] for row in tokens.tolist()]
    assert torch.equal(guess, torch.tensor(slow))
    rows = drawn(period, 400, seed=4).tolist()
    shares = torch.tensor(
        [
            [by_last_copy(row, i) == row[i + 1] for i in range(period + 1, demo.N_CTX - 1)]
            for row in rows
        ]
    ).float()
    error = shares.mean(dim=1).std() / len(rows) ** 0.5
    assert abs(shares.mean() - demo.last_copy(period)) <= 4 * error
    assert (guess == tokens[:, 1:])[which].float().mean() > 0.99


@pytest.mark.parametrize("name", ["crate-tiny-induction", "gpt-tiny-induction"])
def test_the_models_reach_what_their_cards_say(name):
    card = (ASSETS / name / "README.md").read_text()
    said = column(card, HELD_OUT)
    accuracy, error = demo.sampled(ci.load(name), 128, seed=77)
    card_error = float(re.search(r"periods is (\d\.\d+)", " ".join(card.split()))[1])
    assert abs(accuracy - said["seed 0 (this model)"]) <= 4 * (error + card_error) + 0.0005
    untrained, _ = demo.sampled(ci.load(name, revision="step-0"), 16, seed=77)
    assert untrained < 0.06 and abs(said["untrained"] - 1 / 32) < 0.01
    assert accuracy > said["last copy"] + 0.2 and said["shortest period"] > 0.999


def test_the_other_seeds_are_models_and_stand_in_the_card():
    said = column((ASSETS / "crate-tiny-induction" / "README.md").read_text(), HELD_OUT)
    shipped = ci.load("crate-tiny-induction")
    for seed in (1, 2):
        model = ci.load(WEIGHTS / f"crate-tiny-induction-seed-{seed}")
        accuracy, error = demo.sampled(model, 64, seed=78)
        assert abs(accuracy - said[f"seed {seed}"]) <= 5 * error + 0.0005
        assert model.cfg == shipped.cfg and not torch.equal(model.W_E, shipped.W_E)


@pytest.mark.parametrize("family", ["crate-lm", "gpt-baseline"])
def test_training_goes_on_to_the_same_bits(family, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 4)
    monkeypatch.setattr(demo, "SAVE_EVERY", 2)

    def settings(name, steps=5):
        (tmp_path / name).mkdir(exist_ok=True)
        return argparse.Namespace(out=tmp_path / name, family=family, seed=3, steps=steps)

    whole, _ = demo.train(settings("whole"))
    draw, calls = demo.sequences, []

    def stopped(*args):
        calls.append(args)
        if len(calls) == 4:  # after three steps, the save is of two
            raise KeyboardInterrupt
        return draw(*args)

    monkeypatch.setattr(demo, "sequences", stopped)
    with pytest.raises(KeyboardInterrupt):
        demo.train(settings("parts"))
    monkeypatch.setattr(demo, "sequences", draw)
    parts, minutes = demo.train(settings("parts"))
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
    assert minutes > 0 and (tmp_path / "parts" / "steps" / "step-0.safetensors").exists()
    start = demo.make_model(family, 3).state_dict()
    assert not torch.equal(start["embed.weight"], whole.state_dict()["embed.weight"])
    with pytest.raises(SystemExit, match="other settings"):
        demo.train(settings("parts", steps=6))
