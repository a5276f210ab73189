"""Forks whose keys have other names: ci.load(..., rename=)."""

import pytest
import torch

import crate_interp as ci
from conftest import HEADS, make
from crate_interp.checkpoints.state_dicts import rename_function
from reference import published_layout


@pytest.fixture
def fork():
    model = make()
    weights = {fork_of(key): value for key, value in published_layout(model).items()}
    return model, weights | {"extra.counter": torch.zeros(3).long()}


def fork_of(key):
    return f"net.{key.replace('transformer', 'encoder')}"


def back(key):
    if key.startswith("extra."):
        return None
    return key.removeprefix("net.").replace("encoder", "transformer")


GIVEN = {"n_heads": HEADS, "patch_size": (2, 5), "image_size": (6, 20)}


def test_a_fork_loads(fork, tmp_path):
    model, weights = fork
    images = torch.randn(2, 3, 6, 20, generator=torch.Generator().manual_seed(0))
    torch.save(weights, tmp_path / "fork.pth")
    for source in (weights, tmp_path / "fork.pth"):
        with pytest.raises(ci.CheckpointError, match=r"nearest here: net\.encoder\.layers\.0"):
            ci.load(source, **GIVEN)
        assert torch.equal(ci.load(source, rename=back, **GIVEN)(images), model(images))


def test_it_is_strict(fork):
    _, weights = fork
    weights["extra.counter"] = torch.zeros(3)
    with pytest.raises(ci.CheckpointError, match=r"keys not used \(1\): extra.counter"):
        ci.load(weights, rename=lambda key: back(key) or key, **GIVEN)
    with pytest.raises(ci.CheckpointError, match="rename leaves out every tensor of the"):
        ci.load(weights, rename=lambda key: None, **GIVEN)
    with pytest.raises(ci.CheckpointError, match=r"'.*' and '.*' get the same name, 'x'"):
        ci.load(weights, rename=lambda key: "x", **GIVEN)
    for option in ({"rename": back}, {"weights": "ema"}):
        with pytest.raises(ci.CheckpointError, match="has no meaning for a saved model"):
            ci.load("crate-tiny-fashion", **option)


def test_a_text_as_in_sed(fork, tmp_path):
    """A key of which nothing remains is left out."""
    model, weights = fork
    for text in ("s/extra.*|encoder/transformer/", "s,encoder,transformer,g"):
        kept = {key: value for key, value in weights.items() if "extra" not in key}
        loaded = ci.load(kept, rename=text, **GIVEN)
        assert torch.equal(loaded.pos_embed, model.pos_embed)
    slashed = {key.replace("net.encoder", "a/b"): value for key, value in kept.items()}
    torch.save({k.replace("net.", ""): v for k, v in slashed.items()}, tmp_path / "w.pth")
    loaded = ci.load(tmp_path / "w.pth", rename=r"s/^(a)\/(?P<more>b)/transformer/", **GIVEN)
    assert torch.equal(loaded.pos_embed, model.pos_embed)
    assert rename_function(r"s/^(\w+)\.(\w+)/\2.\1/")("a.b.c") == "b.a.c"
    assert rename_function("s/a/b/")("aa") == "ba" and rename_function("s/a/b/g")("aa") == "bb"
    assert rename_function("s/^extra.*//")("extra.counter") is None
    for text in ("", "s", "net.", "s/a/b", "s/a/b/c", "y/a/b/", "s//b/", "s/a/b/g/", "saabaca"):
        with pytest.raises(ci.CheckpointError, match="write s/PATTERN/REPLACEMENT/, such as 's/"):
            ci.load(weights, rename=text, **GIVEN)
    for text in ("s/(/b/", r"s/a/\1/", "s/[/b/g", r"s/a/\g<x>/", r"s/a/\q/"):
        with pytest.raises(ci.CheckpointError, match="write s/PATTERN/REPLACEMENT/"):
            ci.load(weights, rename=text, **GIVEN)
