"""The keys of the published models at their real sizes, and small models of every layout."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import crate_interp as ci
from conftest import FIXTURES, fails
from published import GIVEN, SIZES, published

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
    wanted, found = ci.load(weights, **GIVEN[case]), ci.load(path, **GIVEN[case])
    assert found.cfg.d_vocab == 47
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


LARGE = (
    "crate_alpha_clipa_L14", "crate_alpha_clipa_H14", "crate_alpha_L14_in1k",
    "crate_alpha_L8_in21k", "nanochat_crate_d12", "crate_large", "crate_base", "crate_mae_base",
    "crate_alpha_B8_in21k", "crate_lm_12l_overcomplete", "crate_alpha_B32_in21k",
)  # fmt: skip
SIZED = [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in REAL]


@pytest.mark.parametrize("name", SIZED)
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


def run(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, 6, 20, generator=generator)
    with torch.no_grad():
        if model.cfg.kind == "mae":
            return model(images, torch.rand(2, 12, generator=generator)).pred
        if model.cfg.kind == "clip":
            return model(images, torch.randint(47, (3, 13), generator=generator))
        return model(torch.randint(47, (2, 11), generator=generator))


@pytest.mark.parametrize("case", GIVEN)
def test_other_shapes(case, tmp_path):
    weights = published(case, **SIZES.get(case, {}))
    model = ci.load({f"module.{key}": value for key, value in weights.items()}, **GIVEN[case])
    for name, value in GIVEN[case].items():
        assert getattr(model.cfg, name) == value
    out = run(model)
    assert out.isfinite().all()
    torch.save({"model": weights}, tmp_path / "a.pth")
    assert torch.equal(run(ci.load(tmp_path / "a.pth", **GIVEN[case])), out)
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, tmp_path / "model.safetensors"
    )
    assert torch.equal(run(ci.load(tmp_path / "model.safetensors", **GIVEN[case])), out)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nanochat's has no tokenizer beside it here
        folder = model.save_pretrained(tmp_path / "own")
    back = ci.load(folder)
    assert back.cfg == model.cfg and torch.equal(run(back), out)
    for (name, ours), (other, theirs) in zip(
        model.state_dict().items(), back.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(ours, theirs)
    key = sorted(
        key
        for key in weights
        if "norm" not in key and weights[key].ndim == 2 and key in ALWAYS[case]
    )[0]
    with pytest.raises(ci.CheckpointError, match="keys missing|is missing|has no published layout"):
        ci.load({name: value for name, value in weights.items() if name != key}, **GIVEN[case])
    broken = weights | {key: weights[key].clone().fill_(float("nan"))}
    with pytest.raises(ci.CheckpointError, match="NaN or Inf|differs from|holds different"):
        ci.load(broken, **GIVEN[case])


ALWAYS = {
    "crate-mae": {"decoder_pred.weight"},
    "crate-lm": {"transformer.h.0.attn.c_proj.weight"},
    "crate-lm-vanilla": {"transformer.h.0.attn.c_proj.weight"},
    "gpt-baseline": {"transformer.h.1.mlp.c_fc.weight"},
    "nanochat-crate": {"transformer.h.1.mssa.c_proj.weight"},
    "clipa": {"text_projection"},
}


def test_traps_are_refused():
    lm = published("crate-lm")
    fails(
        "lm_head.weight differs from transformer.wte.weight",
        lm | {"lm_head.weight": lm["lm_head.weight"] + 1},
        n_heads=5,
    )
    fails("n_heads cannot be inferred", lm)
    clip = published("clipa")
    key = "visual.transformer.resblocks.1.attn.in_proj_weight"
    untied = clip[key].clone()
    untied[0] += 1
    fails("query, key and value are different", clip | {key: untied}, **GIVEN["clipa"])
    fails("text_n_heads cannot be inferred", clip, n_heads=5, image_size=(6, 20))
    with pytest.warns(UserWarning, match="1 small unknown tensors are left out: extra"):
        ci.load(clip | {"extra": torch.ones(3)}, **GIVEN["clipa"])
    fails(r"keys not used \(1\): extra", clip | {"extra": torch.ones(300, 300)}, **GIVEN["clipa"])
    chat = published("nanochat-crate", p=6)
    fails("n_ctx cannot be inferred", chat, n_heads=5)
    fails(
        "d_vocab=65 contradicts transformer.wte.weight, which has .* it would have 128",
        chat,
        **GIVEN["nanochat-crate"] | {"d_vocab": 65},
    )
    fails("holds an argparse.Namespace|has no published layout", {"a": torch.ones(1)})
    fails("image_size: models of family 'crate-lm'", lm, n_heads=5, image_size=8)
    fails("no field 'hook_name'", lm, n_heads=5, hook_name="x")


def test_lambdas_may_be_missing():
    chat = published("nanochat-crate", p=6)
    model = ci.load(chat, **GIVEN["nanochat-crate"])
    assert torch.equal(model.resid_lambdas, torch.ones(2)) and torch.equal(
        model.x0_lambdas, torch.zeros(2)
    )
    other = ci.load(chat | {"x0_lambdas": torch.ones(2)}, **GIVEN["nanochat-crate"])
    assert not torch.equal(run(other), run(model))


def test_the_file_of_the_config_wins_over_defaults_and_contradictions_are_named(tmp_path):
    chat = published("nanochat-crate", p=6)
    save_file(chat, tmp_path / "model.safetensors")
    config = {"n_head": 5, "sequence_len": 13, "vocab_size": 47, "n_layer": 2, "n_embd": 31}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ci.load(tmp_path).cfg.n_heads == 5  # a snapshot of the repo
    fails("n_heads=6 contradicts the config in", tmp_path / "model.safetensors", n_heads=6)
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    fails("n_layers=3 contradicts the tensors, which make it 2", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"sparse_block_type": "ista"}))
    fails("sparse_block_type='ista'", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[1]")
    fails("holds a list; expected a JSON object", tmp_path / "model.safetensors")
