"""CRATE-BERT, a text read both ways: recordings, padding, masked tokens, questions, refusals."""

import re

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import crate_interp as ci
import family_reference
from conftest import FIXTURES, make_lm, refuses, same_model
from test_families import POINTS

FOLDER = FIXTURES / "crate_bert"
FILE, RECORDED = FOLDER / "model_steps_100.pt", load_file(FOLDER / "io.safetensors")
TOKENS, SEGMENTS = RECORDED["tokens"], RECORDED["segments"]
QUIET, SHORT = dict(progress=False), dict(chunk_size=4, batch_size=2, progress=False)


def next_sentence(model, stream):
    return model.next_sentence(stream[:, 0])


@pytest.mark.parametrize("case", ["zeros", "ones_then_padding"])
def test_every_recorded_tensor(case):
    published = case != "zeros"
    mask = RECORDED[f"{case}.mask"].long() if published else None
    model = ci.load(FILE, n_heads=4, attention_mask="published" if published else "meant")
    given = dict(segments=SEGMENTS, attention_mask=mask)
    with torch.no_grad():
        logits, cache = model.run_with_cache(TOKENS, **given)
        assert torch.equal(logits, model(TOKENS, **given))
    places = RECORDED["masked_pos"][..., None].expand(-1, -1, 53)
    last = cache["blocks.2.hook_resid_post"]
    ours = {
        "embed": cache["ln_embed.hook_normalized"], "hidden": last, "logits": logits,
        "logits_masked": logits.gather(1, places), "logits_next": next_sentence(model, last),
    }  # fmt: skip
    points = POINTS | {"attn": "attn.hook_pattern", "attn_out": "hook_attn_out"}
    for name, value in RECORDED.items():
        name = name.removeprefix(f"{case}.")
        if name.startswith("blocks"):
            _, layer, kind = name.split(".")
            found = cache[f"blocks.{layer}.{points[kind]}"]
            ours[name] = found.flatten(2) if kind == "w" else found
            if published and kind == "attn":  # recorded before real tokens are cut out
                value = value * (1 - mask)[:, None, None]
        if name in ours:
            atol = 5e-6 if "logits" in name else 0.0  # logits are up to 15
            assert_close(ours[name], value, atol=atol, rtol=0, msg=name)
    weights = {name: value.double() for name, value in torch.load(FILE).items()}
    plain, following = family_reference.bert(weights, TOKENS, SEGMENTS, 4, mask)
    exact = model.double()
    with torch.no_grad():
        assert_close(exact(TOKENS, **given), plain, atol=1e-10, rtol=1e-10)
        z = exact(TOKENS, stop_at_layer=3, **given)
        assert_close(next_sentence(exact, z), following, atol=1e-10, rtol=1e-10)


def test_loading_is_strict_and_round_trips(tmp_path):
    weights = torch.load(FILE)
    model = ci.load(weights, n_heads=4)
    assert model.cfg.family == "crate-bert" and not model.cfg.causal
    model.save_pretrained(tmp_path / "saved")
    same_model(ci.load(tmp_path / "saved"), model)
    assert model.cfg.to_dict()["attention_mask"] == "meant"
    assert "attention_mask" not in make_lm("crate-lm").cfg.to_dict()
    refuses("n_heads", lambda: ci.load(weights), ci.CheckpointError)
    weights["decoder.weight"] = weights["decoder.weight"] + 1
    refuses("decoder.weight differs", lambda: ci.load(weights, n_heads=4), ci.CheckpointError)
    refuses("'crate-bert': leave it out", lambda: make_lm(attention_mask="published"))


@pytest.fixture(scope="module")
def model():
    return make_lm("crate-bert").requires_grad_(False)


@pytest.fixture(scope="module")
def masked():
    """Tokens with every fifth one masked, and these as labels."""
    tokens = torch.randint(47, (7, 11), generator=torch.Generator().manual_seed(5))
    labels = torch.full_like(tokens, -100)
    labels[:, 2::5], tokens[:, 2::5] = tokens[:, 2::5].clone(), 3
    return tokens, labels


def test_a_later_token_changes_an_earlier_one_and_padding_changes_none(model, masked):
    tokens, _ = masked
    other = tokens.clone()
    other[:, 9] = (other[:, 9] + 1) % 47
    causal = make_lm("crate-lm vanilla")
    assert (model(other)[:, :9] - model(tokens)[:, :9]).abs().amax(dim=(1, 2)).min() > 1e-3
    assert torch.equal(causal(other)[:, :9], causal(tokens)[:, :9])
    mask = torch.ones_like(tokens)
    mask[:, 8:] = 0
    kept = model(tokens, attention_mask=mask)
    assert_close(kept[:, :8], model(tokens[:, :8]), atol=2e-5, rtol=1e-5)
    assert torch.equal(kept[:, :8], model(other, attention_mask=mask)[:, :8])
    two = torch.arange(11).expand(7, 11) // 6
    assert (model(tokens, segments=two) - model(tokens)).abs().max() > 1e-3
    refuses("from 0 to 1 of shape", lambda: model(tokens, segments=tokens))
    refuses("no segments", lambda: causal(tokens, segments=two))


def test_the_loss_is_that_of_masked_tokens_at_their_own_place(model, masked):
    tokens, labels = masked
    each = -model(tokens).double().log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    wanted = each[labels >= 0].mean().float()
    assert_close(model(tokens, "loss", labels=labels), wanted, atol=1e-5, rtol=1e-5)
    assert_close(model(input_ids=tokens, labels=labels).loss, wanted, atol=1e-5, rtol=1e-5)
    assert model(tokens, "loss", True, labels=labels).shape == labels.shape
    refuses("give labels", lambda: model(tokens, "loss"))
    heads = ci.ablate_heads(model, masked, how="zero", **SHORT)
    assert_close(heads.table()["base"][0], float(wanted), atol=1e-5, rtol=1e-5)
    off = ("blocks.1.attn.hook_z", ci.hooks.edit.zero(heads=2))
    without = model.run_with_hooks(tokens, "loss", labels=labels, fwd_hooks=[off])
    row = heads.table().query("layer == 1 and head == 2")
    assert_close(row["ablated"].item(), float(without), atol=1e-5, rtol=1e-5)
    right = (model(tokens).argmax(-1) == labels).sum() / (labels >= 0).sum()
    hits = ci.ablate_heads(
        model, {"input_ids": tokens, "labels": labels}, metric="accuracy", **SHORT
    )
    assert hits.table()["base"][0] == pytest.approx(float(right))
    refuses("scored on masked tokens: give", lambda: ci.ablate_heads(model, tokens, **QUIET))
    refuses("next tokens: give", lambda: ci.ablate_heads(make_lm("crate-lm"), masked, **QUIET))


def test_questions_run_or_say_why_not(model, masked):
    tokens, _ = masked
    _, cache = model.run_with_cache(tokens)
    layers = ci.sweep(model, masked, **SHORT).layers()
    assert_close(
        layers["mean"].tolist(), ci.sweep(model, tokens, **SHORT).layers()["mean"].tolist()
    )
    audit = ci.audit(model, tokens, untrained=1, grid=False, **SHORT)
    assert "is not finite" not in str(audit) and len(audit.table())
    for verb in (ci.atlas, ci.surgery, ci.unroll):
        assert len(verb(model, masked, **SHORT).table())
    graph = ci.circuits.graph(model, tokens[0], position=2)
    assert " at token 2" in str(graph) and set(graph.table("nodes")["pos"]) - {0, 1, 2}
    lens = cache.logit_lens().values
    assert_close(lens[-1], model(tokens), atol=1e-5, rtol=1e-5)
    early = model.unembed(model.ln_final(cache["resid_pre", 1]))
    assert_close(lens[1], early, atol=1e-5, rtol=1e-5)
    page = ci.viz.explore(cache, tokens).html()
    assert "Token here" in page and not re.search("After this text|Next token", page)
    for words, call in {
        "reads a text both ways: it fills": lambda: model.generate(tokens),
        "both ways: give the whole": lambda: model(tokens, past=ci.Past()),
        "no patches": lambda: ci.segment(model, tokens, **QUIET),
        "without position=": lambda: ci.circuits.graph(model, tokens[0]),
        "concentration needs": lambda: ci.circuits.concentration(model, tokens, **QUIET),
        "switched_off needs": lambda: ci.circuits.switched_off(model, tokens[0]),
        "linear in the stream": lambda: model.tokens_to_residual_directions(1),
        "the last norm needs": lambda: cache.apply_ln_to_stack(cache["resid_pre", 1][None]),
    }.items():
        refuses(words, call)
