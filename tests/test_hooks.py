"""crate_hooks: names, reading as a stream, the catalogue against live models, and threads."""

import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import crate_interp as ci
from conftest import BATCH, D_HEAD, D_MODEL, HEADS, LAYERS, leftover_hooks, make, make_lm
from crate_hooks import edit
from crate_interp import hooks

CATALOGUE = Path(__file__).parent.parent / "hooks" / "README.md"


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
    if name.startswith(("crate-lm", "gpt", "nanochat", "tost-lm")):
        model = make_lm(name, d_mlp=None if "vanilla" in name else 37)
        return model, torch.randint(47, (BATCH, 11)), {"N": 11, "p": 6}
    if name in ("cbt", "tost"):
        square = name == "cbt"  # CBSA needs a square of patches
        size = dict(d_mlp=None if square else 37, stem="linear", d_features=17)
        size |= {"image_size": (6, 15)} if square else {}
        images = torch.randn(BATCH, 3, *size.get("image_size", (6, 20)))
        return make(name, **size), images, {"f": 17, "R": 64, "N": 10 if square else 12, "M": 13}
    images = torch.randn(BATCH, 3, 6, 20)
    if name == "crate-mae":
        size = dict(
            d_model=30,
            n_layers=3,
            n_heads=5,
            decoder_n_heads=5,
            image_size=(6, 20),
            patch_size=(2, 5),
        )
        return (
            ci.HookedCrateMAE(ci.CrateConfig(family=name, **size)).eval(),
            images,
            {"d": 30, "p": 6, "P": 12, "v": 30},
        )
    wide = {"d_mlp": 37} if name == "crate-alpha" else {}
    return make(name, d_features=17, stem="linear", **wide), images, {"f": 17}


KINDS = [
    "crate",
    "crate-alpha",
    "crate-mae",
    "crate-lm",
    "crate-lm vanilla",
    "gpt-baseline",
    "nanochat-crate",
    "tost",
    "tost-lm",
    "cbt",
    "tost-ista",
    "aot",
]


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
    sizes = {
        "B": BATCH,
        "N": 13,
        "K": HEADS,
        "p": D_HEAD,
        "d": D_MODEL,
        "m": model.cfg.d_mlp,
        "1": 1,
    } | said
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
