"""ci.load: both layouts in every shape, and what it says of everything else."""

import shutil

import pytest
import torch
import torch.nn.functional as F

import crate_interp as ci
from conftest import D_HEAD, D_MODEL, HEADS, IMAGE, fails, make, same_model
from forward_reference import _ista, _mssa, forward, published_layout

GIVEN = dict(n_heads=HEADS, image_size=IMAGE["image_size"])


def given(model):
    return GIVEN | ({"patch_size": (2, 5)} if model.cfg.family == "crate" else {})


@pytest.mark.parametrize("family", ["crate", "crate-alpha"])
@pytest.mark.parametrize(
    "over",
    [
        dict(n_heads=1, d_head=D_MODEL),
        dict(n_heads=1, d_head=D_HEAD),
        dict(n_heads=3, d_head=13),
        dict(image_size=12, patch_size=4),
        dict(eta=0.3, lambd=0.7, pool="mean", interpolate_pos=True, channels=1),
    ],
)
def test_other_shapes(family, over):
    model = make(family, **over)
    said = {k: v for k, v in (IMAGE | over).items() if k not in ("d_head",)} | {
        "n_heads": model.cfg.n_heads
    }
    same_model(ci.load(published_layout(model), **said), model)


def test_a_module_and_inference(images):
    class Theirs(torch.nn.Module):
        def state_dict(self, *args, **kwargs):
            return published_layout(model)

    model = make(image_size=12, patch_size=4)
    loaded = ci.load(Theirs(), n_heads=HEADS)  # square: sizes come from the tensors
    same_model(loaded, model)
    assert loaded.cfg.d_head == D_HEAD
    assert loaded.cfg.n_classes == 11
    assert loaded.cfg.image_size == (12, 12)


def test_the_demo_head(tmp_path, images):
    """The keys of CRATE and two more, which make mlp_head a feature map and head the classes."""
    model = make("crate", d_features=17)
    weights = published_layout(model)
    torch.save({"model": weights}, tmp_path / "demo.pth")
    loaded = ci.load(tmp_path / "demo.pth", **given(model))
    same_model(loaded, model)
    with torch.no_grad():
        logits, cache = loaded.run_with_cache(images)
        features = forward(weights, images, "crate", HEADS, IMAGE["patch_size"])
        plain = F.linear(features, weights["head.weight"], weights["head.bias"])
    torch.testing.assert_close(logits, plain)
    torch.testing.assert_close(cache["hook_features"], features)
    torch.testing.assert_close(cache["hook_pooled"] @ loaded.W_U + loaded.b_U, logits)
    same_model(ci.load(loaded.save_pretrained(tmp_path / "own")), loaded)
    del weights["head.bias"]
    fails(r"keys missing \(1\): head.bias \[11\]", weights, **given(model))
    fails("d_features=3 contradicts the", published_layout(model), d_features=3, **given(model))
    fails("d_features=0: give a whole", published_layout(model), d_features=0, **given(model))


# first words of the refusal -> what is given beside the published tensors of both families
CONTRADICTED = {
    "d_model=64 contradicts the tensors, which make it 31": {"d_model": 64},
    "n_heads=4 does not divide the 35 rows": {"n_heads": 4},
    r"patch_size=\(3, 5\) .*contradicts": {"patch_size": (3, 5)},
    r"image_size=\(6, 25\) .*contradicts pos_embedding": {"image_size": (6, 25)},
    r"no field 'lambda'. Did you mean lambd\?": {"lambda": 0.1},
    "n_heads='5': give a whole number": {"n_heads": "5"},
    "torch cannot compute on device='gpu'": {"device": "gpu"},
    "too large for torch.float16": {"dtype": torch.float16},
    "family='vit' has no known layout: give one of 'crate'": {"family": "vit"},
}
UNKNOWN = {  # first words -> a source, and what is given beside it
    "is not a file, folder, known model .* Did you mean crate-tiny-fashion": "crate-tiny-fashon",
    "has several files: give one of them, .* torch/crate_alpha_B16.pth": "UCSC-VLAA/CRATE-alpha",
    "is not on the Hub: download it from https://drive.google": "crate-small-imagenet1k",
    "what its files hold, .* is not known. Give a file of the repo": "youyou321-crate",
    "file='x' has no meaning for crate-tiny-fashion": ("crate-tiny-fashion", {"file": "x"}),
    "has no revision 'step-7': give one of step-0": ("crate-tiny-fashion", {"revision": "step-7"}),
    "no revision 'step-7': its steps .* lie in the rep": ("crate-tiny-lm", {"revision": "step-7"}),
    "has no published layout: the first of its 2 keys are a, b; crate, the nearest": (
        {"a": torch.ones(2), "b": torch.ones(3)},
        {"n_heads": 1},
    ),
    "ci.bridge.load loads ViT, DeiT": {"vit.layernorm.weight": torch.ones(2)},
    "holds no tensors": {"a": 3},
}


@pytest.mark.parametrize("match", CONTRADICTED)
def test_what_contradicts_the_tensors_is_refused(model, match):
    loud = {"mlp_head.1.bias": torch.full((11,), 7e4)} if "float16" in match else {}
    weights = published_layout(model) | loud
    fails(match, weights, **given(model) | CONTRADICTED[match])


@pytest.mark.parametrize("match", UNKNOWN)
def test_what_is_no_model_is_refused(match):
    source, more = UNKNOWN[match] if isinstance(UNKNOWN[match], tuple) else (UNKNOWN[match], {})
    fails(match, source, **more)


def test_what_tensors_cannot_tell_and_bad_weights(model):
    weights = published_layout(model)
    fails("n_heads.* cannot .* one of 1, 5, 7, 35", weights)
    fails("12 patches make no square grid", weights, n_heads=HEADS, patch_size=(2, 5))
    if model.cfg.family == "crate":
        fails("patch_size.* cannot be inferred.* have 30 values", weights, n_heads=HEADS)
    other = {"crate": "crate-alpha", "crate-alpha": "crate"}[model.cfg.family]
    fails("the key .* is missing", weights, family=other, **given(model))
    broken = weights["mlp_head.1.bias"].clone()
    broken[2] = float("inf")
    for key, value, match in (
        ("mlp_head.1.bias", broken, "holds 1 NaN or Inf among its 11 numbers"),
        ("cls_token", torch.ones(1, 1, 31).long(), "is torch.int64; expected a dense floating"),
    ):
        fails(f"{key} {match}", weights | {key: value}, **given(model))


def test_the_ablation_with_crates_own_step(images):
    """CRATE-alpha's code with a square dictionary.

    It has a convolution, no output bias, CRATE's ISTA step, no residual, eps 1e-5.
    """
    model = make("crate-alpha", sparse_step="ista", ln_eps=1e-5)
    weights = published_layout(model)
    assert weights["transformer.layers.0.1.fn.D"].shape == (D_MODEL, D_MODEL)
    assert "transformer.layers.0.1.fn.D1" not in weights
    loaded = ci.load(weights, **given(model))
    same_model(loaded, model)
    assert not loaded.cfg.residual
    named = {
        key.replace(".1.fn.D", ".1.fn.weight").replace("conv1", "x"): value
        for key, value in weights.items()
    }
    z = loaded.embed(images)
    z = torch.cat([loaded.cls_token.expand(len(z), -1, -1), z], dim=1) + loaded.pos_embed
    for layer in range(loaded.cfg.n_layers):
        stem = f"transformer.layers.{layer}."
        first, second = (
            tuple(named[f"{stem}{part}.norm.{leaf}"] for leaf in ("weight", "bias"))
            for part in (0, 1)
        )
        mid = z + _mssa(named, f"{stem}0.fn.", F.layer_norm(z, (D_MODEL,), *first), HEADS, "crate")
        z = _ista(named[f"{stem}1.fn.weight"], F.layer_norm(mid, (D_MODEL,), *second), 0.1, 0.1)
    head = F.layer_norm(z[:, 0], (D_MODEL,), named["mlp_head.0.weight"], named["mlp_head.0.bias"])
    direct = F.linear(head, named["mlp_head.1.weight"], named["mlp_head.1.bias"])
    torch.testing.assert_close(loaded(images), direct, atol=1e-5, rtol=1e-4)


# --- folders of save_pretrained ---


def test_own_folder_round_trip(model, tmp_path, images):
    model = make(
        model.cfg.family,
        labels=[f"c{i}" for i in range(11)],
        mean=[0.1] * 3,
        std=[0.2] * 3,
        resize=8,
        crop=[6, 20],
    )
    folder = model.save_pretrained(tmp_path / "mine")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    loaded = ci.load(folder)
    same_model(loaded, model)
    assert torch.equal(loaded(images), model(images))
    same_model(
        ci.load(str(folder), interpolate_pos=True, eta=0.2),
        make(**model.cfg.to_dict() | {"interpolate_pos": True, "eta": 0.2}),
    )
    fails(r"n_heads=7 contradicts .*config.json, which says 5", folder, n_heads=7)
    fails("has no meaning for", folder, revision="step-0")
    (folder / "README.md").write_text("my words")
    model.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "my words"


def test_bad_folders(tmp_path, model):
    fails("has no config.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    fails("was not written by crate_interp", tmp_path)
    (tmp_path / "config.json").write_text("{")
    fails("is not readable JSON", tmp_path)
    (tmp_path / "config.json").write_text('{"library": "crate_interp", "format": 2}')
    fails("has format 2; this version reads 1", tmp_path)
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"n_layers": 3', '"n_layers": 2'))
    fails(r"keys not used \(\d+\): blocks.2", tmp_path)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").unlink()
    fails("model.safetensors is missing", tmp_path)


def test_steps_along_a_training(tmp_path):
    model = make("crate")
    folder = model.save_pretrained(tmp_path / "mine")
    weights = folder / "model.safetensors"
    (folder / "steps").mkdir()
    fails("mine has no revision 'step-0': it has no steps", folder, revision="step-0")
    for step in (10, 2):
        shutil.copy(weights, folder / "steps" / f"step-{step}.safetensors")
    same_model(ci.load(folder, revision="step-10"), model)
    fails("has no revision '../model': give one of step-2, step-10, or None", folder,
          revision="../model")  # fmt: skip
    weights.rename(tmp_path / "weights")
    fails("model.safetensors is missing", folder)
