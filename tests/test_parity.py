"""What TransformerLens names and CRATE refuses; the catalogue of hooks, reading, and threads."""

import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformer_lens.model_bridge.get_params_util import get_bridge_params

import crate_interp as ci
from conftest import (
    BATCH,
    D_HEAD,
    D_MODEL,
    HEADS,
    LAYERS,
    LMS,
    leftover_hooks,
    make,
    make_lm,
    refuses,
)
from crate_hooks import edit
from crate_interp import hooks
from crate_interp.models.cache import _AXES_OF
from crate_interp.models.hook_aliases import IN_BLOCK, IN_MODEL, REFUSALS, RefusedError, aliases_of
from crate_interp.models.hook_points import GATED

CATALOGUE = Path(__file__).parent.parent / "hooks" / "README.md"
LETTERS = {  # word for an axis in a notebook -> its letters in the catalogue
    "pos": "NM1", "query": "NR1", "key": "NMR", "head": "K", "d_head": "p", "d_model": "d",
    "1": "1", "d_mlp": "md", "representative": "R", "patch": "P", "value": "v", "d_features": "f",
}  # fmt: skip
TOKENS = torch.randint(47, (BATCH, 7), generator=torch.Generator().manual_seed(3))

# uses of a model that raise an error of their own; hooks/README.md lists these uses too
ASSIGNED: dict[str, str] = {
    "cfg.field = value": (
        "a config is frozen, because weights and hook points follow from it: move a model with "
        "model.to(...), switch hook points with model.set_use_attn_result(True) and the like, and "
        "make a new model for another shape"
    ),
    "attention_mask [batch, 1, query, key]": (
        "the model decides which earlier tokens a token sees: give a mask [batch, pos] that says "
        "which tokens are padding; positions follow from it"
    ),
}


def table(heading):
    """The first two columns of a table of the catalogue, below a heading."""
    section = CATALOGUE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ", 1) for line in section.splitlines() if line.startswith("| `")]
    return {first.strip("| `"): second.removesuffix(" |") for first, second in rows}


def test_the_catalogue_has_the_refusals():
    assert table("What TransformerLens has and CRATE lacks") == REFUSALS | ASSIGNED


def test_the_catalogue_has_the_aliases():
    wanted = {name: " or ".join(f"`{one}`" for one in points) for name, points in IN_MODEL.items()}
    wanted |= {f"blocks.{{l}}.{name}": f"`blocks.{{l}}.{one}`" for name, one in IN_BLOCK.items()}
    assert table("Other names") == wanted


@pytest.mark.parametrize(
    "name", sorted(set(REFUSALS) - {"b_in", "stack_neuron_results", "loss_fn"})
)
def test_a_refusal_says_what_to_use(name, lm):
    assert not hasattr(lm, name)
    with pytest.raises(NotImplementedError, match=re.escape(REFUSALS[name])) as caught:
        getattr(lm, name)()
    assert isinstance(caught.value, RefusedError) and "\n" not in str(caught.value)


def test_a_model_of_images_says_how_its_loss_is_had():
    model, images = make(), torch.randn(2, 3, 6, 20)
    words = re.escape("use model(images, labels=numbers).loss")
    refuses(words, lambda: model.loss_fn(model(images), images), RefusedError)
    for kind in ("loss", "both", None):
        with pytest.raises(ValueError, match=words):
            model(images, return_type=kind)
    assert torch.equal(model(images, return_type="logits"), model(images))
    refuses("give a tensor of whole", lambda: model(images, labels=["circle", "cross"]))


def test_weights_are_those_that_transformerlens_reads(lm):
    ours, theirs = lm.tl_parameters(), get_bridge_params(lm)
    made_up = {name for name in theirs if name.endswith("mlp.b_in") and name not in ours}
    if lm.cfg.positional_embedding_type == "standard":
        made_up.add("pos_embed.W_pos")  # they look for a module there
        assert torch.equal(ours.pop("pos_embed.W_pos"), lm.pos_embed)
    assert set(ours) == set(theirs) - made_up
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert dict(lm.tl_named_parameters()).keys() == lm.tl_parameters().keys()
    assert lm.n_params_total == sum(value.numel() for value in lm.state_dict().values())


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_scores(lm, mode):
    scores = lm.all_composition_scores(mode)
    assert scores.shape == (LAYERS, HEADS, LAYERS, HEADS) and scores.head_labels[1] == "L0H1"
    left = lm.W_V[0, 1] @ lm.W_O[0, 1]
    right = lm.W_V[2, 3] @ lm.W_O[2, 3] if mode == "V" else lm.W_Q[2, 3] @ lm.W_K[2, 3].T
    right = right.T if mode == "K" else right
    direct = (left @ right).norm() / (left.norm() * right.norm())
    assert_close(scores[0, 1, 2, 3], direct, atol=1e-5, rtol=1e-4)
    assert not scores[2, :, :2].any() and not scores[1, :, 1].any()
    refuses("mode='X' is none of Q, K, V", lambda: lm.all_composition_scores("X"))


def test_loss_with_a_mask(lm):
    logits = lm(TOKENS)
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    losses = -logits.log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:, None])[..., 0]
    assert_close(lm.loss_fn(logits, TOKENS), losses.mean())
    assert_close(lm.loss_fn(logits, TOKENS, per_token=True), losses)
    kept = torch.cat([losses[0, 3:], losses[1]])
    assert_close(lm.loss_fn(logits, TOKENS, mask), kept.mean())


def patched(model, data, hooks):
    with torch.no_grad():
        return model.run_with_hooks(data, fwd_hooks=hooks)


@pytest.mark.parametrize("family", [*LMS, "crate", "crate-alpha"])
def test_every_alias_is_its_point(family, images):
    vision = family in ("crate", "crate-alpha")
    model, data = (make(family), images) if vision else (make_lm(family), TOKENS)
    with torch.no_grad():
        _, cache = model.run_with_cache(data)
    firing = model.matching_points(None)
    assert len(cache) == len(firing)
    found = aliases_of(firing)
    assert {"blocks.1.hook_in", "blocks.2.attn.hook_out", "embed.hook_out"} <= set(found)
    seen = []
    for alias, point in found.items():
        assert cache[alias] is cache[point] and alias in cache, alias
        assert model.hook_dict[alias] is model.hook_dict[point]
    some = ["blocks.1.hook_out", "blocks.0.mlp.in.hook_out", "unembed.hook_in"]
    hooks = [(name, lambda value, hook: seen.append(hook.name)) for name in some]
    with torch.no_grad():
        model.run_with_hooks(data, fwd_hooks=hooks)
        _, few = model.run_with_cache(data, names_filter=some)
    assert set(seen) == set(few) == {found[name] for name in some}
    model.add_hook(some[0], lambda value, hook: value * 0)
    with torch.no_grad():
        assert not model.run_with_cache(data)[1]["resid_post", 1].any()
    model.reset_hooks()
    assert leftover_hooks(model) == []


@pytest.mark.parametrize("family", [*LMS, "crate", "crate-alpha"])
@pytest.mark.parametrize("switch", ["use_attn_in", "use_hook_mlp_in"])
def test_a_switch_changes_nothing_and_its_point_can_be_patched(family, switch, images):
    vision = family in ("crate", "crate-alpha")
    model, data = (make(family), images) if vision else (make_lm(family), TOKENS)
    point = f"blocks.1.{next(name for name, one in GATED.items() if one == switch)}"
    with torch.no_grad():
        plain, before = model.run_with_cache(data)
        getattr(model, f"set_{switch}")(True)
        on, cache = model.run_with_cache(data)
    assert_close(on, plain, atol=1e-5, rtol=1e-5)
    source = "resid_mid" if switch == "use_hook_mlp_in" else "resid_pre"
    value = cache[point]
    assert value.shape[-1] == D_MODEL and value.ndim == (4 if switch == "use_attn_in" else 3)
    assert_close(value.reshape(*value.shape[:2], -1, D_MODEL)[:, :, 0], cache[source, 1])
    # an edit reaches the branch that reads it, and not the stream beside it
    edited = patched(model, data, [(point, lambda value, hook: value.roll(1, dims=1))])
    assert (edited - plain).abs().max() > 1e-4
    kept = {}
    keep = lambda value, hook: kept.update({hook.name: value})  # noqa: E731
    stream = f"blocks.1.hook_{source}"
    patched(model, data, [(point, lambda value, hook: value * 0), (stream, keep)])
    assert_close(kept[stream], before[source, 1], atol=1e-5, rtol=1e-5)
    getattr(model, f"set_{switch}")(False)
    assert torch.equal(patched(model, data, []), plain)


def test_read_gives_what_a_cache_gives(model, images):
    points = ["hook_resid_post", "attn.hook_u", "hook_resid_pre"]
    _, cache = model.run_with_cache(images)
    with hooks.read(model, points, lambda layer, acts: (layer, dict(acts))) as seen:
        model(images)
    assert list(seen) == list(range(LAYERS))
    for layer, acts in seen.values():
        assert set(acts) == set(points)
        for point, value in acts.items():
            assert torch.equal(value, cache[f"blocks.{layer}.{point}"])
    assert leftover_hooks(model) == []


def test_read_hands_over_at_once_and_lets_go(model, images):
    alive, order = [], []

    def look(layer, acts):
        order.append(layer)
        assert not any(reference() is not None for reference in alive[:-1]), (
            "an earlier layer's tensor is still held"
        )
        alive.append(weakref.ref(acts["attn.hook_pattern"]))

    after = lambda module, inputs, output: order.append("after 0")  # noqa: E731
    handle = model.blocks[0].register_forward_hook(after)
    with torch.no_grad(), hooks.read(model, ["attn.hook_pattern"], look):
        model(images)
    handle.remove()
    assert order == [0, "after 0", 1, 2]


def test_read_cleans_up_after_errors(model, images):
    def broken(layer, acts):
        raise RuntimeError(f"in layer {layer}")

    with (
        pytest.raises(RuntimeError, match="in layer 0"),
        hooks.read(model, ["hook_resid_pre"], broken),
    ):
        model(images)
    assert leftover_hooks(model) == []
    with (
        pytest.raises(
            RuntimeError,
            match=r"fired hook_resid_pre but not attn.hook_result: switch the missing points on",
        ),
        hooks.read(model, ["hook_resid_pre", "attn.hook_result"], lambda layer, acts: None),
    ):
        model(images)
    assert leftover_hooks(model) == []


def rows():
    """(section, name, shape, short) of every row of the catalogue."""
    section = ""
    for line in CATALOGUE.read_text().splitlines():
        section = line if line.startswith("##") else section
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith("`") and len(cells) == 5:
            yield section, cells[0].strip("`"), cells[1], cells[3].strip("`")


def catalogued(name):
    """Returns a model of a catalogued kind, its input, and the sizes behind the letters."""
    if name.startswith(("crate-lm", "gpt", "nanochat", "tost-lm", "crate-bert")):
        model = make_lm(name, d_mlp=None if name in ("crate-lm vanilla", "crate-bert") else 37)
        return model, torch.randint(47, (BATCH, 11)), {"N": 11, "p": 6}
    if name in ("cbt", "tost"):
        square = name == "cbt"  # CBSA needs a square of patches
        size = dict(d_mlp=None if square else 37, stem="linear", d_features=17)
        size |= {"image_size": (6, 15)} if square else {}
        images = torch.randn(BATCH, 3, *size.get("image_size", (6, 20)))
        return make(name, **size), images, {"f": 17, "R": 64, "N": 10 if square else 12, "M": 13}
    images = torch.randn(BATCH, 3, 6, 20)
    if name == "crate-mae":
        size = dict(d_model=30, n_layers=3, n_heads=5, decoder_n_heads=5)
        size |= dict(image_size=(6, 20), patch_size=(2, 5))
        model = ci.HookedCrateMAE(ci.CrateConfig(family=name, **size)).eval()
        return model, images, {"d": 30, "p": 6, "P": 12, "v": 30}
    wide = {"d_mlp": 37} if name == "crate-alpha" else {}
    return make(name, d_features=17, stem="linear", **wide), images, {"f": 17}


KINDS = ("crate", "crate-alpha", "crate-mae", "tost", "tost-lm", "cbt", "tost-ista", "aot")
KINDS += ("crate-lm", "crate-lm vanilla", "gpt-baseline", "nanochat-crate", "crate-bert")


@pytest.mark.parametrize("name", KINDS)
def test_the_catalogue_is_the_model(name):
    model, data, said = catalogued(name)
    model.set_use_attn_result(True)
    _, cache = model.run_with_cache(data)
    model.set_use_attn_result(False)
    split = cache
    if model.cfg.facts["attention"] not in ("tssa", "cbsa"):
        model.set_use_split_qkv_input(True)
        _, split = model.run_with_cache(data)
        model.set_use_split_qkv_input(False)
        model.set_use_attn_in(True)
    model.set_use_hook_mlp_in(not model.cfg.attn_only)
    _, copied = model.run_with_cache(data)
    split = dict(split.items()) | {
        name: copied[name] for name in copied if name.endswith(("hook_attn_in", "hook_mlp_in"))
    }
    sizes = {"B": BATCH, "N": 13, "K": HEADS, "p": D_HEAD, "d": D_MODEL, "m": model.cfg.d_mlp}
    sizes |= {"1": 1} | said
    listed = set()
    for section, point, shape, short in rows():
        named = re.findall(r"`([^`]*)`", section)
        if named and name not in named:
            continue
        decoder = "decoder block" in section
        prefix = "decoder_" if decoder else "cls_" if "class block" in section else ""
        full = point if "In the whole model" in section else f"{prefix}blocks.1.{point}"
        listed.add(full)
        value = cache[full] if full in cache.cache_dict else split[full]
        if name == "tost" and point.startswith("ln_final."):
            shape = shape.replace("N", "M")
        assert list(value.shape) == [sizes[letter] for letter in shape.split()], full
        words, letters = _AXES_OF[full.rsplit(".", 1)[-1]].split(), shape.split()[1:]
        assert all(a in LETTERS[word] for a, word in zip(letters, words, strict=True)), full
        if full in cache.cache_dict and not point.startswith("ln_final."):
            holder, there = (
                (cache.decoder, full.removeprefix("decoder_")) if decoder else (cache, full)
            )
            # the catalogue's own words
            assert holder[eval(short, {"l": 1})] is holder[there], short
    other = re.compile(r"(decoder_|cls_)?blocks\.[02]\.")
    live = {point for point in model.hook_dict if not other.match(point)}
    assert listed == live


POINT = "blocks.1.hook_resid_mid"
SENTENCE = "another thread has temporary hooks on this model"


def images(seed, n=2):
    return torch.randn(n, 3, 6, 20, generator=torch.Generator().manual_seed(seed))


def doubled(value, hook):
    return 2 * value


def in_thread(work):
    """Returns what `work` returns in another thread, or the error that it raises there."""

    def run():
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(timeout=60)


USES = {
    "hooks": lambda model: model.hooks().__enter__(),
    "run_with_hooks": lambda model: model.run_with_hooks(images(1), fwd_hooks=[(POINT, doubled)]),
    "run_with_cache": lambda model: model.run_with_cache(images(1)),
    "a plain forward": lambda model: model(images(1)),
    "a sweep": lambda model: ci.sweep(model, images(1), probes="sparsity", progress=False),
}
CONTEXTS = {
    "hooks": lambda model: model.hooks(fwd_hooks=[(POINT, doubled)]),
    "sparse_step": lambda model: edit.sparse_step(model.blocks[1], lambd=0.4),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_another_thread_is_refused_while_a_context_is_open_and_never_edited(context, use):
    model = make()
    before = model(images(1))
    with CONTEXTS["hooks"](model), context(model):
        error = in_thread(lambda: use(model))
        assert isinstance(error, RuntimeError) and SENTENCE in str(error), error
        assert not torch.equal(model(images(1)), before)
    use(model)
    model.reset_hooks()
    assert not leftover_hooks(model)
    assert torch.equal(in_thread(lambda: model(images(1))), before)
