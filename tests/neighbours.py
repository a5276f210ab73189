"""Small models of every kind, and inputs for them."""

import torch

import crate_interp as ci
from conftest import IMAGE, make, make_lm

LMS = ("crate-lm", "crate-lm vanilla", "gpt-baseline", "nanochat-crate")
VISION = (
    {},
    {"family": "crate-alpha", "d_mlp": 17},
    {"pool": "mean"},
    {"family": "crate-alpha", "d_features": 7},
)


def ids(*shape, seed=0):
    return torch.randint(0, 47, shape, generator=torch.Generator().manual_seed(seed))


def pictures(*batch, seed=0):
    return torch.randn(*batch, 3, 6, 20, generator=torch.Generator().manual_seed(seed))


def make_mae():
    cfg = ci.CrateConfig(
        family="crate-mae", d_model=32, n_layers=2, n_heads=4,
        decoder_n_layers=1, decoder_n_heads=2, **IMAGE,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ci.HookedCrateMAE(cfg).eval()


def make_clip():
    cfg = ci.CrateConfig(
        family="clipa", d_model=32, n_layers=2, n_heads=4, d_embed=9, d_vocab=47, n_ctx=7,
        text_d_model=16, text_n_layers=1, text_n_heads=2, **IMAGE,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ci.HookedCrateCLIP(cfg).eval()


def every_model():
    """(model, arguments) of every kind that returns a tensor."""
    yield from ((make(**over), (pictures(3),)) for over in VISION)
    yield from ((make_lm(family), (ids(3, 7),)) for family in LMS)
    yield make_clip(), (pictures(3), ids(4, 7))
