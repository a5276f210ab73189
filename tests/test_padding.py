"""Texts of unequal length in one batch: each row, and each reader of its cache, as alone."""

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import crate_interp as ci
from conftest import FIXTURES, LMS, make_lm, refuses
from crate_interp.circuits import logit_lens
from crate_interp.models.layers.context import padded
from selection import few, few_of

VOCAB, N_CTX = 47, 13
LENGTHS = (6, 2, 4)
# a row alone and in a batch go through other shapes of the same products
CLOSE = dict(atol=1e-6, rtol=1e-6)


@pytest.fixture(params=few_of([*LMS, "tost-lm"], ["crate-lm", "nanochat-crate", "tost-lm"]))
def lm(request):
    return make_lm(request.param).double()


def texts(seed=3):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]


def test_a_window_counts_real_tokens():
    lm = make_lm("nanochat-crate", window=True, window_pattern="S").double()  # 6 tokens back
    row = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1]])
    tokens = torch.zeros(1, N_CTX, dtype=torch.long)
    tokens[mask.bool()] = torch.tensor(row)
    with torch.no_grad():
        alone = lm(torch.tensor([row]))
        assert_close(lm(tokens, attention_mask=mask)[mask.bool()], alone[0], **CLOSE)


def test_a_zero_in_the_middle_takes_the_token_out(lm):
    row = texts()[0]
    mask = torch.tensor([1, 1, 0, 1, 0, 1])
    with torch.no_grad():
        held = lm(torch.tensor(row), attention_mask=mask)[0, mask.bool()]
        kept = [token for token, one in zip(row, mask, strict=True) if one]
        assert_close(held, lm(torch.tensor([kept]))[0], **CLOSE)


def test_gradients_with_padding_are_finite_and_those_of_the_texts(lm):
    rows = texts()
    tokens, real = padded(rows, 5, "left")
    lm(tokens, "loss", attention_mask=real).backward()
    got = {name: value.grad.clone() for name, value in lm.named_parameters()}
    lm.zero_grad()
    count = sum(len(row) - 1 for row in rows)
    sum(
        lm(torch.tensor([row]), "loss", loss_per_token=True).sum() / count for row in rows
    ).backward()
    for name, value in lm.named_parameters():
        assert_close(got[name], value.grad, atol=1e-9, rtol=1e-6, msg=name)


def test_the_cache_of_keys_and_values_knows_padding(lm):
    tokens, real = padded(texts(), 5, "left")
    past = ci.Past()
    refuses(
        "hides every token of a row",
        lambda: lm(tokens[:, :1], past=past, attention_mask=real[:, :1]),
    )
    with torch.no_grad():
        whole = lm(tokens, attention_mask=real)
        first = lm(tokens[:, :5], past=past, attention_mask=real[:, :5])
        last = lm(tokens[:, 5:], past=past, attention_mask=real)
        parts = torch.cat([first, last], dim=1)
        assert_close(parts[real], whole[real], **CLOSE)
        more = lm(tokens[:, :2], past=past)  # tokens that follow are real without a mask
        longer = torch.cat([real, torch.ones(3, 2, dtype=torch.bool)], dim=1)
        again = lm(torch.cat([tokens, tokens[:, :2]], dim=1), attention_mask=longer)
    assert_close(more, again[:, -2:], **CLOSE)
    refuses(
        "differs from the past's",
        lambda: lm(tokens[:, :1], past=past, attention_mask=torch.ones(3, 9)),
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_of_unequal_length(side):
    chat = ci.load(FIXTURES / "nanochat_crate_alpha")
    words = ["the", "the theory", "xyz"]
    tokens = chat.to_tokens(words, padding_side=side)
    alone = [chat.to_tokens(word) for word in words]
    with torch.no_grad():
        logits, loss = chat(words, "both", padding_side=side)
        for row, one in enumerate(alone):
            n = one.shape[1]
            place = slice(-n, None) if side == "left" else slice(n)
            assert torch.equal(tokens[row, place], one[0])
            assert_close(logits[row, place], chat(one)[0], atol=1e-5, rtol=1e-5)
        nats = torch.cat([chat(one, "loss", loss_per_token=True)[0] for one in alone])
        assert loss.item() == pytest.approx(nats.mean().item(), rel=1e-5)
        # tokens that are padded already are taken as they stand, unless a side is given
        again = chat(tokens, padding_side=side)
        real = torch.ones_like(tokens, dtype=torch.bool)
        for row, one in enumerate(alone):
            real[row, : -one.shape[1]] = side == "right"
            real[row, one.shape[1] :] &= side == "left"
        assert_close(again[real], logits[real], atol=1e-6, rtol=1e-6)
        if side == "left":
            assert (chat(tokens)[real] - logits[real]).abs().max() > 1e-3
    chat.tokenizer.padding_side = side
    assert torch.equal(chat.to_tokens(words), tokens)


def test_what_hugging_face_gives_and_takes(lm):
    from transformers.modeling_outputs import CausalLMOutput

    tokens, real = padded(texts(), 5, "left")
    labels = tokens.masked_fill(~real, -100)
    labels[0, 3] = -100
    with torch.no_grad():
        out = lm(input_ids=tokens, attention_mask=real, labels=labels)
        assert isinstance(out, CausalLMOutput)
        assert torch.equal(out.logits, lm(tokens, attention_mask=real))
        wanted = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        # transformers counts what is predicted from the last of the padding too
        first = [(row, int(real[row].long().argmax())) for row in range(3)]
        skipped = labels.clone()
        for row, place in first:
            skipped[row, place] = -100
        exact = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), skipped[:, 1:].flatten())
        assert out.loss.item() == pytest.approx(exact.item(), rel=1e-9) and wanted > 0
        assert lm(tokens, "loss", attention_mask=real, labels=labels).item() == out.loss.item()
        bare = lm(input_ids=tokens)
        assert bare.loss is None and list(bare) == ["logits"]
        plain = lm(input_ids=tokens, labels=tokens).loss.item()
        assert plain == pytest.approx(lm(tokens, "loss").item(), rel=1e-9)
        assert torch.equal(lm(input_ids=tokens, return_type="loss"), lm(tokens, "loss"))


COUNTS = (11, 5, 7)
TOKENS = torch.randint(0, 47, (3, 11), generator=torch.Generator().manual_seed(0))


def in_a_batch(side):
    """Returns tokens, their mask, and each text alone."""
    tokens, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    rows = [TOKENS[i, :length] for i, length in enumerate(COUNTS)]
    for i, row in enumerate(rows):
        place = slice(len(row)) if side == "right" else slice(11 - len(row), None)
        tokens[i, place], mask[i, place] = row, 1
    return tokens, mask, rows


@pytest.fixture(params=["left", "right"])
def side(request):
    return request.param


@pytest.fixture(params=few(LMS, 2))
def reader(request):
    return make_lm(request.param)


def caches(reader, side, **more):
    """Returns the cache of the padded batch, and the caches of the texts alone."""
    tokens, mask, rows = in_a_batch(side)
    batch = reader.run_with_cache(tokens, attention_mask=mask, **more)[1]
    return batch, [reader.run_with_cache(row[None], **more)[1] for row in rows]


def test_every_point_of_a_text_is_that_of_the_text_alone(reader, side):
    batch, alone = caches(reader, side)
    assert batch.is_padded and not alone[0].is_padded
    for i, own in enumerate(alone):
        found = batch.alone(i)
        assert not found.is_padded and found.cache_dict.keys() == own.cache_dict.keys()
        for name, value in own.items():
            assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_probes(reader, side):
    batch, alone = caches(reader, side)
    found = ci.probe(batch).table("samples")
    for i, own in enumerate(alone):
        wanted = ci.probe(own).table("samples").drop(columns="sample").reset_index(drop=True)
        mine = found[found["sample"] == i].drop(columns="sample").reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, wanted, check_exact=False, rtol=2e-4, atol=1e-5)


def test_logit_lenses(reader, side):
    batch, alone = caches(reader, side)
    for i, own in enumerate(alone):
        for position in (-1, 2):
            found = logit_lens(batch, sample=i, position=position).table()
            wanted = logit_lens(own, position=position).table()
            assert list(found["answer"]) == list(wanted["answer"])
            assert abs(found["probability"] - wanted["probability"]).max() < 1e-5
    refuses(r"cache.alone\(i\)", lambda: batch.logit_lens())
    refuses("the sample has positions 0 to 4", lambda: logit_lens(batch, sample=1, position=5))


def test_stacks_at_some_positions_refuse_padding(side):
    reader = make_lm("gpt-baseline")
    batch, alone = caches(reader, side)
    for stack in (
        lambda cache, **cut: cache.accumulated_resid(**cut),
        lambda cache, **cut: cache.decompose_resid(**cut),
        lambda cache, **cut: cache.stack_head_results(**cut),
        lambda cache, **cut: cache.stack_neuron_results(-1, **cut),
        lambda cache, **cut: cache.get_full_resid_decomposition(**cut),
        lambda cache, **cut: cache.apply_ln_to_stack(cache.accumulated_resid(), **cut),
        lambda cache, **cut: cache.logit_attrs(cache.accumulated_resid(), 5, **cut),
    ):
        with pytest.raises(ValueError, match="at some positions would read padding as tokens"):
            stack(batch, pos_slice=-1)
        wanted = stack(alone[1], pos_slice=-1)
        assert_close(stack(batch.alone(1), pos_slice=-1), wanted, rtol=1e-4, atol=1e-5)


def test_patching_refuses_padding(side):
    reader = make_lm()
    batch, _ = caches(reader, side)
    with pytest.raises(ValueError, match="patching would read padding as tokens"):
        ci.circuits.patching.get_act_patch_resid_pre(reader, TOKENS, batch, lambda out: out.sum())
