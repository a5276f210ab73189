"""ToST, CBT and CRATE behind a convolutional stem, against recordings of the published code."""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file

import crate_interp as ci
import family_reference
from conftest import FIXTURES, refuses
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
    refuses("n_heads=2 contradicts the .* 4", lambda: ci.load(file, n_heads=2), ci.CheckpointError)


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
