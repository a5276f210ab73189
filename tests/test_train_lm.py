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


def test_the_start_keeps_a_token_and_lets_near_positions_be_alike():
    model = demo.make_model(3, 192).eval()
    near = model.W_pos @ model.W_pos.T
    rows = torch.arange(demo.N_CTX - 2)
    assert (near[rows, rows] > near[rows, rows + 1]).all()
    assert near[rows, rows + 1].mean() > near[rows, rows + 2].mean()
    x = torch.nn.functional.layer_norm(torch.randn(1, 50, 192), (192,))
    for block in model.blocks:
        code = torch.einsum("bnd,hdp->bnhp", x, block.attn.U)
        self_logit = (code.pow(2).sum(dim=-1) / model.cfg.d_head**0.5).mean()
        assert abs(self_logit - attending.SELF_LOGIT) < 0.25
        out = block.mlp(x)
        cosine = torch.nn.functional.cosine_similarity(out, x, dim=-1)
        assert cosine.min() > 0.97  # two steps and back, and it is the same token
    torch.manual_seed(0)
    official = demo.HookedCrateLM(model.cfg)
    plain = torch.nn.functional.cosine_similarity(official.blocks[0].mlp(x), x, dim=-1)
    assert plain.max() < 0.97


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


def test_what_decays():
    model = demo.make_model(1, 32)
    decays, kept = (group["params"] for group in attending.groups(model, 0.1))
    assert len(decays) + len(kept) == len(list(model.parameters()))
    assert any(value is model.pos_embed for value in kept)
    assert any(value is model.blocks[0].attn.u_proj.weight for value in kept)
    assert any(value is model.blocks[0].mlp.D for value in decays)


def test_training_goes_on_to_the_same_bits(tmp_path):
    whole, _ = demo.train(settings(tmp_path / "whole"), IDS)
    demo.train(settings(tmp_path / "parts", pilot=4), IDS)  # stops after four steps
    parts, facts = demo.train(settings(tmp_path / "parts"), IDS)
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
    assert facts["steps"] == 5 and (tmp_path / "parts" / "steps" / "step-0.safetensors").exists()
    with pytest.raises(SystemExit, match="other settings"):
        demo.train(settings(tmp_path / "parts", push=0.0), IDS)


@pytest.mark.slow
def test_the_term_makes_attention_less_even(tmp_path):
    tokens = torch.from_numpy(IDS[:480]).view(-1, demo.N_CTX)
    found = []
    for push in (0.0, 50.0):
        args = settings(tmp_path / str(push), push=push, steps=20, lr=3e-3)
        model, _ = demo.train(args, IDS)
        found.append(np.mean(attending.evenness_of(model, tokens)))
    assert found[1] < found[0] - 0.02
