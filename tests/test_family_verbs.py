"""Every verb on a random member of the family: it runs, or refuses in one sentence of its own."""

import pytest
import torch

import crate_interp as ci
from conftest import make_lm
from crate_interp.models.hook_aliases import RefusedError
from test_whitebox_family import member

NAMES = ("tost", "cbt", "tost-ista", "aot", "crate conv", "tost-lm")
PATTERNLESS = ("tost", "cbt", "tost-ista", "tost-lm")
NO_PATTERN = dict.fromkeys(PATTERNLESS, "needs an attention pattern")
NO_ATOMS = {"aot": "are attention alone"}
NO_CLS = {"tost": "reads one token in every layer"}
REPLACED = dict.fromkeys(
    ("cbt", "tost-ista", "crate conv"), "the sparse step (of this family )?replaces the stream"
)
TEXT = {"tost-lm": "give the cache of model.run_with_cache|no patches"}


class One:
    def __init__(self, name):
        self.name, generator = name, torch.Generator().manual_seed(5)
        if name == "tost-lm":
            self.model = make_lm(name)
            self.x = torch.randint(47, (8, 11), generator=generator)
        else:
            self.model, _ = member(name)
            self.x = torch.randn(8, 3, *self.model.cfg.image_size, generator=generator)
        self.images = torch.zeros(8, 3, 6, 20) if name == "tost-lm" else self.x
        self.model.requires_grad_(False)
        self.cache = self.model.run_with_cache(self.x)[1]

    def targets(self):
        count = self.cache["resid_pre", 0].shape[1]
        return {"all": torch.ones(len(self.x), count, count, dtype=torch.bool)}


def saved(one, folder):
    one.model.save_pretrained(folder / "saved")
    again = ci.convert(folder / "saved", folder / "converted")
    return torch.allclose(again(one.x), one.model(one.x), atol=1e-5)


# verb -> (what it does, the members that refuse and a part of their sentence)
VERBS = {
    "logit lens": (lambda one, _: ci.circuits.logit_lens(one.cache), NO_CLS),
    "lens of the cache": (lambda one, _: one.cache.logit_lens(), NO_CLS),
    "direct attribution": (
        lambda one, _: ci.circuits.logit_attribution(one.cache, 1), {**REPLACED, **NO_CLS}
    ),
    "head scores": (lambda one, _: ci.circuits.head_scores(one.cache, one.targets()), NO_PATTERN),
    "patterns": (lambda one, _: ci.viz.attention(one.cache, 0), NO_PATTERN),
    "head grid": (lambda one, _: ci.viz.head_grid(one.cache, one.images), TEXT),
    "page": (lambda one, _: ci.viz.explore(one.cache, one.x), {}),
    "neurons": (
        lambda one, _: one.cache.stack_neuron_results(2), {**REPLACED, **NO_ATOMS}
    ),
    "heads": (lambda one, _: one.cache.stack_head_results(), REPLACED),
    "save and convert": (saved, {}),
}  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def one(request):
    return One(request.param)


def runs_or_refuses(verb, one, folder):
    call, refused = verb
    if one.name not in refused:
        answer = call(one, folder)
        assert answer is not None and answer is not False
        return
    with pytest.raises((ValueError, RefusedError), match=refused[one.name]) as caught:
        call(one, folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_each_verb_runs_or_says_why_not(one, tmp_path):
    for verb in VERBS.values():
        runs_or_refuses(verb, one, tmp_path)
