"""The tokenizer of a model, which is one of Hugging Face's, and TransformerLens' names for text."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import crate_interp as ci
from conftest import FIXTURES, make_lm, refuses
from crate_interp.models.text.text_and_tokens import TOKENIZER_STATE
from crate_interp.questions.untrained_twins import twin

CHAT = FIXTURES / "nanochat_crate_alpha"


@pytest.fixture(scope="module")
def chat():
    return ci.load(CHAT)


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
    folder = ci.load(CHAT).save_pretrained(tmp_path / "chat")
    kept = (folder / "tokenizer.json").read_text()
    again = ci.load(folder).save_pretrained(tmp_path / "again")
    assert (again / "tokenizer.json").read_text() == kept
    file = tmp_path / "model.safetensors"
    file.write_bytes((CHAT / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((CHAT / "config.json").read_bytes())
    alone = ci.load(tmp_path)
    assert alone.tokenizer is None  # and yet text says what is missing
    refuses("there is no tokenizer.json and no tokenizer.pkl in", lambda: alone.to_tokens("a"))


def test_tokens_as_strings(chat):
    ids = chat.to_tokens("the theory")
    words = chat.to_str_tokens("the theory")
    assert words[0] == "<|bos|>" and "".join(words[1:]) == "the theory"
    for form in (ids, ids[0], ids.numpy(), ids[0].tolist()):
        assert chat.to_str_tokens(form) == words  # a batch of one is one row
    assert chat.to_str_tokens(torch.tensor(260)) == ["the"]
    assert chat.to_str_tokens(ids.repeat(2, 1)) == [words, words]
    assert chat.to_str_tokens(["the", "the theory"]) == [["<|bos|>", "the"], words]
    assert chat.to_string(ids.numpy()) == chat.to_string(ids) == ["<|bos|>the theory"]
    assert chat.to_string(np.int64(260)) == chat.to_string(torch.tensor(260)) == "the"


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
