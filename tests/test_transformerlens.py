"""TransformerLens' cache helpers on our models by a direct computation, and its own tests."""

import sys
import tomllib
from inspect import getattr_static
from pathlib import Path

import pytest
import torch
from transformer_lens import ActivationCache
from typing_extensions import get_protocol_members

import transformerlens_sdist as sdist
import transformerlens_suite as suite
from conftest import BATCH, CLASSES, HEADS, make, make_lm, refuses
from crate_interp.models.hook_aliases import RefusedError
from foreign import pair
from neighbours import make_clip, make_mae
from test_family_fixtures import member

CLS = [3, 7]  # a class for each image


@pytest.fixture
def run(model, images):
    with torch.no_grad():
        logits, cache = model.run_with_cache(images)
    return model, logits, cache


def protocols():
    """The members of each Protocol of TransformerLens that isinstance may be asked about."""
    ours = [module for name, module in sys.modules.items() if name.startswith("transformer_lens")]
    values = {id(value): value for module in ours for value in vars(module).values()}.values()
    asked = [one for one in values if isinstance(one, type) and "_is_runtime_protocol" in vars(one)]
    return {one: get_protocol_members(one) for one in asked if one._is_runtime_protocol}


@pytest.mark.parametrize(
    "build",
    [make, make_lm, make_mae, make_clip, lambda: make_clip().text, lambda: pair("gpt2")[1]],
    ids=["vision", "language", "autoencoder", "clip", "text tower", "bridged"],
)
def test_a_protocol_is_met_by_every_way_to_look(build):
    """Since Python 3.12 isinstance looks for members as getattr_static does."""
    model, nothing = build(), object()
    for protocol, names in protocols().items():
        met = all(hasattr(model, name) for name in names)
        static = all(getattr_static(model, name, nothing) is not nothing for name in names)
        assert (static, isinstance(model, protocol)) == (met, met), protocol


def test_logit_lens_reads_where_the_model_reads(run, images):
    model, logits, cache = run
    torch.testing.assert_close(cache.logit_lens().values[-1], logits, atol=1e-5, rtol=1e-5)
    last = cache.logit_lens(positions=-1).values[-1]  # TransformerLens' own default: a patch
    assert (last - logits).abs().max() > 0.1
    _, mean_cache = make(model.cfg.family, pool="mean").run_with_cache(images)
    assert torch.equal(mean_cache.logit_lens().values, mean_cache.logit_lens(positions=None).values)


def test_pos_slice_cuts_the_declared_axis(model, images):
    with torch.no_grad():
        _, whole = model.run_with_cache(images)
        _, cut = model.run_with_cache(images, pos_slice=(1, 4))
        _, one = model.run_with_cache(images, pos_slice=0)
    for name, value in whole.cache_dict.items():
        if name.endswith(("hook_attn_scores", "hook_pattern")):
            expected, single = value[:, :, 1:4], value[:, :, :1]
        elif name == "hook_pooled":
            expected = single = value
        else:
            expected, single = value[:, 1:4], value[:, :1]
        assert torch.equal(cut[name], expected), name
        assert torch.equal(one[name], single), name
    assert cut["u", 0, "attn"].shape == (BATCH, 3, HEADS, 7)


def test_cached_gradients(model, images):
    name = "blocks.1.hook_resid_mid"

    with model.hooks(fwd_hooks=[]):
        cache, forward, backward = model.get_caching_hooks(name, incl_bwd=True)
        with model.hooks(fwd_hooks=forward, bwd_hooks=backward):
            model(images)[:, 3].sum().backward()
    half = model(images, stop_at_layer=1)
    block = model.blocks[1]
    mid = (half + block.attn(half, block.ln1)).detach().requires_grad_()
    out = block.mlp(block.ln2(mid))
    out = mid + out if block.residual else out
    model(out, start_at_layer=2)[:, 3].sum().backward()
    torch.testing.assert_close(cache[name + "_grad"], mid.grad, atol=1e-5, rtol=1e-4)


def test_labels_are_tokens():
    model = make(labels=[f"class {i}" for i in range(CLASSES)])
    assert model.to_single_token("class 7") == 7
    assert model.to_tokens(["class 3", "class 7"]).tolist() == CLS
    directions = model.tokens_to_residual_directions("class 7")
    torch.testing.assert_close(directions, model.W_U[:, 7] * model.ln_final.weight, atol=0, rtol=0)
    refuses("there is no class 'shoe': the labels", lambda: model.to_single_token("shoe"))


def read_out(run, stack):
    """The logits of normed streams, at the tokens that the model reads."""
    model, logits, _ = run
    out = stack @ model.W_U + model.b_U
    cap = getattr(model.cfg, "softcap", None)
    out = out if cap is None else cap * torch.tanh(out / cap)
    if model.cfg.kind == "text":
        return out, logits
    return out.mean(dim=-2) if model.cfg.pool == "mean" else out[..., 0, :], logits


def constant(model):
    bias = getattr(model.ln_final, "bias", None)
    return model.b_U if bias is None else model.b_U + bias @ model.W_U


def attributions(run):
    model, logits, cache = run
    found = cache.logit_attrs(cache.decompose_resid(), 3).sum(dim=0)[..., None]
    if model.cfg.kind != "text":
        found = found.mean(dim=1) if model.cfg.pool == "mean" else found[:, 0]
    return found[..., 0], (logits - constant(model))[..., 3]


def normed_streams(run):
    return read_out(run, run[2].accumulated_resid(apply_ln=True)[-1])


def heads(run):
    model, _, cache = run
    parts = cache.stack_head_results(incl_remainder=True)
    first = parts[: model.cfg.n_heads].sum(dim=0) + model.blocks[0].attn.b_O
    return torch.stack([first, parts.sum(dim=0)]), torch.stack(
        [cache["attn_out", 0], cache["resid_post", -1]]
    )


def head_results(run):
    model, _, cache = run
    cache.compute_head_results()
    return cache["result", 1].sum(dim=-2) + model.blocks[1].attn.b_O, cache["attn_out", 1]


def neurons_of_a_layer(run):
    """What the neurons of a layer write: its output, or the next stream where they replace it."""
    model, _, cache = run
    parts = cache.get_neuron_results(1).sum(dim=-2)
    if not model.cfg.residual:
        return parts, cache["resid_post", 1]
    return parts + model.blocks[1].mlp.b_out, cache["mlp_out", 1]


def neurons(run):
    _, _, cache = run
    return cache.stack_neuron_results(-1, incl_remainder=True).sum(dim=0), cache["resid_post", -1]


def neurons_by_layer(run):
    model, _, cache = run
    parts = cache.stack_neuron_results(-1)[: model.cfg.d_mlp].sum(dim=0)
    return parts + model.blocks[0].mlp.b_out, cache["mlp_out", 0]


def streams(run):
    model, _, cache = run
    wanted = [cache["resid_pre", layer] for layer in range(model.cfg.n_layers)]
    return cache.accumulated_resid(), torch.stack([*wanted, cache["resid_post", -1]])


def decomposed(run):
    _, _, cache = run
    return cache.decompose_resid().sum(dim=0), cache["resid_post", -1]


def fully_decomposed(run):
    model, _, cache = run
    parts = cache.get_full_resid_decomposition(expand_neurons=not model.cfg.attn_only)
    return parts.sum(dim=0), cache["resid_post", -1]


# public method -> (what it gives, what that must equal)
ADDS_UP = {
    "accumulated_resid": [streams],
    "apply_ln_to_stack": [normed_streams],
    "compute_head_results": [head_results],
    "decompose_resid": [decomposed],
    "get_full_resid_decomposition": [fully_decomposed],
    "get_neuron_results": [neurons_of_a_layer],
    "logit_attrs": [attributions],
    "logit_lens": [lambda run: (run[2].logit_lens().values[-1], run[1])],
    "stack_activation": [lambda run: (run[2].stack_activation("z")[1], run[2]["z", 1])],
    "stack_head_results": [heads],
    "stack_neuron_results": [neurons, neurons_by_layer],
}
NO_PARTS = {
    "apply_slice_to_batch_dim", "compute_ssm_effective_attention", "compute_ssm_state", "items",
    "keys", "remove_batch_dim", "ssm_layers", "to", "toggle_autodiff", "values",
}  # fmt: skip
PARTS = {
    "decompose_resid", "get_full_resid_decomposition", "logit_attrs", "stack_head_results",
    "stack_neuron_results",
}  # fmt: skip
CODE = PARTS | {"get_neuron_results"}  # the code is the next stream, and there is no W_out
REFUSED = {
    "crate": CODE, "crate conv": CODE, "cbt": CODE, "tost-ista": CODE, "crate-lm vanilla": CODE,
    "crate-lm": PARTS, "nanochat-crate": PARTS, "crate-alpha": set(), "gpt-baseline": set(),
    "tost-lm": set(), "crate-bert": CODE, "aot": {"get_neuron_results", "stack_neuron_results"},
    "tost": {"apply_ln_to_stack", "logit_attrs", "logit_lens"},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_each_method_of_a_cache_adds_up_or_is_refused(name):
    own = {name for name in vars(ActivationCache) if not name.startswith("_")}
    assert own == ADDS_UP.keys() | NO_PARTS  # a new method needs a check here
    drawn = torch.Generator().manual_seed(3)
    if "lm" in name or name in ("gpt-baseline", "nanochat-crate", "crate-bert"):
        model, inputs = make_lm(name), torch.randint(47, (2, 7), generator=drawn)
    else:
        model = make(name) if name in ("crate", "crate-alpha") else member(name)[0]
        inputs = torch.randn(2, 3, *model.cfg.image_size, generator=drawn)
    with torch.no_grad():
        logits, cache = model.run_with_cache(inputs)
        run, refused = (model, logits, cache), set()
        for method, checks in ADDS_UP.items():
            for check in checks:
                try:
                    found, wanted = check(run)
                except (ValueError, AttributeError, KeyError):
                    refused.add(method)
                else:
                    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert refused == REFUSED[name]
    for method in PARTS & refused if PARTS <= refused else ():
        with pytest.raises(RefusedError, match="do not add up to a logit"):
            getattr(cache, method)(*([cache["resid_post", -1], 3] if "logit" in method else [-1]))


HERE = Path(__file__).parent
TABLE = tomllib.loads(suite.TABLE.read_text())
FAST = [
    "tests/integration/model_bridge/test_bridge_start_at_layer.py",
    "tests/unit/model_bridge/test_gated_hooks.py",
    "tests/unit/model_bridge/test_caching_remove_batch_dim.py",
    "tests/unit/test_generate_no_tokenizer.py",
]


def test_each_expected_failure_has_a_group_a_reason_and_a_file():
    listed = suite.expected(TABLE)
    counted = [test for test, (group, _) in listed.items() if group in suite.COUNTED]
    assert len(counted) <= suite.AT_MOST
    for test in listed:
        assert any(test.startswith(file) for file in TABLE["files"]), test
    assert len((HERE / "transformerlens_shim.py").read_text().splitlines()) <= 120


@pytest.mark.slow
def test_some_of_transformerlens_own_tests(tmp_path, monkeypatch):
    try:
        source = sdist.unpacked(None, tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    words = tmp_path / "tokenizer.json"
    words.write_text(sdist.tokenizer(sdist.words(source)))
    monkeypatch.setenv("TL_TOKENIZER", str(words))
    suite.run(source, FAST, 0, tmp_path / "report")
    found = suite.outcomes(tmp_path / "report")
    assert len(found) > 40 and sum(each["ours"] for each in found.values()) > 20
    assert suite.differences(found, suite.expected(TABLE)) == []
