"""A hooked model over a bridge: points, edits, twins, probes, padding, and what it refuses."""

import pytest
import torch
from torch.testing import assert_close
from transformer_lens.model_bridge import TransformerBridge

import crate_interp as ci
import foreign
from conftest import refuses
from crate_hooks import edit
from crate_interp.bridge.adapter import build
from crate_interp.models.hooked import check_hooked
from crate_interp.models.weights import model_digest
from crate_interp.questions.answers import losses
from crate_interp.questions.untrained_twins import twin


@pytest.mark.parametrize("kind", foreign.SOME)
def test_every_point_holds_what_transformers_has_there(kind):
    plain, model = foreign.pair(kind)
    theirs, x = foreign.outputs(kind), foreign.inputs(kind)
    out, cache = model.run_with_cache(x)
    wanted = theirs.logits if hasattr(theirs, "logits") else theirs.last_hidden_state[:, 0]
    assert_close(out, wanted)
    assert_close(model.run_with_hooks(x), wanted)
    assert sorted(cache) == sorted(model.hook_dict)
    for layer in range(foreign.LAYERS):
        mid, code = foreign.inside(kind)[layer]
        assert_close(cache["pattern", layer], theirs.attentions[layer])
        assert_close(cache["resid_pre", layer], theirs.hidden_states[layer])
        assert_close(cache["resid_mid", layer], mid)
        assert_close(cache["post", layer], code)
        block = model.blocks[layer]
        for role in "qkv":
            stored = foreign.role_weight(kind, plain, layer, role)
            count = foreign.HEADS if kind != "llama" else 4
            stored = stored.repeat_interleave(count // len(stored), dim=0)
            assert torch.equal(getattr(block.attn, f"W_{role.upper()}"), stored)
        u = foreign.role_weight(kind, plain, layer, "v")
        assert torch.equal(block.attn.U, u)
        read = cache["normalized", layer, "ln1"]
        assert_close(cache["u", layer, "attn"], torch.einsum("bnd,hdp->bnhp", read, u))
        written = torch.einsum("bnhp,hpd->bnd", cache["z", layer], block.attn.W_O)
        assert_close(cache["attn_out", layer], written + block.attn.b_O)
        assert_close(cache["mlp_out", layer], code @ block.mlp.W_out + block.mlp.b_out)
    assert_close(cache.accumulated_resid(layer=1, incl_mid=True)[1], cache["resid_mid", 0])


@pytest.mark.parametrize("kind", ("vit", "gpt2", "llama"))
def test_edits_go_back_through_the_bridge(kind):
    _, model = foreign.pair(kind)
    x = foreign.inputs(kind)
    before, cache = model.run_with_cache(x)
    nothing = edit.zero(heads=1)
    edited = model.run_with_hooks(x, fwd_hooks=[("blocks.0.attn.hook_z", nothing)])
    seen = {}
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", nothing)]):
        _, seen = model.run_with_cache(x, names_filter="blocks.0.hook_resid_mid")
    gone = torch.einsum("bnp,pd->bnd", cache["z", 0][:, :, 1], model.blocks[0].attn.W_O[1])
    assert_close(seen["blocks.0.hook_resid_mid"], cache["resid_mid", 0] - gone)
    assert not torch.allclose(edited, before)
    # hook_u is the values without their bias: doubling it doubles what they carry beside the bias
    same = model.run_with_hooks(x, fwd_hooks=[("blocks.0.attn.hook_u", lambda u, hook: u * 1.0)])
    assert_close(same, before)
    assert_close(model(x), before)  # nothing stays


@pytest.mark.parametrize("kind", ("vit", "gpt2"))
def test_twins_are_drawn_anew_and_the_global_state_stays(kind):
    _, model = foreign.pair(kind)
    state = torch.random.get_rng_state()
    one, again, other = twin(model, 0), twin(model, 0), twin(model, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.cfg == model.cfg and type(one) is type(model) and not one.training
    digests = [model_digest(each) for each in (one, again, other, model)]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    x = foreign.inputs(kind)
    assert torch.equal(one(x), again(x)) and not torch.allclose(one(x), model(x))
    # as the class of the network draws them: attention of small weights is nearly even
    pattern = one.run_with_cache(x)[1]["pattern", 0]
    assert one.cfg.dtype == model.cfg.dtype and pattern.max() < (1.01 if kind == "gpt2" else 0.2)


@pytest.mark.parametrize("kind", ("vit", "gpt2"))
def test_heads_of_a_black_box_are_ablated_as_by_a_hook(kind):
    """An edit of its hook_resid_mid would not reach its stream."""
    _, model = foreign.pair(kind)
    x, heads = foreign.inputs(kind), model.cfg.n_heads
    labels = torch.arange(len(x)) % 3
    data = x if kind == "gpt2" else (x, labels)
    found = ci.ablate_heads(model, data, how="zero", progress=False).table("samples")
    for layer, head in ((0, 1), (foreign.LAYERS - 1, 0)):
        hook = (f"blocks.{layer}.attn.hook_z", edit.zero(heads=head))
        logits = model.run_with_hooks(x, fwd_hooks=[hook])
        wanted = losses(logits, x[:, 1:] if kind == "gpt2" else labels)
        rows = found[(found["layer"] == layer) & (found["head"] == head)]
        assert_close(torch.tensor(rows["ablated"].to_numpy()), wanted)
    assert len(found) == len(x) * foreign.LAYERS * heads


@pytest.mark.parametrize("kind", ("deit", "dinov2", "gpt2"))
def test_stop_at_layer_returns_the_stream(kind):
    _, model = foreign.pair(kind)
    x = foreign.inputs(kind)
    _, cache = model.run_with_cache(x)
    for layer in (0, 1, -1):
        wanted = cache["resid_pre", layer % foreign.LAYERS]
        assert_close(model(x, stop_at_layer=layer), wanted)
    assert_close(model(x, stop_at_layer=foreign.LAYERS), cache["resid_post", foreign.LAYERS - 1])
    refuses("stop_at_layer=5: the model has layers 0 to 1", lambda: model(x, stop_at_layer=5))
    assert_close(model(x), model.run_with_hooks(x))


def test_what_cannot_be_read_is_refused():
    _, model = foreign.pair("vit")
    bridge = model.bridge
    assert isinstance(bridge, TransformerBridge)
    strange = foreign.network("vit")
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


def test_patches_are_the_tokens_after_the_special_ones():
    for kind in foreign.IMAGES:
        _, model = foreign.pair(kind)
        special = foreign.KINDS[kind][3]
        _, cache = model.run_with_cache(foreign.inputs(kind))
        wanted = foreign.outputs(kind).attentions[1][:, :, 0, special:].unflatten(-1, (3, 3))
        assert_close(ci.maps.attention(cache, 1), wanted)
        place = special + 1 * 3 + 2
        wanted = foreign.outputs(kind).attentions[1][:, :, place, special:].unflatten(-1, (3, 3))
        assert_close(ci.maps.attention(cache, 1, query=(1, 2)), wanted)
        q, k = (cache[role, 1].transpose(1, 2) for role in "qk")
        logits = torch.einsum("bhp,bhnp->bhn", q[:, :, 0], k[:, :, special:])
        alone = ci.maps.attention(cache, 1, scaled=False, cls_key=False)
        assert_close(alone, logits.softmax(-1).unflatten(-1, (3, 3)))
        codes = ci.maps.codes(cache, 0, [2])[:, 0]
        wanted = foreign.inside(kind)[0][1][:, special:, 2].unflatten(-1, (3, 3))
        assert_close(codes, wanted)
        assert ci.maps.rollout(cache).shape == (3, 3, 3)


LENGTHS = (5, 2, 3)
NEAR = dict(rtol=1e-4, atol=1e-5)  # float32: in float64, Llama's own left padding gives NaN
TOKENS = torch.randint(1, foreign.VOCAB, (3, 5), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def lm(request):
    return ci.from_bridge(build(foreign.network(request.param, dtype=torch.float32)))


@pytest.fixture(params=["left", "right"])
def side(request):
    return request.param


def padded(side):
    """Tokens whose padding is an ordinary token, their mask, and each text alone."""
    tokens, mask = torch.full((3, 5), 7), torch.zeros(3, 5, dtype=torch.long)
    rows = [TOKENS[i, :length] for i, length in enumerate(LENGTHS)]
    for i, row in enumerate(rows):
        place = slice(len(row)) if side == "right" else slice(5 - len(row), None)
        tokens[i, place], mask[i, place] = row, 1
    return tokens, mask, [row[None] for row in rows]


def test_tokens_with_a_mask(lm, side):
    tokens, mask, rows = padded(side)
    logits, cache = lm.run_with_cache(tokens, attention_mask=mask)
    assert torch.equal(cache.mask, mask.bool()) and cache.is_padded
    stream = lm(tokens, attention_mask=mask, stop_at_layer=1)
    without = lm.run_with_cache(tokens, None, attention_mask=mask)[1]
    for i, row in enumerate(rows):
        real = mask[i].bool()
        own_logits, own = lm.run_with_cache(row)
        assert_close(logits[i][real], own_logits[0], **NEAR)
        assert_close(stream[i][real], lm(row, stop_at_layer=1)[0], **NEAR)
        for found in (cache.alone(i), without.alone(i)):
            assert found.cache_dict.keys() == own.cache_dict.keys()
            for name, value in own.items():
                assert_close(found[name], value, **NEAR)
