"""Texts of unequal length through a bridge: each has the numbers that it has alone."""

from functools import partial

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import crate_interp as ci
from conftest import refuses
from crate_interp.bridge.hooked_to_bridge import build
from foreign import VOCAB, network

LENGTHS = (5, 2, 3)
NEAR = dict(rtol=1e-4, atol=1e-5)  # float32: in float64, Llama's own left padding gives NaN
TOKENS = torch.randint(1, VOCAB, (3, 5), generator=torch.Generator().manual_seed(2))


def words_of(row):
    return " ".join(f"w{int(token)}" for token in row)


def tokenizer_in(folder):
    """One word a token; the first one begins texts, ends them and pads them, as in GPT-2."""
    core = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, "w1"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    same = dict(bos_token="w0", eos_token="w0", pad_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=core, **same).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def lm(request, tmp_path_factory):
    tokenizer = tokenizer_in(tmp_path_factory.mktemp("tokenizer"))
    net = network(request.param, dtype=torch.float32)
    return ci.from_bridge(build(net, tokenizer=tokenizer))


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
        torch.testing.assert_close(logits[i][real], own_logits[0], **NEAR)
        torch.testing.assert_close(stream[i][real], lm(row, stop_at_layer=1)[0], **NEAR)
        for found in (cache.alone(i), without.alone(i)):
            assert found.cache_dict.keys() == own.cache_dict.keys()
            for name, value in own.items():
                torch.testing.assert_close(found[name], value, **NEAR)


@pytest.mark.parametrize("prepend_bos", [True, False])
def test_texts_that_are_padded_here(lm, side, prepend_bos):
    first = [0] if prepend_bos else []
    rows = [[*first, *row[0, :4].tolist()] for row in padded(side)[2]]
    texts = [words_of(row[len(first) :]) for row in rows]
    how = dict(prepend_bos=prepend_bos, padding_side=side)
    logits, cache = lm.run_with_cache(texts, **how)
    loss = lm(texts, return_type="loss", loss_per_token=True, **how)
    assert torch.equal(lm.to_tokens(tuple(texts), **how), lm.bridge.to_tokens(texts, **how))
    assert cache.mask.sum(dim=1).tolist() == [len(row) for row in rows]
    found = ci.probe(cache).table("samples")
    for i, row in enumerate(rows):
        alone, own = lm.run_with_cache(texts[i], prepend_bos=prepend_bos)
        torch.testing.assert_close(logits[i][cache.mask[i]], alone[0], **NEAR)
        wanted = lm(torch.tensor([row]), return_type="loss", loss_per_token=True)[0]
        real = cache.mask[i, 1:] & cache.mask[i, :-1]
        torch.testing.assert_close(loss[i][real], wanted, **NEAR)
        wanted = ci.probe(own).table("samples").drop(columns="sample").reset_index(drop=True)
        mine = found[found["sample"] == i].drop(columns="sample").reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, wanted, check_exact=False, rtol=1e-4, atol=1e-4)


def test_what_is_not_padded_has_no_mask(lm):
    texts = [words_of(row) for row in TOKENS[:, :3]]
    logits, cache = lm.run_with_cache(texts, prepend_bos=False)
    assert cache.mask is None and torch.equal(logits, lm(TOKENS[:, :3]))
    ones = torch.ones(3, 3, dtype=torch.long)
    assert lm.run_with_cache(TOKENS[:, :3], attention_mask=ones)[1].mask is None
    one = lm.run_with_cache(TOKENS[0], attention_mask=torch.tensor([0, 1, 1, 1, 1]))[1]
    assert one.mask.tolist() == [[False, True, True, True, True]]


def test_the_mask_with_a_past(lm):
    tokens, mask, rows = padded("left")
    _, past = lm(tokens[:, :4], "logits_and_cache", attention_mask=mask[:, :4], use_cache=True)
    if not past.get_seq_length():  # with the newest versions, see the error
        with pytest.raises(ValueError, match="the past holds no tokens"):
            lm.run_with_cache(tokens[:, 4:], attention_mask=mask, past_key_values=past)
        return
    out, cache = lm.run_with_cache(tokens[:, 4:], attention_mask=mask, past_key_values=past)
    assert cache.mask.tolist() == [[True]] * 3 and not cache.is_padded  # all new tokens are real
    for i, row in enumerate(rows):
        torch.testing.assert_close(out[i], lm(row)[0, -1:], **NEAR)
    refuses("the past holds no tokens", lambda: lm(tokens[:, 4:], past_key_values=type(past)()))


def test_masks_and_texts_that_cannot_be_read(lm):
    tokens, mask, _ = padded("left")
    for bad, match in (
        (torch.zeros(3, 5), "hides every token of a row"),
        (mask * 2, "give 1 for real tokens"),
    ):
        refuses(match, partial(lm, tokens, attention_mask=bad))
    refuses("padding_side='top': give 'left' or", lambda: lm(["w1", "w1 w2"], padding_side="top"))
    for bad in ([], ()):
        refuses("there is no text", partial(lm, bad))
