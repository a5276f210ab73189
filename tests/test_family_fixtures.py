"""ToST, CBT, attention alone and conv stems: recordings, hooks, weights, text, round trips."""

import argparse
import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file

import crate_interp as ci
import family_reference
from conftest import FIXTURES, make, refuses
from crate_interp.probes.segmentation_probe import head_maps
from test_families import POINTS, same

PLAIN = {
    "tost_vision": family_reference.tost,
    "tost_lang": family_reference.tost_lm,
    "cbt": family_reference.cbsa_file,
    "crate_conv_stem": family_reference.cbsa_file,
    "tost_ista_conv_stem": family_reference.cbsa_file,
}
FAMILIES = dict(zip(PLAIN, ("tost", "tost-lm", "cbt", "crate", "tost-ista"), strict=True))
# name in the recording -> our hook point, in a block
BLOCK = POINTS | {
    "pi": "attn.hook_pi", "attn": "attn.hook_weight", "pooled": "attn.hook_rep",
    "pattern": "attn.hook_contract", "rep_pattern": "attn.hook_rep_pattern",
    "attn_raw": "hook_attn_out", "mlp_pre": "mlp.hook_pre", "mlp_raw": "hook_mlp_out",
}  # fmt: skip


def load_case(case, **over):
    folder = FIXTURES / case
    meta = json.loads((folder / "meta.json").read_text())
    (file,) = [one for one in folder.iterdir() if one.name not in ("meta.json", "io.safetensors")]
    heads = meta["config"].get("heads") or meta["config"]["n_head"]
    size = meta["config"].get("image_size")
    over = {"n_heads": heads, **({"image_size": size} if size else {}), **over}
    recorded = load_file(folder / "io.safetensors")
    inputs = recorded.pop("images", recorded.pop("tokens", None))
    return ci.load(file, **over), inputs, recorded, file, heads


def in_block(model, cache, blocks, layer, kind):
    point = BLOCK[kind]
    if kind == "attn" and f"{blocks}.{layer}.attn.hook_pattern" in cache:
        point = "attn.hook_pattern"
    ours, block = cache[f"{blocks}.{layer}.{point}"], getattr(model, blocks)[layer]
    if kind in ("w", "head_out"):
        return ours.flatten(2)
    if kind == "pooled":
        return ours.flatten(2).mT.unflatten(-1, (8, 8))
    if kind == "attn_raw":  # before LayerScale
        return ours / block.attn.gamma
    if kind == "mlp_raw":
        return (ours[:, :1] if blocks == "cls_blocks" else ours) / block.mlp.gamma
    return ours[:, :, 0] if point == "attn.hook_pattern" and blocks == "cls_blocks" else ours


@pytest.mark.parametrize("case", PLAIN)
def test_every_recorded_tensor(case):
    model, inputs, recorded, _, _ = load_case(case)
    assert model.cfg.family == FAMILIES[case]
    with torch.no_grad():
        logits, cache = model.run_with_cache(inputs)
        assert torch.equal(logits, model(inputs))  # hooks that only read change no bit
    special = model.cfg.n_special if model.cfg.kind == "vision" else 0
    ours = {"logits": logits}
    if "patch_embed" in recorded:
        ours["patch_embed"] = cache["hook_embed"][:, special:]
    point = "hook_pooled" if recorded["head_ln"].ndim == 2 else "ln_final.hook_normalized"
    ours["head_ln"] = cache[point]
    for name in recorded:
        if name.endswith(".map"):
            ours[name] = ci.maps.contracted(cache, int(name.split(".")[1]))
        elif "blocks." in name:
            blocks, layer, kind = name.split(".")
            ours[name] = in_block(model, cache, blocks, int(layer), kind)
    assert set(ours) == set(recorded)
    for name, value in recorded.items():
        same(ours[name], value, name)


@pytest.mark.parametrize("case", PLAIN)
def test_float64_agrees_with_a_plain_forward(case):
    model, inputs, recorded, file, heads = load_case(case, dtype=torch.float64)
    held = torch.load(file, weights_only=False)  # our own recording
    weights = held.get("state_dict", held.get("model"))
    weights = {name: value.double() for name, value in weights.items() if value.is_floating_point()}
    given = inputs.double() if inputs.is_floating_point() else inputs
    with torch.no_grad():
        plain = PLAIN[case](weights, given, heads)
        torch.testing.assert_close(model(given), plain, atol=1e-10, rtol=1e-10)
        assert (recorded["logits"].double() - plain).abs().max() > 1e-10


def state(case):
    file = load_case(case)[3]
    held = torch.load(file, weights_only=False)  # our own recording
    weights = dict(held.get("state_dict", held.get("model")))
    return {name.removeprefix("module."): value for name, value in weights.items()}


def test_counters_of_batch_norm_are_dropped_and_a_head_may_be():
    weights = state("cbt")
    assert any(key.endswith("num_batches_tracked") for key in weights)
    with pytest.warns(UserWarning, match="the head is left out"):
        model = ci.load(weights, n_heads=4, image_size=80, head=False)
    assert model(torch.randn(1, 3, 80, 80)).shape == (1, 32)


@pytest.mark.parametrize("case", [case for case in PLAIN if case != "crate_conv_stem"])
def test_a_parameter_with_a_row_per_head_gives_their_number(case):
    *_, file, heads = load_case(case)
    assert ci.load(file).cfg.n_heads == heads == 4
    refuses("n_heads=2 contradicts .* 4", lambda: ci.load(file, n_heads=2), ci.CheckpointError)


def test_the_arguments_of_tosts_trainer_or_the_crop_give_the_image_size(tmp_path):
    file = load_case("tost_vision")[3]
    held = torch.load(file, weights_only=False)
    assert held["args"].input_size == 224
    assert ci.load(file, n_heads=4).cfg.image_size == (224, 224)
    # no tensor depends on the size: what the model will see says more than the trainer's default
    assert ci.load(file, n_heads=4, resize=48, crop=40).cfg.image_size == (40, 40)
    assert ci.load(file, n_heads=4, crop=40, image_size=64).cfg.image_size == (64, 64)
    held["args"] = argparse.Namespace()
    torch.save(held, tmp_path / "own.pth")
    with pytest.warns(UserWarning, match=r"224 x 224 is assumed.*--config image_size=96"):
        assert ci.load(tmp_path / "own.pth", n_heads=4).cfg.image_size == (224, 224)


SQUARE = dict(image_size=(6, 15))  # 3 x 3 patches of (2, 5)
CONV = dict(image_size=(12, 12), patch_size=4, d_model=30, d_head=7)
MEMBERS = {
    "tost": dict(stem="linear"),
    "tost conv": CONV,
    "cbt": dict(stem="linear", **SQUARE),
    "cbt conv": CONV,
    "tost-ista": dict(stem="linear"),
    "aot": {},
    "crate conv": dict(stem="conv", **CONV),
}


def member(name, **over):
    model = make(name.split()[0], **{**MEMBERS.get(name, {}), **over})
    size = model.cfg.image_size
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(3))
    return model, images


@pytest.fixture(params=MEMBERS)
def one(request):
    return member(request.param)


def test_hooked_contributions_add_up_to_the_stream(one):
    model, images = one
    model.set_use_attn_result(True)
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
    for layer, block in enumerate(model.blocks):
        at = lambda name, layer=layer: cache[f"blocks.{layer}.{name}"]  # noqa: E731
        heads = at("attn.hook_result").sum(dim=2) + block.attn.b_O
        torch.testing.assert_close(heads, at("hook_attn_out"), atol=1e-5, rtol=1e-4)
        whole = at("hook_resid_pre") + at("hook_attn_out")
        if not model.cfg.attn_only:
            whole = whole + at("hook_mlp_out")
        torch.testing.assert_close(whole, at("hook_resid_post"), atol=1e-5, rtol=1e-4)
        if model.cfg.has_mlp:  # LayerScale is in the weights that TransformerLens reads
            out = at("mlp.hook_post") @ block.mlp.W_out + block.mlp.b_out
            torch.testing.assert_close(out, at("hook_mlp_out"), atol=1e-5, rtol=1e-4)


def test_what_the_heads_of_tssa_write_is_the_moments_formula():
    model, images = member("tost")
    _, cache = model.run_with_cache(images)
    at = lambda name: cache[f"blocks.2.attn.{name}"].detach()  # noqa: E731
    codes, pi = at("hook_u").transpose(1, 2), at("hook_pi")
    assert torch.allclose(pi.sum(dim=1), torch.ones(()))
    moment = (pi[..., None] * codes**2).sum(dim=2, keepdim=True) / pi.sum(-1)[..., None, None]
    torch.testing.assert_close(at("hook_moment"), moment, atol=1e-6, rtol=1e-4)
    heads = -codes * pi[..., None] / (1 + moment)
    torch.testing.assert_close(at("hook_z").transpose(1, 2), heads, atol=1e-6, rtol=1e-4)
    # a step against the gradient of the variational rate at eps = sqrt(d), by construction
    eps = (model.cfg.n_heads * model.cfg.d_head) ** 0.5
    slope = ci.measures.variational_rate_gradient(codes.double(), pi.double(), eps)
    step = -codes.shape[2] * slope
    torch.testing.assert_close(heads.double(), step, atol=1e-5, rtol=1e-4)


def test_the_square_of_representatives_is_shifted():
    """CLS is pooled and the last patch is not: the published weights were trained so."""
    model, _ = member("cbt")
    attn, u = model.blocks[0].attn, torch.randn(2, 10, 5, 7)
    pooled = attn.pooled(u)
    changed = u.clone()
    changed[:, -1] += 1
    assert torch.equal(attn.pooled(changed), pooled)
    changed = u.clone()
    changed[:, 0] += 1
    assert not torch.allclose(attn.pooled(changed), pooled)
    pooling = attn.reading(torch.zeros(1, 5, 64, 10))[0]  # the same in every head
    shares = torch.einsum("hrn,bnhp->brhp", pooling, u)
    torch.testing.assert_close(shares, pooled, atol=1e-6, rtol=1e-5)


def test_round_trips(one, tmp_path):
    model, images = one
    with torch.no_grad():
        out = model(images)
        model.save_pretrained(tmp_path / "saved")
        for again in (
            ci.load(tmp_path / "saved"),
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
        ):
            assert again.cfg == model.cfg
            assert torch.equal(again(images), out)


def test_batch_norm_stays_frozen_in_train_mode():
    model, images = member("crate conv")
    for norm in model.embed.norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        out = model(images)
        model.train()
        assert torch.equal(model(images), out)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_resized_copy_is_the_model_with_interpolated_positions(one):
    model, images = one
    height, width = model.cfg.image_size
    wide = torch.randn(2, 3, 2 * height, 2 * width, generator=torch.Generator().manual_seed(2))
    finer = model.resized((2 * height, 2 * width))
    loose = ci.CrateConfig.from_dict(model.cfg.to_dict() | {"interpolate_pos": True})
    with torch.no_grad(), torch.random.fork_rng():
        other = ci.HookedCrate(loose).eval()
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(finer(wide), other(wide))
        assert torch.equal(model.resized(model.cfg.image_size)(images), model(images))
    assert finer.cfg.grid == (2 * model.cfg.grid[0], 2 * model.cfg.grid[1])
    refuses("multiples of", lambda: model.resized((height + 1, width)))


@pytest.mark.parametrize("family", ["tost", "cbt"])
def test_maps_of_heads_without_a_pattern(family):
    model, images = member(family)
    with torch.no_grad():
        _, cache = model.run_with_cache(images)
    (point,) = ci.probes.segmentation(kind=model.cfg.facts["attention"]).points
    acts = {point: cache.at(point, 1)}
    maps = head_maps(acts, model.cfg.n_special, 0, True, True)
    assert maps.shape == (2, 5, model.cfg.grid[0] * model.cfg.grid[1])
    if family == "tost":
        assert torch.equal(ci.maps.memberships(cache, 1).flatten(2), maps)
    else:
        whole = ci.maps.contracted(cache, 1)[:, :, 0]
        torch.testing.assert_close(maps, (whole / whole.sum(-1, keepdim=True))[..., 1:])
        refuses("query=99", lambda: head_maps(acts, 1, 99, True, True))
    with pytest.raises(ValueError, match="has none"):
        ci.probes.segmentation(kind=model.cfg.facts["attention"], scaled=False)
