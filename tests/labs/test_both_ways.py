"""Text read both ways: what both kinds share, what is hidden from which, and the lab as a whole."""

import numpy as np
import pytest
import torch
from both_ways import KINDS, WORDS, draws, loss_of, make, texts


def test_both_kinds_begin_with_the_same_weights_and_the_text_to_measure_is_not_trained_on():
    causal, both = (make(kind, 3).state_dict() for kind in KINDS)
    assert all(torch.equal(causal[name], both[name]) for name in causal)
    trained, windows = texts()
    assert windows.shape == (320, 32) and max(int(trained.max()), int(windows.max())) < WORDS
    runs = {tuple(row) for row in trained.unfold(0, 8, 1).tolist()}
    assert np.mean([tuple(row[:8]) in runs for row in windows.tolist()]) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_is_of_a_seventh_of_the_tokens_and_masks_most_of_them(kind, monkeypatch):
    model, tokens, read = make(kind, 0), texts()[1], []
    monkeypatch.setattr(model, "forward", lambda x: read.append(x) or torch.zeros(*x.shape, WORDS))
    assert loss_of(model, tokens, draws(0, 0)).item() == pytest.approx(np.log(WORDS), rel=1e-5)
    masked, other = (read[0] == WORDS).float().mean(), (read[0] != tokens).float().mean()
    share = 0.0 if kind == "causal" else 0.15 * 31 / 32
    assert masked == pytest.approx(0.8 * share, abs=0.01)
    assert other == pytest.approx(0.9 * share, abs=0.01)
