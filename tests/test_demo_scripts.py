"""Demos: an autoencoder trained on a store, and records of atoms for automated interpretability."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import neuron_records as demo
import train_sae

import crate_interp as ci


def test_records_hold_the_strongest_pieces_and_moments_of_the_code(tmp_path):
    lm = ci.load("crate-tiny-lm")
    samples = ci.data.open_text("embedded:held-out-text", lm.window_rows, 3, lm.to_tokens)
    tokens = samples.read(0, 3)
    demo.neuron_records(lm, tokens, tmp_path, layer=1, atoms=[2, 5], top=3, random=2)
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["2.json", "5.json"]
    whole = tokens.shape[1] // 64 * 64
    point = "blocks.1.mlp.hook_post"
    _, cache = lm.run_with_cache(tokens, names_filter=point)
    for atom in (2, 5):
        record = json.loads((tmp_path / "1" / f"{atom}.json").read_text())
        codes = cache[point][:, :whole, atom].reshape(-1, 64).double().numpy()
        assert [*record["neuron_id"].values()][1:] == [1, atom]
        assert record["mean"] == pytest.approx(codes.mean(), rel=1e-5)
        assert record["variance"] == pytest.approx(codes.var(), rel=1e-5)
        best = record["most_positive_activation_records"]
        assert len(best) == 3 and len(record["random_sample"]) == 2
        pieces = tokens[:, :whole].reshape(-1, 64)
        for piece, n in zip(best, np.argsort(-codes.max(axis=1), kind="stable"), strict=False):
            np.testing.assert_allclose(piece["activations"], codes[n], rtol=1e-4, atol=1e-6)
            assert piece["tokens"] == [
                lm.to_single_str_token(token) for token in pieces[n].tolist()
            ]


@pytest.mark.slow
def test_an_autoencoder_learns_from_a_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_sae, "TRAINING", 40)
    monkeypatch.setattr(train_sae, "IMAGES", 51)
    train_sae.main(tmp_path / "s", steps=1)
    train_sae.main(tmp_path / "s", steps=100)  # on the store that is there
    said = capsys.readouterr().out
    first, last = (line for line in said.splitlines() if line.startswith("step"))
    errors = [float(line.split("error ")[1]) for line in (first, last)]
    assert errors[1] < 0.5 * errors[0]
    assert said.count("On 11 images, with the cross-entropy of the labels") == 2
    for coder in ("autoencoder", "shuffled weights", "pca", "zero", "mean"):
        assert f" {coder} " in said
