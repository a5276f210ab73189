"""Tokenizers of files: the ids that their own library gives, and no code of a pickle is run."""

import json
import os
import pickle
import pickletools
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
from conftest import FIXTURES, refuses
from crate_interp.checkpoints.tokenizer_files import read_tiktoken
from crate_interp.models.text import tokenizer

CHAT = FIXTURES / "nanochat_crate_alpha"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1}}  # fmt: skip


@pytest.fixture(scope="module")
def good():
    """A tokenizer.json of byte-level BPE."""
    return json.loads(tokenizer.to_json(ci.load(CHAT).tokenizer))


def parsed(content):
    return tokenizer.build(json.loads(json.dumps(content)))


def test_the_tokenizers_of_public_models(good):
    """The parts of GPT-2's, BERT's and nanochat's files."""
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": True}  # fmt: skip
    gpt2 = good | {"pre_tokenizer": bytes_, "post_processor": bytes_, "decoder": bytes_}
    words = "It's the theory, 12 times.\n\n  Yes!"
    read = parsed(gpt2)
    assert read.decode(read.encode(words)) == words
    untyped = {name: value for name, value in good["model"].items() if name != "type"}
    untyped |= {"merges": [" ".join(pair) for pair in untyped["merges"]]}
    untyped |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    assert parsed(gpt2 | {"model": untyped}).encode(words) == read.encode(words)  # as GPT-2's
    cls, text = (
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    bert = good | {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing", "single": [cls, text], "pair": [cls, text],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": WORDS,
        "added_tokens": [],
    }  # fmt: skip
    read = parsed(bert)
    assert tokenizer.encode(read, "A \u00e1 b") == [1, 1, 0]
    assert read.encode("A b") == [2, 1, 0]  # as Hugging Face does
    assert json.loads(tokenizer.to_json(read))["post_processor"]["type"] == "TemplateProcessing"
    untyped = {name: value for name, value in WORDS.items() if name != "type"}
    assert tokenizer.encode(parsed(bert | {"model": untyped}), "A b") == [1, 0]


# ------------------------------------------------------------------ tiktoken's pickles


def packed(ranks, pattern=GPT2, specials=None, after=b""):
    """A pickle such as nanochat writes, without tiktoken."""
    state = {"name": "x", "pat_str": pattern, "mergeable_ranks": ranks,
             "special_tokens": specials or {}}  # fmt: skip
    head = b"\x80\x04\x8c\x0dtiktoken.core\x8c\x08Encoding\x93)\x81"
    return head + pickletools.optimize(pickle.dumps(state, protocol=4))[2:-1] + b"b" + after + b"."


def bytes_and(*more):
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *more])}


def tokens_of(piece, ranks):
    """tiktoken's rule: the neighbours whose union has the lowest rank merge, the leftmost first."""
    parts = [bytes([byte]) for byte in piece]
    while pairs := [
        (ranks[a + b], place)
        for place, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
        if a + b in ranks
    ]:
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


@settings(max_examples=30)
@given(
    tokens=st.lists(st.text("ab", min_size=2, max_size=7), max_size=20, unique=True),
    order=st.randoms(use_true_random=False),
    words=st.lists(st.text("ab", min_size=1, max_size=30), min_size=1, max_size=5),
)
def test_a_pickle_gives_the_ids_of_tiktoken(tokens, order, words):
    """Of any ranks, those that no training gives among them."""
    every = [*(bytes([byte]) for byte in range(256)), *(token.encode() for token in tokens)]
    order.shuffle(every)
    ranks = {token: rank for rank, token in enumerate(every)}
    read = read_tiktoken(packed(ranks, r"\s+"))
    for word in words:
        assert read.encode(word) == [ranks[token] for token in tokens_of(word.encode(), ranks)]


class Touch:
    """Unpickling it runs a shell command that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def chat(folder, **files):
    copied = shutil.copytree(CHAT, folder / "chat", dirs_exist_ok=True)
    for name, content in files.items():
        (copied / name.replace("__", ".")).write_bytes(content)
    return copied


def refused(match, folder):
    refuses(match, lambda: ci.load(folder).to_tokens("the"), ci.CheckpointError)


def test_pickles_that_run_code(tmp_path):
    ran = tmp_path / "ran"
    asked = "asks for posix.system, but only tiktoken.core.Encoding is admitted; nothing was run"
    for protocol in range(6):
        content = pickle.dumps(Touch(ran), protocol=protocol)
        refused(asked, chat(tmp_path, tokenizer__pkl=content))
    hidden = packed(bytes_and() | {Touch(ran): 256})
    refused(asked, chat(tmp_path, tokenizer__pkl=hidden))
    encoding = b"\x8c\x0dtiktoken.core\x8c\x08Encoding\x93"
    call = pickle.dumps(Touch(ran), protocol=4)[2:-1]
    for body in (
        encoding + b"\x8c\x04evil\x85R",  # a call of the admitted class
        encoding + b"}\x8c\x0c__setstate__Nsb",  # state for the class itself
        encoding + b"N}\x8c\x0c__setstate__" + encoding + b"s\x86b",
        encoding + b")\x81N}\x8c\x09__class__" + encoding + b"s\x86b",
        encoding + b")\x81}\x8c\x05state" + call + b"sb",
        b"Pos.system\n",
        b"\x82\x01",
        b"cos\nsystem\n",
    ):
        refused("tokenizer", chat(tmp_path, tokenizer__pkl=b"\x80\x04" + body + b"."))
    assert not ran.exists()
    assert read_tiktoken((CHAT / "tokenizer.pkl").read_bytes()).encode("the") == [260]


def test_other_bad_tokenizers(tmp_path):
    good = (CHAT / "tokenizer.pkl").read_bytes()
    for content, match in (
        (good.replace(b"Encoding", b"Encodinh"), "asks for tiktoken.core.Encodinh"),
        (good[:100], "is not a tokenizer.pkl"),
        (b"", "is not a tokenizer.pkl"),
        (pickle.dumps({"a": 1}), "is not a tokenizer.pkl"),
        (packed({token: 0 for token in bytes_and()}), "are not 0, 1, 2"),
    ):
        refused(match, chat(tmp_path, tokenizer__pkl=content))
    for content in (b"{", b"[]", b'{"added_tokens": 3}', b"\xff"):
        refused("is not a tokenizer.json", chat(tmp_path, tokenizer__json=content))
    for name in ("tokenizer.json", "tokenizer.pkl"):
        (tmp_path / "chat" / name).unlink()
    refused("there is no tokenizer.json and no tokenizer.pkl in", tmp_path / "chat")
