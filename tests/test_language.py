"""Language models: text in and out, tokenizers, loss, and refusals of bad input."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import crate_interp as ci
from conftest import FIXTURES, LAYERS, make_lm, refuses
from crate_interp.models.text.text_and_tokens import TOKENIZER_STATE
from crate_interp.questions.untrained_twins import twin

VOCAB = 47


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
    refuses("start_at_layer=9: the model has layers 0 to 2", lambda: lm(z, start_at_layer=9))


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
    refuses("is 3 tokens, .*: give a text that is one", lambda: chat.to_single_token("xyz"))
    refuses("the text is empty", lambda: chat.to_tokens("", prepend_bos=False))
    refuses("there is no token 999", lambda: chat.to_string([999]))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_every_text_comes_back(chat, text):
    if text:
        assert chat.to_string(chat.to_tokens(text, prepend_bos=False, truncate=False)) == [text]
    with pytest.warns(UserWarning, match="text holds"):  # text never makes a special token
        ids = chat.to_tokens(text + "<|bos|>", prepend_bos=False, truncate=False)
    assert 276 not in ids


CHAT = FIXTURES / "nanochat_crate_alpha"


def test_a_tokenizer_is_there_from_the_start():
    lm = ci.load(CHAT)
    assert TOKENIZER_STATE[0] not in vars(lm)  # nothing was read for a run on token ids
    tokenizer = lm.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and lm.tokenizer is tokenizer
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|bos|>"
    assert tokenizer.bos_token_id == tokenizer.pad_token_id == 276
    assert tokenizer.padding_side == "right" and len(tokenizer) == lm.cfg.d_vocab
    assert isinstance(ci.load("crate-tiny-lm").tokenizer, PreTrainedTokenizerFast)


def test_it_is_used_as_hugging_face_uses_its_own(chat):
    tokenizer = chat.tokenizer
    read = tokenizer(["the", "the theory"], return_tensors="pt", padding=True)
    wanted = chat.to_tokens(["the", "the theory"], prepend_bos=False)
    assert torch.equal(read["input_ids"], wanted)
    assert read["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
    assert tokenizer.encode("the") == tokenizer("the")["input_ids"] == [260]
    assert tokenizer.decode([276, 260]) == "<|bos|>the"
    assert tokenizer.batch_decode(wanted, skip_special_tokens=True) == ["the", "the theory"]
    with torch.no_grad():
        out = chat(**tokenizer(["the", "the theory"], return_tensors="pt", padding=True))
        own = chat(["the", "the theory"], prepend_bos=False)
    assert torch.equal(out.logits, own)


def test_text_never_becomes_a_special_token(chat):
    name = "the <|bos|>"
    plain = chat.tokenizer(name)["input_ids"]
    with pytest.warns(UserWarning, match="text holds"):
        assert 276 not in plain and chat.to_tokens(name, prepend_bos=False)[0].tolist() == plain
    asked = chat.tokenizer(name, split_special_tokens=False)["input_ids"]  # Hugging Face's default
    assert asked[-1] == 276
    assert chat.tokenizer(name)["input_ids"] == plain == chat.tokenizer.encode(name)
    for other in (copy.deepcopy(chat), pickle.loads(pickle.dumps(chat)), twin(chat, 0)):
        assert other.tokenizer(name)["input_ids"] == plain


WAYS = {
    "to_tokens": lambda lm, texts: lm.to_tokens(texts),
    "forward": lambda lm, texts: lm(texts),
    "generate": lambda lm, texts: lm.generate(texts[0], max_new_tokens=1, verbose=False),
    "windows": lambda lm, texts: lm.windows(texts * 20),
    "sweep": lambda lm, texts: ci.sweep(
        lm, texts * 20, probes=["sparsity"], limit=2, controls=0, progress=False
    ),
    "graph": lambda lm, texts: ci.graph(lm, texts[0], most=4),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_with_the_name_of_a_special_token_warns_once(chat, way):
    for texts, count in ((["the <|bos|>", "the <|bos|>"], 1), (["the |bos|", "the |bos|"], 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            WAYS[way](chat, texts)
        assert [str(one.message).count("<|bos|>") for one in caught].count(1) == count
        assert len(caught) == count


def test_models_without_a_tokenizer(tmp_path):
    lm = make_lm()
    assert lm.tokenizer is None
    refuses("the model has no tokenizer: .* tokenizer='gpt2'", lambda: lm.to_tokens("a"))
    refuses("the model has no tokenizer", lambda: lm.to_tokens("a"), AssertionError)
    bare = ci.load(CHAT / "model.safetensors")
    bare.tokenizer = None
    assert bare.tokenizer is None
    refuses("the model has no tokenizer", lambda: bare("a"))
    file = tmp_path / "model.safetensors"
    file.write_bytes((CHAT / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((CHAT / "config.json").read_bytes())
    alone = ci.load(tmp_path)
    assert alone.tokenizer is None  # and yet text says what is missing
    refuses("there is no tokenizer.json and no tokenizer.pkl in", lambda: alone.to_tokens("a"))


def test_parts_of_a_character_are_named_by_their_bytes(chat):
    text = "é 日🙂"
    words = chat.to_str_tokens(text, prepend_bos=False)
    assert "".join(words) == "<C3><A9> <E6><97><A5><F0><9F><99><82>"
    ids = chat.to_tokens(text, prepend_bos=False)[0]
    assert [chat.to_single_str_token(token) for token in ids.tolist()] == words
    # TransformerLens' names, and the text itself
    marks = chat.to_string(ids[:, None])
    assert marks == chat.tokenizer.batch_decode(ids[:, None]) and marks.count("\ufffd") == 9
    assert chat.to_string(ids) == text
