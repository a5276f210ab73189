"""Keys of the published models at real sizes, small models of every layout, JAX files, no heads."""

import json
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import crate_interp as ci
from conftest import D_MODEL, FIXTURES, HEADS, IMAGE, fails, make, refuses, same_model
from crate_interp.circuits import logit_lens
from published import GIVEN, SIZES, published
from reference import published_layout
from selection import few_of
from test_families import check_blocks, same
from test_load import given

REAL = {  # what tensors cannot tell, as the table of models has it
    "crate_tiny": dict(n_heads=6),
    "crate_small_imagenet1k": dict(n_heads=12),
    "crate_base": dict(n_heads=12),
    "crate_large": dict(n_heads=16),
    "crate_alpha_B16_in1k": dict(n_heads=12),
    "crate_alpha_B32_in21k": dict(n_heads=12),
    "crate_alpha_B8_in21k": dict(n_heads=12),
    "crate_alpha_L14_in1k": dict(n_heads=16),
    "crate_alpha_L8_in21k": dict(n_heads=16),
    "crate_alpha_clipa_L14": dict(n_heads=16, text_n_heads=16),
    "crate_alpha_clipa_H14": dict(n_heads=16, text_n_heads=16),
    "crate_lm_12l_overcomplete": dict(n_heads=12),
    "crate_lm_12l_vanilla": dict(n_heads=12),
    "crate_mae_base": dict(n_heads=12),
    "nanochat_crate_d12": dict(n_heads=6, n_ctx=1024),
}
NOT_KEPT = {  # numbers in tensors that the published code never reads, or holds twice
    "crate_mae_base": 197 * 768 + 768 * 768 + 768,  # pos_embed, decoder_embed
    "crate_lm_12l_overcomplete": 50304 * 768,  # lm_head is wte
    "crate_lm_12l_vanilla": 50304 * 768 + 12 * 1024**2,  # and the causal mask of every layer
    "crate_alpha_clipa_L14": 24 * 2 * 1024**2,  # query, key and value are one
    "crate_alpha_clipa_H14": 32 * 2 * 1280**2,
}


@pytest.mark.parametrize("case", ["crate-lm", "crate-lm-vanilla", "gpt-baseline"])
@pytest.mark.parametrize("dropped", [None, "lm_head.weight", "transformer.wte.weight"])
def test_a_tied_model_saved_as_safetensors_do(case, dropped, tmp_path):
    class Net(torch.nn.Module):
        def __init__(self, weights):
            super().__init__()
            for key, value in weights.items():
                self.register_parameter(key.replace(".", "|"), torch.nn.Parameter(value))

    weights, path = published(case), tmp_path / "weights.safetensors"
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    if dropped is None:
        save_model(Net(weights), path)
        kept = {key.replace("|", "."): value for key, value in load_file(path).items()}
        assert len(kept) == len(weights) - 1
    else:
        kept = {key: value for key, value in weights.items() if key != dropped}
    save_file(kept, path)
    found = ci.load(path, **GIVEN[case])
    assert found.cfg.d_vocab == 47
    same_model(ci.load(weights, **GIVEN[case]), found)


LARGE = (
    "crate_alpha_clipa_L14", "crate_alpha_clipa_H14", "crate_alpha_L14_in1k",
    "crate_alpha_L8_in21k", "nanochat_crate_d12", "crate_large", "crate_base", "crate_mae_base",
    "crate_alpha_B8_in21k", "crate_lm_12l_overcomplete", "crate_alpha_B32_in21k",
)  # fmt: skip


@pytest.mark.parametrize("name", few_of(REAL, {*REAL} - {*LARGE}))
def test_real_sizes(name):
    listed = json.loads((FIXTURES / "keys" / f"{name}.json").read_text())
    shapes = listed["keys"]
    weights = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    model = ci.load(weights, dtype=torch.bfloat16, **REAL[name])
    params = sum(value.numel() for value in model.parameters())
    assert params == listed["numel"] - NOT_KEPT.get(name, 0)
    cfg = model.cfg
    assert cfg.d_head * cfg.n_heads == cfg.d_model
    unpublished = ("crate_tiny", "crate_base", "crate_large", "crate_lm_12l_vanilla")
    assert (params in set(ci.list_models()["params"].dropna())) == (name not in unpublished)


def test_every_listed_model_is_tested():
    assert set(REAL) == {path.stem for path in (FIXTURES / "keys").glob("*.json")}


ALWAYS = {  # layout -> a key that none of its files lacks
    "crate": "transformer.layers.0.0.fn.qkv.weight",
    "crate-alpha": "transformer.layers.0.0.fn.qkv.weight",
    "crate-mae": "decoder_pred.weight",
    "crate-lm": "transformer.h.0.attn.c_proj.weight",
    "crate-lm-vanilla": "transformer.h.0.attn.c_proj.weight",
    "gpt-baseline": "transformer.h.1.mlp.c_fc.weight",
    "nanochat-crate": "transformer.h.1.mssa.c_proj.weight",
    "clipa": "text_projection",
}
WRAPPERS = {
    "module.": lambda weights, path: {f"module.{key}": value for key, value in weights.items()},
    "a torch file": lambda weights, path: torch.save({"model": weights}, path),
    "safetensors": lambda weights, path: save_file(
        {key: value.contiguous() for key, value in weights.items()}, path
    ),
}


def layout(case):
    """The tensors of a layout, and what they cannot tell."""
    if case in GIVEN:
        return published(case, **SIZES.get(case, {})), GIVEN[case]
    return published_layout(make(case)), given(make(case))


@pytest.mark.parametrize("case", ALWAYS)
def test_every_layout_in_every_wrapper(case, tmp_path):
    weights, said = layout(case)
    model = ci.load(weights, **said)
    assert all(getattr(model.cfg, name) == value for name, value in said.items())
    for name, wrap in WRAPPERS.items():
        path = tmp_path / ("w.safetensors" if name == "safetensors" else "w.pth")
        same_model(ci.load(wrap(weights, path) or path, **said), model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nanochat's has no tokenizer beside it here
        same_model(ci.load(model.save_pretrained(tmp_path / "own")), model)
    key = ALWAYS[case]
    with pytest.raises(ci.CheckpointError, match="keys missing|is missing|has no published layout"):
        ci.load({name: value for name, value in weights.items() if name != key}, **said)
    broken = weights | {key: weights[key].clone().fill_(float("nan"))}
    with pytest.raises(ci.CheckpointError, match="NaN or Inf|differs from|holds different"):
        ci.load(broken, **said)


def test_traps_are_refused():
    lm = published("crate-lm")
    fails(
        "lm_head.weight differs from transformer.wte.weight",
        lm | {"lm_head.weight": lm["lm_head.weight"] + 1},
        n_heads=5,
    )
    fails("n_heads cannot be inferred", lm)
    clip = published("clipa")
    with pytest.warns(UserWarning, match="1 small unknown tensors are left out: extra"):
        ci.load(clip | {"extra": torch.ones(3)}, **GIVEN["clipa"])
    fails(r"keys not used \(1\): extra", clip | {"extra": torch.ones(300, 300)}, **GIVEN["clipa"])
    chat = published("nanochat-crate", p=6)
    fails("n_ctx cannot be inferred", chat, n_heads=5)
    fails("image_size: models of family 'crate-lm'", lm, n_heads=5, image_size=8)
    fails("no field 'hook_name'", lm, n_heads=5, hook_name="x")


def test_the_file_of_the_config_wins_over_defaults_and_contradictions_are_named(tmp_path):
    chat = published("nanochat-crate", p=6)
    save_file(chat, tmp_path / "model.safetensors")
    config = {"n_head": 5, "sequence_len": 13, "vocab_size": 47, "n_layer": 2, "n_embd": 31}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ci.load(tmp_path).cfg.n_heads == 5  # a snapshot of the repo
    fails("n_heads=6 contradicts", tmp_path / "model.safetensors", n_heads=6)
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    fails("n_layers=3 contradicts the tensors, which make it 2", tmp_path / "model.safetensors")


FIXTURE = FIXTURES / "crate_alpha_jax"
JAX_GIVEN = dict(image_size=IMAGE["image_size"])


def jax_layout(model, old_names=False):
    """The weights of a hooked CRATE-alpha as JAX keeps them, written out by hand."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    out = {
        "pos_embedding": state["pos_embed"],
        "cls": state["cls_token"],
        "embedding/kernel": np.einsum("dchw->hwcd", state["embed.conv.weight"]),
        "embedding/bias": state["embed.conv.bias"],
        "encoder_norm/scale": state["ln_final.weight"],
        "encoder_norm/bias": state["ln_final.bias"],
        "head/kernel": state["unembed.weight"].T,
        "head/bias": state["unembed.bias"],
    }
    for layer in range(model.cfg.n_layers):
        ours, theirs = f"blocks.{layer}.", f"Transformer/encoderblock_{layer}/"
        attention = theirs + (
            "Attention_0/" if old_names else "MultiHeadDotProductSubspaceAttention_0/"
        )
        proj, back = state[ours + "attn.u_proj.weight"].T, state[ours + "attn.out_proj.weight"].T
        heads, wide = (model.cfg.n_heads, model.cfg.d_head), model.cfg.d_model
        out[attention + "proj/kernel"] = proj if old_names else proj.reshape(wide, *heads)
        out[attention + "out/kernel"] = back if old_names else back.reshape(*heads, wide)
        for number, norm in enumerate(("ln1", "ln2")):
            out[f"{theirs}LayerNorm_{number}/scale"] = state[f"{ours}{norm}.weight"]
            out[f"{theirs}LayerNorm_{number}/bias"] = state[f"{ours}{norm}.bias"]
        for name in ("D", "D1"):
            out[f"{theirs}OvercompleteISTABlock_0/{name}"] = state[f"{ours}mlp.{name}"]
    return out


@pytest.fixture
def alpha():
    model = make("crate-alpha", ln_final_eps=1e-6)
    with torch.no_grad():  # the official start has ones and zeros, which hide a wrong place
        for value in model.parameters():
            value.add_(
                0.1
                * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
            )
    return model


def saved_npz(path, weights, **more):
    np.savez(path, **{f"params/{name}": value for name, value in weights.items()}, **more)
    return path


def test_every_recorded_tensor():
    meta = json.loads((FIXTURE / "meta.json").read_text())
    recorded = load_file(FIXTURE / "io.safetensors")
    (file,) = [name for name in meta["files"] if name.endswith(".npz")]
    model = ci.load(FIXTURE / file)
    assert (model.cfg.n_heads, model.cfg.ln_final_eps) == (
        meta["config"]["num_heads"],
        meta["config"]["head_ln_eps"],
    )
    with torch.no_grad():
        logits, cache = model.run_with_cache(recorded["images_nhwc"].permute(0, 3, 1, 2))
    seen = {"images_nhwc", "logits", "embed", "patch_embed", "head_ln"}
    same(logits, recorded["logits"], "logits")
    same(cache["resid_pre", 0], recorded["embed"], "embed")
    same(cache["hook_embed"][:, 1:], recorded["patch_embed"], "patch_embed")
    same(cache["hook_pooled"], recorded["head_ln"], "head_ln")
    check_blocks(cache, recorded, "blocks.", "blocks.", seen)
    assert set(recorded) == seen


@pytest.mark.parametrize("how", ["params/", "bare", "compressed", "old names", "fortran order"])
def test_every_spelling(alpha, tmp_path, how):
    path = tmp_path / "weights"
    weights = jax_layout(alpha, how == "old names")
    given = dict(JAX_GIVEN)
    if how == "old names":  # two axes: heads are not told
        given["n_heads"] = HEADS
    if how == "fortran order":
        weights = {name: np.asfortranarray(value) for name, value in weights.items()}
    if how == "compressed":
        np.savez_compressed(path, **{f"params/{name}": value for name, value in weights.items()})
    elif how == "bare":
        np.savez(path, **weights)
    else:
        saved_npz(path, weights)
    loaded = ci.load(path.with_suffix(".npz"), **given)
    assert loaded.cfg == alpha.cfg
    for name, value in alpha.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert loaded.state_dict()[name].is_contiguous(), name


def test_bfloat16_is_told_from_bytes(alpha, tmp_path):
    weights = jax_layout(alpha)
    short = torch.tensor(weights["head/kernel"]).bfloat16()
    weights["head/kernel"] = short.view(torch.int16).numpy().view("V2")
    loaded = ci.load(saved_npz(tmp_path / "w.npz", weights), **JAX_GIVEN)
    assert torch.equal(loaded.unembed.weight, short.float().T)


HEAD_KEYS = {
    "crate": "mlp_head.1",
    "crate-alpha": "mlp_head.1",
    "demo": "head",
    "jax": "head/kernel",
}
NO_HEAD = r"no classifier head \(n_classes=0\), and so no logits"


def written(kind):
    """A model with a head, its file, the keys of its head, and what ci.load must be told."""
    if kind == "jax":
        model = make("crate-alpha", ln_final_eps=1e-6)
        weights = {key: torch.tensor(value) for key, value in jax_layout(model).items()}
        head = ["head/kernel", "head/bias"]
    else:
        model = make("crate", d_features=7) if kind == "demo" else make(kind)
        weights = published_layout(model)
        head = [key for key in weights if key.startswith(("mlp_head.1.", "head."))]
    told = dict(image_size=IMAGE["image_size"]) if kind == "jax" else given(model)
    return model, weights, head, told


@pytest.fixture(scope="module")
def headless():
    model = make("crate-alpha")
    with pytest.warns(UserWarning, match="the head is left out"):
        return ci.load(model.state_dict(), config=model.cfg, head=False)


@pytest.mark.parametrize("kind", HEAD_KEYS)
def test_files_with_and_without_a_head(kind, images, tmp_path):
    model, weights, head, told = written(kind)
    wanted = model.run_with_cache(images)[1]["hook_pooled"]
    with pytest.warns(UserWarning, match=f"the head is left out: .*{head[0]}"):
        cut = ci.load(weights, head=False, **told)
    bare = {key: value for key, value in weights.items() if key not in head}
    for one in (cut, ci.load(bare, head=False, **told), ci.load(bare, n_classes=0, **told)):
        assert not one.has_logits and one.cfg.n_classes == one.cfg.d_vocab == 0
        torch.testing.assert_close(one(images), wanted)
        assert one(images).shape == (len(images), D_MODEL)
    with pytest.raises(ci.CheckpointError, match=f"{HEAD_KEYS[kind]}.*give head=False"):
        ci.load({key: value for key, value in bare.items() if "features" not in key}, **told)
    cut.save_pretrained(tmp_path / "bare")
    again = ci.load(tmp_path / "bare")
    assert again.cfg == cut.cfg and torch.equal(again(images), cut(images))


def test_the_readers_of_logits_refuse(headless, images):
    cache = headless.run_with_cache(images)[1]
    for read, match in (
        (lambda: headless.W_U, NO_HEAD),
        (lambda: cache.logit_lens(), "no classifier head, and so no logits for a lens"),
        (lambda: logit_lens(cache), "needs the cache of a model with logits"),
        (lambda: ci.ablate_heads(headless, images), "has no logits, "),
        (lambda: ci.to_bridge(headless), "give a hooked model with logits"),
    ):
        refuses(match, read)
    assert "unembed.W_U" not in headless.tl_parameters()
    assert ci.viz.explore(cache, images).title
    assert ci.maps.attention(cache, 1).shape == (2, 5, *headless.cfg.grid)
    assert headless.fresh()(images).shape == (2, D_MODEL)
