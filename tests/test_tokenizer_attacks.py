"""Tokenizers of strangers: what the Rust library would hang, swell or panic at is refused before.

What is left works in time and memory in proportion to the text.
"""

import copy
import json
import pickle
import pickletools
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
from conftest import FIXTURES
from crate_interp.checkpoints.formats import pickles, tiktoken_pickle
from crate_interp.models.text import split_patterns, tokenizer, tokenizer_rules

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLIC = (
    GPT2,
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    *split_patterns._WHOLE,
    r"\w+|[^\w\s]+",
    r"\s+",
    r"\p{N}{1,3}",
)
SLOW = (
    r"(a+)+$", r"a+b|a", r"(a*)*b", r"a*a*b", r"(?:a|a)*b", r"a?a?a?a?a?a?aaaaaa", r"(a|b|ab)*c",
    r"(?<=a+)b", r"a{2,100000}", r"(?:a{1,9}){1,9}", r"\s+$", r"(\w+)\1", r"a+?b", r".*x",
    r"(?>a+)b", r"(?i:a+)+", r"\s+(?!\S)|a+b", r"x*y", r"\p{L}+\p{N}", "[", "(?#", "\\", "a" * 2000,
    r"\s*[\r\n]|\s", r"\s|\s*[\r\n]+", r"a{1,3}+", r"[[:alpha:]]+x", r"\Gx", r"(?~a)", r"\X+x",
)  # fmt: skip


@pytest.fixture(scope="module")
def good():
    """A tokenizer.json of byte-level BPE."""
    return json.loads(tokenizer.to_json(ci.load(FIXTURES / "nanochat_crate_alpha").tokenizer))


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(pieces):
    texts = [{"Sequence": {"id": "A", "type_id": 0}}] * pieces
    return {"type": "TemplateProcessing", "single": texts, "pair": [], "special_tokens": {}}


def swell(size):
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * size}


def chain(*parts):
    return {"type": "Sequence", "normalizers": list(parts)}


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
WORDS = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
         "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1}}  # fmt: skip
REFUSED = {
    "a panic in Rust": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AQ=="}),
    "one that grows": ("normalizer", swell(10)),
    "twelve that grow": ("normalizer", chain(*[swell(10)] * 12)),
    "one in front": ("normalizer", {"type": "Prepend", "prepend": "a" * 10**6}),
    "a chain in a chain": ("normalizer", chain(chain({"type": "NFC"}))),
    "a long chain": ("normalizer", chain(*[{"type": "NFC"}] * 9)),
    "no chain": ("normalizer", {"type": "Sequence", "normalizers": {}}),
    "a decoder that grows": ("decoder", swell(10)),
    "a decoder of no list": ("decoder", {"type": "CTC"}),
    "a replacement that is longer": (
        "normalizer",
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"},
    ),
    "a replacement by a pattern": (
        "normalizer",
        {"type": "Replace", "pattern": {"Regex": "a"}, "content": "a"},
    ),
    "a regular expression": ("pre_tokenizer", split("(a+)+$")),
    "the square of a text": ("pre_tokenizer", split("a+b|a")),
    "a long string": ("pre_tokenizer", split("a") | {"pattern": {"String": "a" * 17}}),
    "metaspace": ("pre_tokenizer", {"type": "Metaspace", "replacement": "_"}),
    "an unknown field": ("pre_tokenizer", {"type": "Whitespace", "extra": True}),
    "a text five times": ("post_processor", template(5)),
    "a long template": ("post_processor", template(0) | {"pair": [{"SpecialToken": {}}] * 9}),
    "unigram": ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}),
    "no unknown word": ("model", WORDS | {"vocab": {"a": 0}}),
    "endless words": ("model", WORDS | {"max_input_chars_per_word": 10**6}),
    "a huge id": ("model", WORDS | {"vocab": {"[UNK]": 0, "a": 2**31}}),
    "ids that collide": ("model", WORDS | {"vocab": {"[UNK]": 0, "a": 2**61 - 1}}),
    "an id that is none": ("model", WORDS | {"vocab": {"[UNK]": 0, "a": True}}),
    "a long token": ("model", WORDS | {"vocab": {"[UNK]": 0, "a" * 1001: 1}}),
    "no tokens": ("model", WORDS | {"vocab": {}, "unk_token": None}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_are_not_admitted(name, good):
    section, part = REFUSED[name]
    with pytest.raises(ci.CheckpointError, match="^the tokenizer(?!s)"):
        tokenizer.parse(json.dumps(good | {section: part}))


def test_bpe_that_would_panic_or_vary(good, monkeypatch):
    monkeypatch.setattr(tokenizer_rules, "_MOST_MERGES", 50)
    for field, value in (
        ("continuing_subword_prefix", "####"),  # a panic
        ("continuing_subword_prefix", "\u00e9"),
        ("dropout", 0.5),  # other tokens at each call
        ("unk_token", "no such"),
        ("end_of_word_suffix", "a" * 17),
        ("byte_fallback", 3),
        ("merges", {}),
        ("merges", [["t", "h"]] * 51),
    ):
        content = good | {"model": good["model"] | {field: value}}
        with pytest.raises(ci.CheckpointError, match="^the tokenizer(?!s)"):
            tokenizer.parse(json.dumps(content))


def test_a_vocabulary_has_an_end(good, monkeypatch):
    """One of a million tokens would take a gigabyte and five seconds."""
    assert tokenizer.parse(json.dumps(good)).encode("the")
    monkeypatch.setattr(tokenizer_rules, "_MOST_TOKENS", len(good["model"]["vocab"]) - 1)
    with pytest.raises(ci.CheckpointError, match="is not a table of 1 to"):
        tokenizer.parse(json.dumps(good))


def test_added_tokens_are_few_and_have_names(good):
    one = {"id": 300, "content": "x", "special": False, **FLAGS}
    for tokens in (
        [one | {"content": ""}],
        [one | {"content": "x" * 201}],
        [one | {"content": "\ud800", "special": True}],
        [one | {"content": str(number)} for number in range(10_001)],
    ):
        with pytest.raises(ci.CheckpointError, match="the tokenizer adds"):
            tokenizer.parse(json.dumps(good | {"added_tokens": tokens}))


def test_the_tokenizers_of_public_models_are_admitted(good):
    """The parts of GPT-2's, BERT's and nanochat's files."""
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": True}  # fmt: skip
    gpt2 = good | {"pre_tokenizer": bytes_, "post_processor": bytes_, "decoder": bytes_}
    text = "It's the theory, 12 times.\n\n  Yes!"
    read = tokenizer.parse(json.dumps(gpt2))
    assert read.decode(read.encode(text)) == text
    untyped = {name: value for name, value in good["model"].items() if name != "type"}
    untyped |= {"merges": [" ".join(pair) for pair in untyped["merges"]]}
    untyped |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    old = tokenizer.parse(json.dumps(gpt2 | {"model": untyped}))  # as GPT-2's is written
    assert old.encode(text) == read.encode(text)
    cls, sep = (
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    bert = good | {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing", "single": [cls, sep], "pair": [cls, sep],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": WORDS,
        "added_tokens": [],
    }  # fmt: skip
    read = tokenizer.parse(json.dumps(bert))
    assert tokenizer.encode(read, "A \u00e1 b") == [1, 1, 0]
    assert read.encode("A b") == [2, 1, 0]  # as Hugging Face does
    untyped = {name: value for name, value in WORDS.items() if name != "type"}
    assert tokenizer.encode(tokenizer.parse(json.dumps(bert | {"model": untyped})), "A b") == [1, 0]
    untyped = {"unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1}}
    assert tokenizer.encode(tokenizer.parse(json.dumps(bert | {"model": untyped})), "A b") == [1, 0]
    assert json.loads(tokenizer.to_json(read))["post_processor"]["type"] == "TemplateProcessing"
    for pattern in PUBLIC:
        chat = good | {"pre_tokenizer": split(pattern)}
        assert tokenizer.parse(json.dumps(chat)).encode("the")


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_may_take_for_ever(pattern):
    with pytest.raises(ci.CheckpointError, match="splits text by .* may take for ever"):
        split_patterns.check_pattern(pattern)


@given(st.text("ab1 \\spLN{}[]()^?*+|:i-<>=!&$.,\n", max_size=60))
def test_admitted_patterns_never_go_far_back(pattern):
    """The engine panics after ten million steps back in one match; none that is admitted does."""
    from tokenizers import Regex, pre_tokenizers

    try:
        split_patterns.check_pattern(pattern)
    except ci.CheckpointError:
        return
    try:
        parts = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception:
        return  # no regular expression at all
    for unit in ("a", "ab", " ", "a ", "1"):
        tokenizer.safely(lambda text=unit * 5000: parts.pre_tokenize_str(text))


def test_every_public_pattern_comes_to_its_end():
    from tokenizers import Regex, pre_tokenizers

    for pattern in PUBLIC:
        split_patterns.check_pattern(pattern)
        parts = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for unit in (" ", "\n", "a", "aA", "'", " !", "\u3042"):
            parts.pre_tokenize_str(unit * 20_000 + "x")
    # the same letters, another meaning: Oniguruma does not know a possessive {1,3}+
    other = pre_tokenizers.Split(Regex(r"\p{N}{1,3}+"), behavior="isolated")
    assert len(other.pre_tokenize_str("1234567")) == 1


def test_panics_become_errors(good, capfd):
    """At load and at use, where the list would let one through."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    read = tokenizer.parse(json.dumps(good))
    read.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("(a+)+$"), behavior="isolated"
    )
    with pytest.raises(ci.CheckpointError, match="library failed: Onig.* over"):
        tokenizer.encode(read, "a" * 40 + "b")
    bad = copy.deepcopy(good)
    bad["model"]["continuing_subword_prefix"] = "####"
    with pytest.raises(ci.CheckpointError, match="library failed: "):
        tokenizer.safely(lambda: Tokenizer.from_str(json.dumps(bad)))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.safely(lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_half_a_surrogate_pair_is_named():
    chat = ci.load(FIXTURES / "nanochat_crate_alpha")
    for call in (
        lambda: chat.to_tokens("the \ud800 end"),
        lambda: chat(["the \ud800 end"]),
        lambda: chat.windows(["the \ud800 end"]),
        lambda: chat.to_single_token("the \ud800 end"),
        lambda: chat.to_str_tokens("the \ud800 end"),
        lambda: chat.generate("the \ud800 end"),
    ):
        with pytest.raises(ValueError, match=r"character 4 of the text .* U\+D800"):
            call()
    mended = "the \ud800 end".encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert chat.to_string(chat.to_tokens(mended, prepend_bos=False)[0]) == "the \ufffd end"
    for index in (-1, 2**32, 10**30):
        with pytest.raises(ValueError, match="there is no token"):
            chat.to_string([index])


def packed(ranks, pattern=GPT2, specials=None):
    """A pickle such as nanochat writes, without tiktoken."""
    state = {"name": "x", "pat_str": pattern, "mergeable_ranks": ranks,
             "special_tokens": specials or {}}  # fmt: skip
    head = b"\x80\x04\x8c\x0dtiktoken.core\x8c\x08Encoding\x93)\x81"
    return head + pickletools.optimize(pickle.dumps(state, protocol=4))[2:-1] + b"b."


def bytes_and(*more):
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *more])}


def test_pickles_that_cost_more_than_they_say(monkeypatch):
    monkeypatch.setattr(pickles, "_MOST_STEPS", 2000)
    monkeypatch.setattr(tiktoken_pickle, "_MAX_TOTAL", 1000)
    small = packed(bytes_and(b"th", b"the"))
    assert tiktoken_pickle.read_tokenizer(small).encode("the") == [257]
    same_hash = {number * (2**61 - 1): None for number in range(3)}
    for content, match in (
        (packed(same_hash), "is damaged"),  # thousands of these would take an hour
        (packed(bytes_and() | {(): 256}), "is damaged"),
        (packed(bytes_and(b"x" * 257)), "holds no byte-level BPE"),
        (packed({token: 0 for token in bytes_and()}), "holds no byte-level BPE"),
        (packed(bytes_and(), "(a+)+$"), "may take for ever"),
        (packed(bytes_and(), specials={"\ud800": 256}), "adds a token"),
        (packed(bytes_and(), specials={"x": 2**31}), "holds no byte-level BPE"),
        (b"\x80\x04" + b"N" * (2001) + b".", "is damaged: it has more than 2000 values"),
        (b"\x80\x04)" + b"\x94" * (2001) + b".", "is damaged: it has more than 2000 values"),
        (b"\x80\x04(" + b"(" * 100 + b"t.", "asks for the operation TUPLE, but only"),
        (b"\x80\x04B" + struct.pack("<I", 2**32 - 1) + b"x.", "is damaged"),
    ):
        with pytest.raises(ci.CheckpointError, match=match):
            tiktoken_pickle.read_tokenizer(content)
    long = [b"%07d" % number + b"x" * 200 for number in range(4)]
    with pytest.raises(ci.CheckpointError, match="256 bytes, with at most 1000 bytes in all"):
        tiktoken_pickle.read_tokenizer(packed(bytes_and(*long)))


def all_splits(ranks):
    """Every pair of tokens that makes a token, best first: the slow way."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


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
def test_one_pair_a_token_merges_as_all_pairs_do(tokens, order, words):
    """Of any ranks, those that no training gives among them."""
    from tokenizers import Tokenizer, models

    every = [*(bytes([byte]) for byte in range(256)), *(token.encode() for token in tokens)]
    order.shuffle(every)
    ranks = {token: rank for rank, token in enumerate(every)}
    read = tiktoken_pickle.read_tokenizer(packed(ranks, r"\s+"))
    alphabet = tiktoken_pickle._byte_alphabet()

    def spell(token):
        return "".join(alphabet[byte] for byte in token)

    merges = [(spell(left), spell(right)) for left, right in all_splits(ranks)]
    slow = Tokenizer(
        models.BPE(vocab={spell(token): rank for token, rank in ranks.items()}, merges=merges)
    )
    for word in words:
        wanted = [ranks[token] for token in tokens_of(word.encode(), ranks)]
        assert read.encode(word) == wanted == slow.encode(word).ids


def test_the_work_of_a_pickle_is_bounded_by_its_bytes(monkeypatch):
    """The steps of finding pairs, counted: a fixed number a byte, whatever the tokens are."""
    looked = []

    class Counted(dict):
        def get(self, key, default=None):
            looked.append(len(key))
            return super().get(key, default)

    rng = random.Random(0)
    for length in (8, 64, 256):
        random_ones = [bytes(rng.choices(b"ab", k=length)) for _ in range(8)]
        for token in (b"a" * length, *random_ones):
            parts = {token[at:end] for at in range(length) for end in range(at + 1, length + 1)}
            ranks = Counted((part, rank) for rank, part in enumerate(sorted(parts)))
            looked.clear()
            tiktoken_pickle._last_pair(token, ranks)
            assert len(looked) <= 3 * length


def test_every_admitted_part_is_one_that_the_library_has(good):
    """A name that the list spells wrong would refuse a model for nothing."""
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    rooms = {"normalizer": normalizers, "pre_tokenizer": pre_tokenizers,
             "post_processor": processors, "decoder": decoders}  # fmt: skip
    for section, parts in tokenizer_rules.PARTS.items():
        for name in parts:
            assert hasattr(rooms[section], name)
