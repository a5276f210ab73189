"""The published layouts against recorded references: logits and every tensor inside."""

import json

import pytest
import torch
from safetensors.torch import load_file

import crate_interp as ci
from conftest import FIXTURES
from reference import forward
from test_families import check_blocks, same

CASES = {
    "crate": {},
    "crate_alpha": {},
    "crate_variant_c": {"variant": "c"},
    "crate_variant_n": {"variant": "n"},
    "crate_variant_t": {"variant": "t"},
    "crate_variant_identity": {"variant": "identity"},
}


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
    """[batch, patch, row column channel], by loops."""
    height, width = patch
    rows = range(0, images.shape[2], height)
    columns = range(0, images.shape[3], width)
    cuts = [
        images[:, :, r : r + height, c : c + width].permute(0, 2, 3, 1).flatten(1)
        for r in rows
        for c in columns
    ]
    return torch.stack(cuts, dim=1)


@pytest.mark.parametrize("case", CASES)
def test_float64_agrees_with_a_plain_forward(case):
    model, recorded, meta, file = load_case(case, dtype=torch.float64)
    weights = torch.load(file, weights_only=True)
    weights = weights.get("state_dict", weights)
    weights = {name.removeprefix("module."): value.double() for name, value in weights.items()}
    family = "crate-alpha" if case == "crate_alpha" else "crate"
    heads = meta["config"]["heads"]
    images = recorded["images"].double()
    with torch.no_grad():
        plain = forward(weights, images, family, heads, model.cfg.patch_size, **CASES[case])
        torch.testing.assert_close(model(images), plain, atol=1e-10, rtol=1e-10)
        single = load_case(case)[0](recorded["images"])
    assert (single.double() - plain).abs().max() > 1e-10  # float32 is what the bound tells apart


def test_official_numbers():
    model, recorded, meta, _ = load_case("crate")
    result = ci.sweep(model, recorded["images"], progress=False)
    table = result.samples()
    for layer in range(model.cfg.n_layers):
        rate = table[table["layer"] == layer]["compression.official_rate"]
        zeros = table[table["layer"] == layer]["sparsity.zero_fraction"]
        assert rate.mean() == pytest.approx(meta["official_coding_rate"]["mean"][layer], rel=1e-4)
        assert rate.std() == pytest.approx(
            meta["official_coding_rate"]["std"][layer], rel=1e-4
        )  # unbiased, as there
        assert zeros.mean() == pytest.approx(meta["official_sparsity"]["mean"][layer], rel=1e-4)
        assert zeros.std(ddof=0) == pytest.approx(
            meta["official_sparsity"]["std"][layer], rel=1e-4
        )  # population
        assert rate.mean() == pytest.approx(
            float(recorded["official_coding_rate_mean"][layer]), rel=1e-4
        )
        assert zeros.mean() == pytest.approx(
            float(recorded["official_sparsity_mean"][layer]), rel=1e-4
        )
