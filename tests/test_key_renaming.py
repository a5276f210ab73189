"""Forks whose keys have other names: ci.load(..., rename=)."""

import pytest
import torch

import crate_interp as ci
from conftest import HEADS, make
from reference import published_layout


@pytest.fixture
def fork():
    model = make()
    weights = {f"net.{key}": value for key, value in published_layout(model).items()}
    return model, weights | {"extra.counter": torch.zeros(3)}


def back(key):
    return None if key.startswith("extra.") else key.removeprefix("net.")


GIVEN = {"n_heads": HEADS, "patch_size": (2, 5), "image_size": (6, 20)}


def test_a_fork_loads(fork, tmp_path):
    model, weights = fork
    images = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(0))
    torch.save(weights, tmp_path / "fork.pth")
    for source in (weights, tmp_path / "fork.pth"):
        with pytest.raises(ci.CheckpointError):
            ci.load(source, **GIVEN)
        assert torch.equal(ci.load(source, rename=back, **GIVEN)(images), model(images))


def test_it_is_strict(fork):
    _, weights = fork
    with pytest.raises(ci.CheckpointError, match="left over|extra|not used|unknown|no place"):
        ci.load(weights, rename=lambda key: key.removeprefix("net."), **GIVEN)
    with pytest.raises(ci.CheckpointError, match=r"gives '.*' and '.*' the same name, 'x'"):
        ci.load(weights, rename=lambda key: "x", **GIVEN)
    with pytest.raises(ci.CheckpointError, match=r"is 3: return a name, or None"):
        ci.load(weights, rename=lambda key: 3, **GIVEN)
    with pytest.raises(ci.CheckpointError, match="is for a weight file or a state dict"):
        ci.load("crate-tiny-fashion", rename=back)


def test_it_is_a_file_like_any_other(fork, tmp_path):
    """What has no meaning for a file is refused, as without rename."""
    _, weights = fork
    torch.save(weights, tmp_path / "fork.pth")
    for more in ({"revision": "step-1"}, {"file": "x.pth"}):
        for source in (weights, tmp_path / "fork.pth"):
            with pytest.raises(ci.CheckpointError, match="has no meaning for"):
                ci.load(source, rename=back, **more, **GIVEN)
