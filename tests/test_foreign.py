"""A hooked model over a bridge: its points, its edits, its twins, and what it refuses."""

import copy

import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge

import crate_interp as ci
from conftest import refuses
from crate_interp.bridge.hooked_to_bridge import build
from crate_interp.models.hooked import check_hooked
from crate_interp.models.weight_cache import model_digest
from crate_interp.questions.untrained_twins import twin
from foreign import (
    HEADS,
    IMAGES,
    KINDS,
    LAYERS,
    PLAIN,
    SOME,
    VOCAB,
    D,
    inputs,
    inside,
    network,
    outputs,
    pair,
    role_weight,
)


@pytest.mark.parametrize("kind", SOME)
def test_every_point_holds_what_transformers_has_there(kind):
    plain, model = pair(kind)
    theirs, x = outputs(kind), inputs(kind)
    out, cache = model.run_with_cache(x)
    wanted = theirs.logits if hasattr(theirs, "logits") else theirs.last_hidden_state[:, 0]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(model.run_with_hooks(x), wanted)
    assert sorted(cache) == sorted(model.hook_dict)
    for layer in range(LAYERS):
        mid, code = inside(kind)[layer]
        torch.testing.assert_close(cache["pattern", layer], theirs.attentions[layer])
        torch.testing.assert_close(cache["resid_pre", layer], theirs.hidden_states[layer])
        torch.testing.assert_close(cache["resid_mid", layer], mid)
        torch.testing.assert_close(cache["post", layer], code)
        block = model.blocks[layer]
        for role in "qkv":
            stored = role_weight(kind, plain, layer, role)
            count = HEADS if kind != "llama" else 4
            stored = stored.repeat_interleave(count // len(stored), dim=0)
            assert torch.equal(getattr(block.attn, f"W_{role.upper()}"), stored)
        u = role_weight(kind, plain, layer, "v")
        assert torch.equal(block.attn.U, u)
        read = cache["normalized", layer, "ln1"]
        torch.testing.assert_close(
            cache["u", layer, "attn"], torch.einsum("bnd,hdp->bnhp", read, u)
        )
        written = torch.einsum("bnhp,hpd->bnd", cache["z", layer], block.attn.W_O)
        torch.testing.assert_close(cache["attn_out", layer], written + block.attn.b_O)
        torch.testing.assert_close(
            cache["mlp_out", layer], code @ block.mlp.W_out + block.mlp.b_out
        )
    torch.testing.assert_close(
        cache.accumulated_resid(layer=1, incl_mid=True)[1], cache["resid_mid", 0]
    )


def test_the_config_says_what_the_network_is():
    vit, deit, registers = (pair(kind)[1].cfg for kind in ("vit", "deit", "registers"))
    assert (vit.family, vit.kind, vit.d_model, vit.n_heads, vit.n_layers) == (
        "vit", "vision", D, HEADS, LAYERS,
    )  # fmt: skip
    assert [cfg.n_special for cfg in (vit, deit, registers)] == [1, 2, 5]
    assert [cfg.n_ctx for cfg in (vit, deit, registers)] == [10, 11, 14]
    lm = pair("llama")[1].cfg
    assert (lm.kind, lm.causal, lm.value_heads, lm.n_key_value_heads) == ("text", True, 2, 2)
    assert lm.normalization_type == "RMS" and lm.positional_embedding_type == "rotary"
    assert not vit.tied and vit.subspaces == "value" and vit.architecture.startswith("ViTFor")
    assert ci.CrateConfig.from_dict(vit.to_dict()) == vit
    refuses("HookedCrate takes a CrateConfig of family 'crate'", lambda: ci.HookedCrate(vit))


@pytest.mark.parametrize("kind", ("vit", "gpt2", "llama"))
def test_edits_go_back_through_the_bridge(kind):
    _, model = pair(kind)
    x = inputs(kind)
    before, cache = model.run_with_cache(x)

    def nothing(z, hook):
        z = z.clone()
        z[:, :, 1] = 0
        return z

    edited = model.run_with_hooks(x, fwd_hooks=[("blocks.0.attn.hook_z", nothing)])
    seen = {}
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", nothing)]):
        _, seen = model.run_with_cache(x, names_filter="blocks.0.hook_resid_mid")
    gone = torch.einsum("bnp,pd->bnd", cache["z", 0][:, :, 1], model.blocks[0].attn.W_O[1])
    torch.testing.assert_close(seen["blocks.0.hook_resid_mid"], cache["resid_mid", 0] - gone)
    assert not torch.allclose(edited, before)
    # hook_u is the values without their bias: doubling it doubles what they carry beside the bias
    same = model.run_with_hooks(x, fwd_hooks=[("blocks.0.attn.hook_u", lambda u, hook: u * 1.0)])
    torch.testing.assert_close(same, before)
    torch.testing.assert_close(model(x), before)  # nothing stays


def test_gradients_reach_the_points():
    model = ci.from_bridge(build(network("gpt2").requires_grad_(True)))
    kept = {}
    names = ["blocks.0.hook_resid_pre", "blocks.1.attn.hook_z"]
    hooks = [(name, lambda grad, hook: kept.__setitem__(hook.name, grad.clone())) for name in names]
    with model.hooks(bwd_hooks=hooks):
        model(inputs("gpt2"), return_type="loss").backward()
    assert sorted(kept) == names and all(grad.abs().max() > 0 for grad in kept.values())
    assert kept[names[1]].shape == (3, 5, HEADS, 11)


def test_hooks_on_the_bridge_stay_on_and_its_names_stay():
    bridge = build(network("vit"))
    bridge.add_hook("blocks.0.hook_out", lambda z, hook: z * 0)
    names = {name: point.name for name, point in bridge.hook_dict.items()}
    refuses("the MLP is not added to the stream", lambda: ci.from_bridge(bridge))
    bridge.reset_hooks()
    model = ci.from_bridge(bridge)
    assert {name: point.name for name, point in bridge.hook_dict.items()} == names
    bridge.add_hook("blocks.0.hook_out", lambda z, hook: z * 0)
    _, cache = model.run_with_cache(inputs("vit"))
    assert not cache["resid_pre", 1].any()
    bridge.reset_hooks()
    torch.testing.assert_close(model(inputs("vit")), pair("vit")[1](inputs("vit")))


@pytest.mark.parametrize("kind", ("vit", "gpt2"))
def test_twins_are_drawn_anew_and_the_global_state_stays(kind):
    _, model = pair(kind)
    state = torch.random.get_rng_state()
    one, again, other = twin(model, 0), twin(model, 0), twin(model, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.cfg == model.cfg and type(one) is type(model) and not one.training
    digests = [model_digest(each) for each in (one, again, other, model)]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    x = inputs(kind)
    assert torch.equal(one(x), again(x)) and not torch.allclose(one(x), model(x))
    # as the class of the network draws them: attention of small weights is nearly even
    pattern = one.run_with_cache(x)[1]["pattern", 0]
    assert one.cfg.dtype == model.cfg.dtype and pattern.max() < (1.01 if kind == "gpt2" else 0.2)


def test_a_copy_and_a_move():
    _, model = pair("vit")
    x = inputs("vit")
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert model_digest(other) != model_digest(model)
    _, cache = other.run_with_cache(x)
    assert len(cache) == len(model.hook_dict)  # its points relay its own bridge
    half = other.to(torch.float32)
    assert half.cfg.dtype == torch.float32 and half(x.float()).dtype == torch.float32
    assert half.bridge.cfg.dtype == torch.float32 and model.cfg.dtype == torch.float64


@pytest.mark.parametrize("kind", ("deit", "dinov2", "gpt2"))
def test_stop_at_layer_returns_the_stream(kind):
    _, model = pair(kind)
    x = inputs(kind)
    _, cache = model.run_with_cache(x)
    for layer in (0, 1, -1):
        wanted = cache["resid_pre", layer % LAYERS]
        torch.testing.assert_close(model(x, stop_at_layer=layer), wanted)
    torch.testing.assert_close(model(x, stop_at_layer=LAYERS), cache["resid_post", LAYERS - 1])
    refuses("stop_at_layer=5: the model has layers 0 to 1", lambda: model(x, stop_at_layer=5))
    torch.testing.assert_close(model(x), model.run_with_hooks(x))


@pytest.mark.parametrize("subspaces", ("key", "query"))
def test_other_maps_stand_in_for_u(subspaces):
    plain, _ = pair("llama")
    model = ci.from_bridge(build(copy.deepcopy(plain)), subspaces=subspaces)
    role = subspaces[0]
    assert torch.equal(model.blocks[1].attn.U, role_weight("llama", plain, 1, role))
    assert len(model.blocks[1].attn.U) == {"key": 2, "query": 4}[subspaces]
    _, cache = model.run_with_cache(inputs("llama"))
    read = cache["normalized", 1, "ln1"]
    codes = torch.einsum("bnd,hdp->bnhp", read, model.blocks[1].attn.U)
    torch.testing.assert_close(cache["u", 1, "attn"], codes)
    result = ci.probe(cache)
    assert result.meta["probes"]["compression"]["settings"]["subspaces"] == subspaces
    assert f"U_k is the {subspaces} map of each" in result.headline()
    assert "subspaces" not in result.meta["probes"]["attention"]["settings"]


def test_what_cannot_be_read_is_refused():
    _, model = pair("vit")
    bridge = model.bridge
    assert isinstance(bridge, TransformerBridge)
    strange = network("vit")
    strange.__class__ = type("StrangeModel", (type(strange),), {})
    for match, call in (
        # as ci.sweep, ci.audit, ci.segment and ci.report do first
        (r"give ci\.from_bridge\(bridge\)", lambda: check_hooked(bridge)),
        ("cannot read BridgedVision as a bridge", lambda: ci.from_bridge(model)),
        ("cannot read Linear as a bridge", lambda: ci.from_bridge(torch.nn.Linear(2, 3))),
        ("is none of value, key, query", lambda: ci.from_bridge(bridge, subspaces="values")),
        ("n_heads=3 contradicts .* says 2", lambda: ci.from_bridge(bridge, n_heads=3)),
        ("a bridged model is not saved", lambda: model.save_pretrained("anywhere")),
        ("Unsupported architecture", lambda: build(strange)),
    ):
        refuses(match, call)


def test_a_parallel_layer_is_refused():
    import transformers

    config = transformers.GPTNeoXConfig(
        hidden_size=D, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=13,
        vocab_size=VOCAB, max_position_embeddings=5, attn_implementation="eager", rotary_pct=1.0,
    )  # fmt: skip
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    net = transformers.GPTNeoXForCausalLM(config).eval()
    refuses("cannot be", lambda: ci.from_bridge(build(net)))


def test_patches_are_the_tokens_after_the_special_ones():
    for kind in IMAGES:
        _, model = pair(kind)
        special = KINDS[kind][3]
        _, cache = model.run_with_cache(inputs(kind))
        wanted = outputs(kind).attentions[1][:, :, 0, special:].unflatten(-1, (3, 3))
        torch.testing.assert_close(ci.maps.attention(cache, 1), wanted)
        place = special + 1 * 3 + 2
        wanted = outputs(kind).attentions[1][:, :, place, special:].unflatten(-1, (3, 3))
        torch.testing.assert_close(ci.maps.attention(cache, 1, query=(1, 2)), wanted)
        q, k = (cache[role, 1].transpose(1, 2) for role in "qk")
        logits = torch.einsum("bhp,bhnp->bhn", q[:, :, 0], k[:, :, special:])
        alone = ci.maps.attention(cache, 1, scaled=False, cls_key=False)
        torch.testing.assert_close(alone, logits.softmax(-1).unflatten(-1, (3, 3)))
        codes = ci.maps.codes(cache, 0, [2])[:, 0]
        wanted = inside(kind)[0][1][:, special:, 2].unflatten(-1, (3, 3))
        torch.testing.assert_close(codes, wanted)
        assert ci.maps.rollout(cache).shape == (3, 3, 3)


@pytest.mark.slow
def test_a_page_to_point_at_has_no_room_for_registers():
    _, cache = pair("registers")[1].run_with_cache(inputs("registers"))
    refuses("5 tokens before its patches", lambda: ci.viz.explore(cache, inputs("registers")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("dinov2", "llama"))
def test_the_page_to_point_at_takes_a_black_box(kind):
    _, cache = pair(kind)[1].run_with_cache(inputs(kind))
    assert ci.viz.explore(cache, inputs(kind)).title


def test_options_that_a_bridge_does_not_tell():
    bridge = build(network("gpt2"))
    model = ci.from_bridge(bridge, n_ctx=3, model_name="a gpt")
    assert (model.cfg.n_ctx, model.cfg.model_name) == (3, "a gpt")
    assert pair("vit")[1].preprocess(torch.zeros(1, 3, 15, 15, dtype=torch.uint8)).shape[-1] == 15
    assert PLAIN["resize"] == pair("vit")[1].cfg.resize
    refuses("the model has no tokenizer", lambda: model.to_tokens("text"))


def test_tokens_and_masks_that_do_not_fit_are_refused_in_a_line():
    model = pair("gpt2")[1]
    tokens = inputs("gpt2")
    longest = model.network.config.max_position_embeddings
    for bad, match in (
        (torch.full((1, 3), VOCAB), f"tokens range from {VOCAB} to {VOCAB}"),
        (torch.zeros(1, longest + 1, dtype=torch.long), f"at most n_ctx={longest}"),
        (tokens.double(), ": give whole numbers"),
        ("text", "the model has no tokenizer"),
    ):
        for options in ({}, {"return_type": None}, {"stop_at_layer": 1}):
            with pytest.raises(ValueError, match=match):
                model(bad, **options)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 2\]: give shape"):
        model(tokens, attention_mask=torch.ones(2, 2))
    assert torch.equal(model(tokens[0]), model(tokens[:1]))


def test_a_bridge_to_one_of_ours_is_not_a_black_box():
    from conftest import make

    refuses("to a black box", lambda: ci.from_bridge(ci.to_bridge(make())))
