"""Small models of every kind, bridges over them, and inputs."""

import torch

import crate_interp as ci
from conftest import BATCH, IMAGE, LMS, make, make_lm
from selection import few, few_of

VISION, TEXT = ["crate", "crate-alpha"], LMS
EVERY = VISION + TEXT
# the first one always, the others where slow tests run
FEW, FEW_TEXT = few(EVERY), few_of(TEXT, TEXT[-1:])
VARIANTS = (
    {},
    {"family": "crate-alpha", "d_mlp": 17},
    {"pool": "mean"},
    {"family": "crate-alpha", "d_features": 7},
)


def ids(*shape, seed=0):
    return torch.randint(0, 47, shape, generator=torch.Generator().manual_seed(seed))


def pictures(*batch, seed=0):
    return torch.randn(*batch, 3, 6, 20, generator=torch.Generator().manual_seed(seed))


def model_of(name, **over):
    return make(name, **over) if name in VISION else make_lm(name, **over)


def input_of(name, seed=1, pos=7):
    return pictures(BATCH, seed=seed) if name in VISION else ids(BATCH, pos, seed=seed)


def ready(name, **over):
    """A random model that has logits, and inputs for it."""
    return model_of(name, **over), input_of(name, pos=11)


def pair(name):
    """A model, a bridge over it, and an input."""
    model = model_of(name)
    return model, ci.to_bridge(model), input_of(name)


def metric(logits):
    """A class's or a next token's logit, mean over samples."""
    return (logits if logits.ndim == 2 else logits[:, -1])[:, 3].mean()


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
    yield from ((make(**over), (pictures(3),)) for over in VARIANTS)
    yield from ((make_lm(family), (ids(3, 7),)) for family in LMS)
    yield make_clip(), (pictures(3), ids(4, 7))
