"""Language models: text in and out, loss, generation with a cache, and refusals of bad input."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
from conftest import FIXTURES, LAYERS, LMS, make_lm, refuses

VOCAB, N_CTX = 47, 13


def ids(batch=2, pos=11, seed=3):
    return torch.randint(VOCAB, (batch, pos), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def chat():
    return ci.load(FIXTURES / "nanochat_crate_alpha")


def test_a_token_sees_only_those_before(lm):
    tokens, other = ids(), ids()
    other[:, 6:] = (other[:, 6:] + 7) % VOCAB
    with torch.no_grad():
        a, b = lm(tokens), lm(other)
    torch.testing.assert_close(a[:, :6], b[:, :6], atol=1e-6, rtol=1e-5)
    assert (a[:, 6:] - b[:, 6:]).abs().max() > 1e-2


def test_rows_of_a_batch_do_not_mix(lm):
    tokens, exact = ids(), copy.deepcopy(lm).double()  # batches of other sizes round otherwise
    with torch.no_grad():
        torch.testing.assert_close(exact(tokens)[1:], exact(tokens[1:]), atol=1e-13, rtol=1e-12)


def test_loss(lm):
    tokens = ids()
    with torch.no_grad():
        logits, loss = lm(tokens, "both")
        each = lm(tokens, "loss", loss_per_token=True)
    slow = [
        -float(logits[row, pos].double().log_softmax(-1)[tokens[row, pos + 1]])
        for row in range(2)
        for pos in range(10)
    ]
    assert loss.item() == pytest.approx(np.mean(slow), rel=1e-5) and lm(
        tokens, "loss"
    ).item() == pytest.approx(loss.item())
    np.testing.assert_allclose(each.flatten(), slow, rtol=1e-4)
    assert lm(tokens, None) is None and torch.equal(lm(tokens), logits)


def test_stop_and_start(lm):
    tokens = ids()
    with torch.no_grad():
        logits, cache = lm.run_with_cache(tokens)
        z = lm(tokens, stop_at_layer=2)
        assert torch.equal(z, cache["resid_pre", 2]) and torch.equal(
            lm(tokens, stop_at_layer=-1), z
        )
        assert torch.equal(lm(tokens, stop_at_layer=LAYERS), cache["resid_post", LAYERS - 1])
        torch.testing.assert_close(lm(z, start_at_layer=2), logits, atol=0, rtol=0)
        if lm.cfg.rotary:
            refuses("start_at_layer=1: later layers add the", lambda: lm(z, start_at_layer=1))
            lm.x0_lambdas.data[2:] = 0
        first = lm(tokens, stop_at_layer=1)
        torch.testing.assert_close(lm(first, start_at_layer=1), lm(tokens), atol=0, rtol=0)
        torch.testing.assert_close(
            lm(first, start_at_layer=1, stop_at_layer=2),
            lm(tokens, stop_at_layer=2),
            atol=0,
            rtol=0,
        )
    refuses("a loss needs tokens", lambda: lm(z, "loss", start_at_layer=2))
    refuses("takes the stream of floats", lambda: lm(tokens, start_at_layer=2))
    refuses("start_at_layer=9: the model has layers 0 to 2", lambda: lm(z, start_at_layer=9))


@pytest.mark.slow
@given(
    st.sampled_from(LMS), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 99)
)
def test_the_cache_of_keys_and_values_changes_nothing(name, pieces, seed):
    lm, tokens = make_lm(name), ids(pos=N_CTX, seed=seed)
    cuts = np.cumsum([0, *pieces])[: N_CTX + 1]
    with torch.no_grad():
        past = ci.Past()
        parts = [
            lm(tokens[:, a:b], past=past)
            for a, b in zip(cuts[:-1], cuts[1:], strict=True)
            if b <= N_CTX and b > a
        ]
        whole = lm(tokens[:, : past.length])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("words", "given"),
    {
        "tokens range from 0 to 47": (torch.tensor([[0, 47]]),),
        "tokens range from -1 to 3": (torch.tensor([[3, -1]]),),
        "give whole numbers": (torch.rand(2, 3),),
        "there are no tokens": (torch.zeros(0, 3, dtype=torch.long),),
        "there are 14 tokens; the model takes at most n_ctx=13": (ids(pos=14),),
        "the input is int": (3,),
        "return_type='x'": (ids(), "x"),
        "the loss needs at least two tokens": (ids(pos=1), "loss"),
        "the model has no tokenizer": ("text",),
    }.items(),
)
def test_bad_tokens(words, given):
    refuses(words, lambda: make_lm("crate-lm")(*given))


def test_tokens_of_other_types_and_of_one_row(lm):
    with torch.no_grad():
        for dtype in (torch.uint8, torch.int32):
            assert torch.equal(lm(ids().to(dtype), "loss"), lm(ids(), "loss"))
        assert torch.equal(lm(ids()[0]), lm(ids()[:1]))  # one row is a batch of one
        past = ci.Past()
        lm(ids(pos=12), past=past)
    refuses("there are 14 tokens", lambda: lm(ids(pos=2), past=past))


def test_text(chat):
    assert chat.to_tokens("the").tolist() == [[276, 260]] and chat.to_tokens(
        "the", prepend_bos=False
    ).tolist() == [[260]]
    assert chat.to_string(chat.to_tokens("the thing", prepend_bos=False)) == ["the thing"]
    assert (
        chat.to_string(torch.tensor([260, 261])) == "theory"[:3] + chat.to_string(261)
        and chat.to_string([260]) == "the"
    )
    assert (
        chat.to_str_tokens("the", prepend_bos=False) == ["the"]
        and chat.to_single_token("the") == 260
    )
    assert chat.to_tokens(["the", "the"]).shape == (2, 2)
    with torch.no_grad():
        assert torch.equal(chat("the thing"), chat(chat.to_tokens("the thing")))
    assert (
        chat.to_str_tokens(["the", "x"]) == [["<|bos|>", "the"], ["<|bos|>", "x"]]
        and chat.to_single_str_token(260) == "the"
    )
    assert chat.to_str_tokens(torch.tensor([[260], [120]])) == [["the"], ["x"]] and chat.to_string(
        [[260], [120]]
    ) == ["the", "x"]
    refuses("is 3 tokens, .*: give a text that is one", lambda: chat.to_single_token("xyz"))
    refuses("the text is empty", lambda: chat.to_tokens("", prepend_bos=False))
    refuses("the list is empty", lambda: chat.to_tokens([]))
    refuses("there is no token 999", lambda: chat.to_string([999]))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_every_text_comes_back(chat, text):
    if text:
        assert chat.to_string(chat.to_tokens(text, prepend_bos=False, truncate=False)) == [text]
    with pytest.warns(UserWarning, match="text holds"):  # text never makes a special token
        ids = chat.to_tokens(text + "<|bos|>", prepend_bos=False, truncate=False)
    assert 276 not in ids


def slow_bpe(piece, ranks):
    """tiktoken's rule: the neighbours whose union has the lowest rank merge, the leftmost first."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [
            (ranks[a + b], place)
            for place, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in ranks
        ]
        if not pairs:
            return [ranks[part] for part in parts]
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@given(st.text(alphabet="theory ing123,aeiou", min_size=1, max_size=40))
def test_bpe_agrees_with_a_slow_one(chat, text):
    import re

    ranks = {
        bytes([b]): i
        for b, i in ((byte, chat.tokenizer.encode(chr(byte))[0]) for byte in range(128))
    }
    ranks |= {chat.tokenizer.decode([i]).encode(): i for i in range(256, 276)}
    pieces = re.findall(r" ?[a-z]+|[0-9]{1,2}| ?[^\sa-z0-9]+|\s+", text)
    slow = [token for piece in pieces for token in slow_bpe(piece.encode(), ranks)]
    assert "".join(pieces) == text and chat.tokenizer.encode(text) == slow
