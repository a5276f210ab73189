"""The demo that trains an autoencoder on stored activations."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import train_sae as demo


@pytest.mark.slow
def test_an_autoencoder_learns_from_a_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "TRAINING", 40)
    monkeypatch.setattr(demo, "IMAGES", 51)
    demo.main(tmp_path / "s", steps=1)
    demo.main(tmp_path / "s", steps=100)  # on the store that is there
    said = capsys.readouterr().out
    first, last = (line for line in said.splitlines() if line.startswith("step"))
    errors = [float(line.split("error ")[1]) for line in (first, last)]
    assert errors[1] < 0.5 * errors[0]
    assert said.count("On 11 images, with the cross-entropy of the labels") == 2
    for coder in ("autoencoder", "shuffled weights", "pca", "zero", "mean"):
        assert f" {coder} " in said
