"""The published layouts against recorded references: logits and every tensor inside."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.testing import assert_close

import crate_interp as ci
from conftest import FIXTURES

# name in the recordings -> our hook point, in a block
POINTS = {
    "in": "hook_resid_pre", "ln1": "ln1.hook_normalized", "mssa_in": "ln1.hook_normalized",
    "scores": "attn.hook_attn_scores", "attn": "attn.hook_pattern", "head_out": "attn.hook_z",
    "attn_out": "hook_attn_out", "mid": "hook_resid_mid", "ln2": "ln2.hook_normalized",
    "odl_in": "ln2.hook_normalized", "ista_pre": "mlp.hook_pre", "ista": "mlp.hook_post",
    "z1_pre": "mlp.hook_pre_init", "z1": "mlp.hook_post_init", "z2_pre": "mlp.hook_pre",
    "z2": "mlp.hook_post", "h_pre": "mlp.hook_pre", "code": "mlp.hook_post",
    "odl_out": "hook_mlp_out", "mlp_out": "hook_mlp_out", "mlp_post": "mlp.hook_post",
    "out": "hook_resid_post", "qkv": "attn.hook_u", "w": "attn.hook_u", "ff": "hook_resid_mid",
}  # fmt: skip


def recorded(case):
    return load_file(FIXTURES / case / "io.safetensors")


def same(ours, theirs, name, atol=2e-5, rtol=1e-4):
    assert_close(ours, theirs, atol=atol, rtol=rtol, msg=lambda text: f"{name}: {text}")


def check_blocks(cache, tensors, theirs, ours, seen, points=POINTS, atol=2e-5):
    """Every recorded tensor of the blocks `theirs.{l}.*` beside the cached one of `ours.{l}`."""
    found = [name for name in tensors if name.startswith(theirs)]
    assert found
    for name in found:
        layer, kind = name.removeprefix(theirs).split(".")
        value = cache[f"{ours}{layer}.{points[kind]}"]
        if kind == "w":
            value = value.transpose(1, 2)  # recorded [batch, head, pos, d_head]
        if kind in ("head_out", "qkv"):
            value = value.flatten(2)
        if theirs.startswith("dec") and kind == "attn_out":
            value = -value  # ours is the signed contribution
        same(value, tensors[name], name, atol=atol)
        seen.add(name)


@pytest.mark.parametrize(
    "case", ["crate_lm_overcomplete", "crate_lm_vanilla", "crate_lm_gpt_baseline"]
)
def test_language_models(case):
    tensors, meta = recorded(case), json.loads((FIXTURES / case / "meta.json").read_text())
    (file,) = [name for name in meta["files"] if name != "io.safetensors"]
    model = ci.load(FIXTURES / case / file)  # heads, context and vocabulary are in the file
    assert (model.cfg.n_heads, model.cfg.n_ctx, model.cfg.d_vocab) == (4, 24, 64)
    with torch.no_grad():
        logits, cache = model.run_with_cache(tensors["tokens"])
    seen = {"tokens", "targets"}
    gpt = case == "crate_lm_gpt_baseline"
    untied = {name: value for name, value in tensors.items() if name.endswith(".qkv")}
    for name, value in untied.items():
        layer = int(name.split(".")[1])
        roles = [cache[role, layer].flatten(2) for role in "qkv"]
        same(torch.cat(roles, dim=-1), value, name)
        seen.add(name)
    blocks = {name: value for name, value in tensors.items() if name not in untied}
    check_blocks(cache, blocks, "blocks.", "blocks.", seen)
    same(cache["hook_embed"] + cache["hook_pos_embed"], tensors["embed"], "embed")
    same(logits, tensors["logits"], "logits")
    same(logits[:, -1:], tensors["logits_last"], "logits_last")
    loss = F.cross_entropy(logits.flatten(0, 1), tensors["targets"].flatten())
    same(loss, tensors["loss"].squeeze(), "loss")
    if "ln_f" in tensors:
        same(cache["ln_final.hook_normalized"], tensors["ln_f"], "ln_f")
    assert set(tensors) - seen == {"embed", "logits", "logits_last", "loss"} | (
        {"ln_f"} if "ln_f" in tensors else set()
    )
    assert bool(untied) == gpt


def test_nanochat():
    folder, tensors = FIXTURES / "nanochat_crate_alpha", recorded("nanochat_crate_alpha")
    plain = ci.load(folder / "model.safetensors")
    windowed = ci.load(folder / "model.safetensors", window=True)
    cfg = plain.cfg
    assert (cfg.n_heads, cfg.n_ctx, cfg.d_vocab, cfg.softcap) == (2, 16, 285, 15.0)
    with torch.no_grad():
        logits, cache = windowed.run_with_cache(tensors["tokens"])
        free_logits, free = plain.run_with_cache(tensors["tokens"])
    seen = {"tokens", "short.tokens"}
    rotated = [name for name in tensors if name.endswith(".w")]
    for name in rotated:
        for role in "qkv":
            same(
                cache[role, int(name.split(".")[1])].transpose(1, 2), tensors[name], name, atol=1e-4
            )
    rest = {name: value for name, value in tensors.items() if name not in rotated}
    check_blocks(cache, rest, "blocks.", "blocks.", seen, atol=1e-4)
    check_blocks(free, tensors, "nw.blocks.", "blocks.", seen, atol=1e-4)
    same(cache["hook_embed"], tensors["x0"], "x0", atol=1e-4)
    same(cache["ln_final.hook_normalized"], tensors["final_norm"], "final_norm", atol=1e-4)
    raw = cache["ln_final.hook_normalized"] @ windowed.unembed.weight.T
    same(raw, tensors["logits_raw"], "logits_raw", atol=1e-4)
    same(logits, tensors["logits"], "logits", atol=1e-4)
    same(free_logits, tensors["logits_no_window"], "logits_no_window", atol=1e-4)
    with torch.no_grad():
        for model in (plain, windowed):
            same(model(tensors["short.tokens"]), tensors["short.logits"], "short.logits", atol=1e-4)
        past = ci.Past()
        pieces = [
            windowed(tensors["tokens"][:, a:b], past=past) for a, b in ((0, 5), (5, 6), (6, 14))
        ]
    same(torch.cat(pieces, dim=1), tensors["logits_kv_cache"], "logits_kv_cache", atol=1e-4)
    assert (logits - free_logits).abs().max() > 0.1  # the switch does something
    named = "x0 final_norm logits_raw logits logits_no_window short.logits logits_kv_cache"
    assert set(tensors) - seen == {*named.split(), *rotated}


def test_masked_autoencoder():
    file, tensors = FIXTURES / "crate_mae" / "checkpoint-799.pth", recorded("crate_mae")
    model = ci.load(file, n_heads=4)
    assert (model.cfg.lambd, model.cfg.decoder_n_layers, model.cfg.decoder_n_heads) == (0.5, 2, 4)
    with torch.no_grad():
        out, cache = model.run_with_cache(tensors["images"], tensors["noise"])
        normalised = ci.load(file, n_heads=4, norm_pix_loss=True)(
            tensors["images"], tensors["noise"]
        )
        full, whole = model.run_with_cache(tensors["images"], mask_ratio=0)
        interpolated, other = model.run_with_cache(tensors["interp.images"], mask_ratio=0)
    seen = {"images", "noise", "ids_restore", "interp.images"}
    check_blocks(cache, tensors, "enc_blocks.", "blocks.", seen)
    check_blocks(cache, tensors, "dec_blocks.", "decoder_blocks.", seen)
    assert torch.equal(tensors["noise"].argsort(dim=1).argsort(dim=1), tensors["ids_restore"])
    last = model.cfg.n_layers - 1
    expected = {
        "patch_embed": model.embed(tensors["images"]),
        "patchify": model.patchify(tensors["images"]),
        "mask": out.mask,
        "latent": out.latent,
        "dec_norm": cache["decoder_norm.hook_normalized"],
        "pred": out.pred,
        "loss": out.loss,
        "loss_norm_pix": normalised.loss,
        "full.tokens": whole["hook_embed"] + whole["hook_pos_embed"],
        "full.norm": full.latent,
        "full.attn_last": whole[f"blocks.{last}.attn.hook_pattern"],
        "full.key_last": whole[f"blocks.{last}.attn.hook_u"].flatten(2),
        "interp.pos_embed": other["hook_pos_embed"][:1],
        "interp.tokens": other["hook_embed"] + other["hook_pos_embed"],
        "interp.key_last": other[f"blocks.{last}.attn.hook_u"].flatten(2),
    } | {
        f"full.blocks.{layer}.out": whole[f"blocks.{layer}.hook_resid_post"]
        for layer in range(last + 1)
    }
    for name, value in expected.items():
        same(value, tensors[name].squeeze() if "loss" in name else tensors[name], name)
    assert set(tensors) - seen == set(expected)
    assert_close(
        model.unpatchify(model.patchify(tensors["images"])), tensors["images"], atol=0, rtol=0
    )


def test_clip():
    file = FIXTURES / "crate_alpha_clipa" / "crate_alpha_CLIPA_L14.pth"
    tensors = recorded("crate_alpha_clipa")
    model = ci.load(file, n_heads=4, text_n_heads=3)
    with torch.no_grad():
        similarity, cache = model.run_with_cache(tensors["images"], tensors["tokens"])
        image, text = model.encode_image(tensors["images"]), model.encode_text(tensors["tokens"])
        alone = model.visual.run_with_cache(tensors["images"])[1]
    seen = {"images", "tokens"}
    check_blocks(cache, tensors, "visual.blocks.", "visual.blocks.", seen)
    visual = {
        name.removeprefix("visual."): value
        for name, value in tensors.items()
        if name.startswith("visual.")
    }
    check_blocks(alone, visual, "blocks.", "blocks.", set())
    check_blocks(cache, tensors, "text.blocks.", "text.blocks.", seen)
    expected = {
        "image_features": image,
        "text_features": text,
        "similarity": similarity,
        "visual.patch_embed": model.visual.embed(tensors["images"]),
        "visual.ln_post": cache["visual.hook_pooled"],
        "text.ln_final": cache["text.ln_final.hook_normalized"],
    }
    for name, value in expected.items():
        same(value, tensors[name], name, atol=1e-4 if name == "similarity" else 2e-5)
    assert set(tensors) - seen == set(expected)


def test_sparse_autoencoder():
    tensors = recorded("crate_lm_sae")
    sae = ci.load(FIXTURES / "crate_lm_sae" / "0.pt")
    assert sae.cfg.hook_name == "blocks.0.mlp.hook_post"
    assert (sae.cfg.d_in, sae.cfg.d_sae) == (128, 256)
    with torch.no_grad():
        acts = sae.encode(tensors["x"])
        same(acts, tensors["acts"], "acts")
        same(sae.decode(acts), tensors["recon"], "recon")
        same(sae(tensors["x"]), tensors["recon"], "recon")
        errors = (sae(tensors["x"]) - tensors["x"]).square().sum(dim=-1).mean()
        sparsity = sae.cfg.l1_coeff * acts.abs().sum()
    same(errors, tensors["l2_loss"].squeeze(), "l2_loss")
    same(sparsity, tensors["l1_loss"].squeeze(), "l1_loss")
    same(errors + sparsity, tensors["loss"].squeeze(), "loss")
    lm = ci.load(FIXTURES / "crate_lm_overcomplete" / "ckpt-crate-12l-overparam-600000.pt")
    with torch.no_grad():
        _, cache = lm.run_with_cache(recorded("crate_lm_overcomplete")["tokens"])
    # it reads the model's own hook point
    same(cache[sae.cfg.hook_name].flatten(0, 1), tensors["x"], "x")


VARIANTS = {f"crate_variant_{name}": {"variant": name} for name in ("c", "n", "t", "identity")}
CASES = {"crate": {}, "crate_alpha": {}} | VARIANTS


def load_case(case, **over):
    folder = FIXTURES / case
    meta = json.loads((folder / "meta.json").read_text())
    (file,) = [name for name in meta["files"] if name != "io.safetensors"]
    model = ci.load(folder / file, n_heads=meta["config"]["heads"], **CASES.get(case, {}), **over)
    return model, load_file(folder / "io.safetensors"), meta, folder / file


@pytest.mark.parametrize("case", [*CASES, "crate_demo21k"])
def test_every_recorded_tensor(case):
    model, recorded, _, _ = load_case(case)
    with torch.no_grad():
        logits, cache = model.run_with_cache(recorded["images"])
    demo = case == "crate_demo21k"
    same(logits, recorded["head_of_mlp_head" if demo else "logits"], "logits")
    if demo:
        same(cache["hook_features"], recorded["mlp_head_out"], "mlp_head_out")
        same(cache["u", -1, "attn"].flatten(2), recorded["key_last"], "key_last")
    seen = {"images", "logits"}
    check_blocks(cache, recorded, "blocks.", "blocks.", seen)
    pooled = cache[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"][:, 0]
    same(pooled, recorded["pooled"], "pooled")
    same(cache["hook_embed"][:, 1:], recorded["patch_embed"], "patch_embed")
    if "head_ln" in recorded:
        same(cache["hook_pooled"], recorded["head_ln"], "head_ln")
    if "patches_normed" in recorded:
        patches = _patches(recorded["images"], model.cfg.patch_size)
        same(model.embed.norm_patch(patches), recorded["patches_normed"], "patches_normed")
    seen |= {"pooled", "patch_embed", "head_ln", "patches_normed"}
    seen |= {"head_of_mlp_head", "mlp_head_out", "key_last"} if demo else set()
    official = {name for name in recorded if name.startswith("official_")}  # test_official_numbers
    assert set(recorded) - seen - official == set()


def _patches(images, patch):
    height, width = patch
    rows = range(0, images.shape[2], height)
    columns = range(0, images.shape[3], width)
    cuts = [
        images[:, :, r : r + height, c : c + width].permute(0, 2, 3, 1).flatten(1)
        for r in rows
        for c in columns
    ]
    return torch.stack(cuts, dim=1)


def test_official_numbers():
    """The deviation of the rate is unbiased there, that of the sparsity is the population's."""
    model, recorded, meta, _ = load_case("crate")
    table = ci.sweep(model, recorded["images"], progress=False).samples().groupby("layer")
    found = {
        "official_coding_rate": (table["compression.official_rate"], 1),
        "official_sparsity": (table["sparsity.zero_fraction"], 0),
    }
    for name, (values, ddof) in found.items():
        layers, wanted = range(model.cfg.n_layers), meta[name]
        assert list(values.mean()[layers]) == pytest.approx(wanted["mean"], rel=1e-4)
        assert list(values.std(ddof=ddof)[layers]) == pytest.approx(wanted["std"], rel=1e-4)
