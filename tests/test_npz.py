"""Files of the JAX training: right numbers from every spelling."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import crate_interp as ci
from conftest import FIXTURES, HEADS, IMAGE, make
from test_families import check_blocks, same

FIXTURE = FIXTURES / "crate_alpha_jax"
GIVEN = dict(image_size=IMAGE["image_size"])


def published(model, old_names=False):
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


def save(path, weights, **more):
    np.savez(path, **{f"params/{name}": value for name, value in weights.items()}, **more)
    return path


def test_every_recorded_tensor():
    meta, recorded = (
        json.loads((FIXTURE / "meta.json").read_text()),
        load_file(FIXTURE / "io.safetensors"),
    )
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
    path, weights, given = tmp_path / "weights", published(alpha, how == "old names"), dict(GIVEN)
    if how == "old names":  # two axes: heads are not told
        given["n_heads"] = HEADS
    if how == "fortran order":
        weights = {name: np.asfortranarray(value) for name, value in weights.items()}
    if how == "compressed":
        np.savez_compressed(path, **{f"params/{name}": value for name, value in weights.items()})
    elif how == "bare":
        np.savez(path, **weights)
    else:
        save(path, weights)
    loaded = ci.load(path.with_suffix(".npz"), **given)
    assert loaded.cfg == alpha.cfg
    for name, value in alpha.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert loaded.state_dict()[name].is_contiguous(), name


def test_bfloat16_is_told_from_bytes(alpha, tmp_path):
    weights = published(alpha)
    short = torch.tensor(weights["head/kernel"]).bfloat16()
    weights["head/kernel"] = short.view(torch.int16).numpy().view("V2")
    loaded = ci.load(save(tmp_path / "w.npz", weights), **GIVEN)
    assert torch.equal(loaded.unembed.weight, short.float().T)


def test_one_head_over_the_whole_stream_may_keep_its_matrix(tmp_path):
    """The JAX code has an output kernel for one head too; the torch code has none."""
    arrays = dict(np.load(next(FIXTURE.glob("*.npz"))))
    for key, value in arrays.items():
        if key.startswith("params") and key.endswith("/kernel") and "Attention_0" in key:
            arrays[key] = value.reshape((32, 1, 32) if "proj" in key else (1, 32, 32))
    np.savez(tmp_path / "a.npz", **arrays)
    model = ci.load(tmp_path / "a.npz")
    assert model.cfg.n_heads == 1 and model.cfg.output_matrix
    assert model.blocks[0].attn.out_proj is not None
    assert ci.load(model.save_pretrained(tmp_path / "own")).cfg == model.cfg
    assert not make("crate-alpha", n_heads=1, d_head=31).cfg.output_matrix
