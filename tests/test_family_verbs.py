"""Every verb on a random member of the family: it runs, or refuses in one sentence of its own."""

import pytest
import torch

import crate_interp as ci
from conftest import make_lm
from crate_interp.models.compat.hook_aliases import RefusedError
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
QUIET = {"progress": False}


class One:
    """A model, inputs, and a cache that is made once."""

    def __init__(self, name):
        self.name, generator = name, torch.Generator().manual_seed(5)
        if name == "tost-lm":
            self.model = make_lm(name)
            self.x = self.data = torch.randint(47, (8, 11), generator=generator)
        else:
            self.model, _ = member(name)
            self.x = torch.randn(8, 3, *self.model.cfg.image_size, generator=generator)
            self.data = {"image": self.x, "label": torch.arange(8) % 2}
        self.images = torch.zeros(8, 3, 6, 20) if name == "tost-lm" else self.x
        self.model.requires_grad_(False)
        self.cache = self.model.run_with_cache(self.x)[1]
        self.pairs = (self.x[:2], self.x[2:4], lambda logits: logits.flatten(1)[:, 1].mean())

    def targets(self):
        count = self.cache["resid_pre", 0].shape[1]
        return {"all": torch.ones(len(self.x), count, count, dtype=torch.bool)}


def watched(one, folder):
    with ci.watch(one.model, one.x, every=1, limit=2) as watch:
        watch.step()
    return watch.result


def saved(one, folder):
    one.model.save_pretrained(folder / "saved")
    again = ci.convert(folder / "saved", folder / "converted")
    return torch.allclose(again(one.x), one.model(one.x), atol=1e-5)


def bridged(one, folder):
    return torch.equal(ci.to_bridge(one.model)(one.x), one.model(one.x))


# verb -> (what it does, the members that refuse and a part of their sentence)
FAST = {
    "logit lens": (lambda one, _: ci.circuits.logit_lens(one.cache), NO_CLS),
    "lens of the cache": (lambda one, _: one.cache.logit_lens(), NO_CLS),
    "direct attribution": (
        lambda one, _: ci.circuits.logit_attribution(one.cache, 1), {**REPLACED, **NO_CLS}
    ),
    "head scores": (lambda one, _: ci.circuits.head_scores(one.cache, one.targets()), NO_PATTERN),
    "patterns": (lambda one, _: ci.viz.attention(one.cache, 0), NO_PATTERN),
    "heads as receivers": (
        lambda one, _: ci.circuits.path_patch(*one_and_pairs(one), receivers=[(1, 0)], **QUIET),
        NO_PATTERN,
    ),
    "roll-out": (lambda one, _: ci.maps.rollout(one.cache), {**NO_PATTERN, **TEXT}),
    "maps": (lambda one, _: ci.maps.attention(one.cache, 0), TEXT),
    "components": (lambda one, _: ci.maps.components(one.cache, 0), TEXT),
    "maps of atoms": (lambda one, _: ci.maps.codes(one.cache, 0, 1), {**NO_ATOMS, **TEXT}),
    "head grid": (lambda one, _: ci.viz.head_grid(one.cache, one.images), TEXT),
    "page": (lambda one, _: ci.viz.explore(one.cache, one.x), {}),
    "composition": (lambda one, _: ci.circuits.composition(one.model), {}),
    "neurons": (
        lambda one, _: one.cache.stack_neuron_results(2), {**REPLACED, **NO_ATOMS}
    ),
    "heads": (lambda one, _: one.cache.stack_head_results(), REPLACED),
    "attribution patching": (
        lambda one, _: ci.circuits.attribution_patch(*one_and_pairs(one), **QUIET), {}
    ),
    "save and convert": (saved, {}),
}  # fmt: skip
SLOW = {
    "compare": (
        lambda one, _: ci.compare(one.model, one.model, one.x, untrained=1, **QUIET), {}
    ),
    "store": (
        lambda one, folder: ci.store(
            one.model, one.x, points="blocks.1.hook_resid_post", out=folder / "store", **QUIET
        ), {},
    ),
    "watch": (watched, {}),
    "bridge": (bridged, {}),
    "report": (
        lambda one, folder: ci.report(one.model, one.x, folder / "r", untrained=1, **QUIET), {}
    ),
}  # fmt: skip


def one_and_pairs(one):
    return (one.model, *one.pairs)


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
    for verb in FAST.values():
        runs_or_refuses(verb, one, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("verb", SLOW)
def test_each_long_verb_runs_or_says_why_not(one, verb, tmp_path):
    runs_or_refuses(SLOW[verb], one, tmp_path)


def test_a_direct_attribution_of_attention_alone_adds_up():
    one = One("aot")
    found = ci.circuits.logit_attribution(one.cache, 1)
    assert found.atoms.shape[2] == 0
    torch.testing.assert_close(found.total(), one.model(one.x)[:, 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "probe"), [("tost", "attention"), ("cbt", "membership"), ("aot", "sparsity")]
)
def test_probes_of_another_member_are_refused(name, probe):
    one = One(name)
    with pytest.raises(ValueError, match=probe):
        ci.sweep(one.model, one.x, probes=probe, **QUIET)
