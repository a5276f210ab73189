"""The training of crate-tiny-lm: its start, its measure of even attention, and going on."""

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import attending
import train_tiny_lm as demo

from crate_interp.measures import attention_entropy

SMALL = dict(layers=2, width=32, steps=5, lr=1e-3, decay=0.01, push=1.0, fade=1.0, pilot=None)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 3)
    monkeypatch.setattr(demo, "N_CTX", 16)
    monkeypatch.setattr(demo, "SAVE_EVERY", 2)


def settings(folder, **other):
    folder.mkdir(exist_ok=True)
    return argparse.Namespace(out=folder, **(SMALL | other))


IDS = np.random.default_rng(0).integers(1, 1024, 500)


def test_evenness_is_the_entropy_of_the_probe_over_its_largest():
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 16, 16).masked_fill(~torch.ones(16, 16).tril().bool(), -torch.inf)
    pattern = scores.softmax(dim=-1)
    largest = torch.log(torch.arange(1.0, 17.0)).mean()
    wanted = attention_entropy(pattern).mean(dim=(0, 2)) / largest
    assert torch.allclose(attending.evenness(pattern), wanted, atol=1e-5)
    even = torch.ones(16, 16).tril()
    even = (even / even.sum(dim=-1, keepdim=True)).expand(2, 3, 16, 16)
    assert torch.allclose(attending.evenness(even), torch.ones(3), atol=1e-5)
    assert attending.evenness(torch.eye(16).expand(2, 3, 16, 16)).abs().max() < 1e-5
    assert attending.too_even(torch.tensor([[0.5, 0.9]])) == pytest.approx(0.05)


def test_training_goes_on_to_the_same_bits(tmp_path):
    whole, _ = demo.train(settings(tmp_path / "whole"), IDS)
    demo.train(settings(tmp_path / "parts", pilot=4), IDS)  # stops after four steps
    parts, facts = demo.train(settings(tmp_path / "parts"), IDS)
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
    assert facts["steps"] == 5 and (tmp_path / "parts" / "steps" / "step-0.safetensors").exists()
    with pytest.raises(SystemExit, match="other settings"):
        demo.train(settings(tmp_path / "parts", push=0.0), IDS)
