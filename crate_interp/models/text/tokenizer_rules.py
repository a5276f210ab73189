"""Checks the parts of a tokenizer.json, because the `tokenizers` library trusts the file.

In that library a regular expression can take for ever, a chain of replacements can fill the memory,
and unexpected numbers end in a panic. Only the parts of public BPE, WordPiece and word-level models
are allowed. Together these parts lengthen a text by at most a fixed factor.
"""

import re
from typing import Any

from crate_interp.core.errors import CheckpointError
from crate_interp.models.text.split_patterns import check_pattern

_BYTES = ("add_prefix_space", "trim_offsets", "use_regex")
# section -> type of a part -> the part's fields. A part of type Sequence lists several parts of its
# section, under the key in _MEMBERS
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "normalizer": {
        "BertNormalizer": ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase"),
        **dict.fromkeys(("Lowercase", "NFC", "NFD", "NFKC", "NFKD"), ()),
        "Prepend": ("prepend",),
        "Replace": ("pattern", "content"),
        "Strip": ("strip_left", "strip_right"),
        "StripAccents": (),
    },
    "pre_tokenizer": {
        "BertPreTokenizer": (),
        "ByteLevel": _BYTES,
        "Digits": ("individual_digits",),
        "Punctuation": ("behavior",),
        "Split": ("pattern", "behavior", "invert"),
        "Whitespace": (),
        "WhitespaceSplit": (),
    },
    "post_processor": {
        "BertProcessing": ("sep", "cls"),
        "ByteLevel": _BYTES,
        "RobertaProcessing": ("sep", "cls", "trim_offsets", "add_prefix_space"),
        "TemplateProcessing": ("single", "pair", "special_tokens"),
    },
    "decoder": {
        "BPEDecoder": ("suffix",),
        "ByteFallback": (),
        "ByteLevel": _BYTES,
        "Fuse": (),
        "Replace": ("pattern", "content"),
        "Strip": ("content", "start", "stop"),
        "WordPiece": ("prefix", "cleanup"),
    },
}
_MEMBERS = dict(zip(PARTS, ("normalizers", "pretokenizers", "processors", "decoders"), strict=True))
MODELS: dict[str, tuple[str, ...]] = {
    "BPE": (
        "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
        "byte_fallback", "ignore_merges", "vocab", "merges",
    ),
    "WordLevel": ("unk_token", "vocab"),
    "WordPiece": ("unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"),
}  # fmt: skip
_MOST_TOKENS, _MOST_MERGES, _MOST_ADDED, _MOST_PARTS = 2**18, 2**19, 10_000, 8
_LONGEST_TOKEN, _LONGEST_WORD, _LONGEST_NAME = 1000, 200, 200
_IDS = 2**31


def check_content(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a tokenizer.json, without fields that are not used.

    Raises CheckpointError for anything that is not allowed.
    """
    for section in PARTS:
        _check_section(section, content.get(section))
    model = {"type": _kind(content["model"])} | content["model"]
    _check_model(model)
    return {name: content.get(name) for name in ("version", "added_tokens", *PARTS)} | {
        "model": model
    }


def check_added(tokens: Any) -> None:
    """Raises CheckpointError for added tokens that are too many, too long, or without a name."""
    if len(tokens) > _MOST_ADDED:
        raise CheckpointError(f"the tokenizer adds {len(tokens)} tokens, more than {_MOST_ADDED}.")
    for token in tokens:
        check_name(token["content"])


def check_name(name: object) -> None:
    """Raises CheckpointError for a name that no token can have."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or lone_surrogate(name):
        raise CheckpointError(
            f"the tokenizer adds a token {str(name)[:80]!r}, whose name must be a text of 1 to "
            f"{_LONGEST_NAME} characters."
        )


def lone_surrogate(text: str) -> re.Match[str] | None:
    """Returns the first match of half a surrogate pair in a text, or None."""
    return re.search("[\ud800-\udfff]", text)


def _check_section(section: str, part: Any) -> None:
    if part is None:
        return
    members = part.get(_MEMBERS[section]) if part["type"] == "Sequence" else [part]
    if not isinstance(members, list) or len(members) > _MOST_PARTS:
        raise CheckpointError(
            f"the tokenizer's {section} is not a list of at most {_MOST_PARTS} parts."
        )
    for member in members:
        fields = PARTS[section].get(member["type"])
        if fields is None:
            raise _refused(section, member["type"], PARTS[section])
        for name, value in member.items():
            if name != "type" and (name not in fields or not _is_admitted(name, value)):
                raise _odd(f"{section} {member['type']}", name, value)
        if member["type"] == "Replace" and not _shortens(member):
            raise _odd(f"{section} Replace", "content", member["content"])


def _shortens(member: dict[str, Any]) -> bool:
    """Tells whether a replacement is at most as long as the text that it replaces."""
    pattern = member["pattern"].get("String", "")
    return len(str(member["content"])) <= len(pattern)


def _is_admitted(name: str, value: Any) -> bool:
    """Tells whether a field of a part has a safe value; raises an error for an unsafe pattern.

    Most fields are switches or short words.
    """
    if name == "pattern":
        ((kind, pattern),) = value.items()
        if kind == "Regex":
            check_pattern(pattern)
        return kind == "Regex" or (kind == "String" and 0 < len(pattern) <= 16)
    if name in ("sep", "cls"):
        return isinstance(value, list) and len(value) == 2 and _is_word(value[0])
    if name in ("single", "pair"):  # a text that occurs twice in the template is output twice
        texts = [piece["Sequence"]["id"] for piece in value if "Sequence" in piece]
        return len(value) <= _MOST_PARTS and len(texts) == len(set(texts))
    if name == "special_tokens":
        pieces = [token for told in value.values() for token in (*told["ids"], *told["tokens"])]
        return len(value) <= _MOST_PARTS and len(pieces) <= 2 * _MOST_PARTS
    if name in ("start", "stop"):
        return type(value) is int and 0 <= value <= 16
    return value is None or isinstance(value, bool) or _is_word(value, 16)


def _check_model(model: Any) -> None:
    kind = model["type"]
    if kind not in MODELS:
        raise _refused("model", kind, MODELS)
    vocab, merges = model["vocab"], model.get("merges", [])
    for name, value in model.items():
        if name not in ("type", "vocab", "merges") and (
            name not in MODELS[kind] or not _suits(kind, name, value, vocab)
        ):
            raise _odd(f"model {kind}", name, value)
    if not isinstance(vocab, dict) or not 0 < len(vocab) <= _MOST_TOKENS:
        raise CheckpointError(
            f"the tokenizer's vocab is not a table of 1 to {_MOST_TOKENS} tokens."
        )
    if not isinstance(merges, list) or len(merges) > _MOST_MERGES:
        raise CheckpointError(
            f"the tokenizer's merges are not a list of at most {_MOST_MERGES} merges."
        )
    if max(map(len, vocab)) > _LONGEST_TOKEN:
        raise CheckpointError(
            f"the tokenizer has a token of more than {_LONGEST_TOKEN} characters."
        )
    if not all(type(index) is int and 0 <= index < _IDS for index in vocab.values()):
        raise CheckpointError(f"the tokenizer's ids are not whole numbers from 0 to {_IDS - 1}.")


def _kind(model: dict[str, Any]) -> str:
    """Returns the type of a model, judged by its fields; GPT-2's and BERT's files name no type."""
    if "merges" in model:
        return "BPE"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def _suits(kind: str, name: str, value: Any, vocab: Any) -> bool:
    """Tells whether a field of a model has a safe value."""
    if name == "dropout":  # with dropout a text would become different tokens each time
        return value is None or value == 0
    if name == "unk_token":  # without unk_token a model fails at the first unknown word
        return value is None if kind == "BPE" and value is None else value in vocab
    if name == "continuing_subword_prefix":
        # a BPE model cuts this prefix off every merge, even off a merge shorter than the prefix
        return value in (None, "") or (kind == "WordPiece" and _is_word(value, 16))
    if name == "end_of_word_suffix":
        return value is None or _is_word(value, 16)
    if name == "max_input_chars_per_word":  # the time for a word grows with the cube of its length
        return type(value) is int and 0 < value <= _LONGEST_WORD
    return isinstance(value, bool)


def _is_word(value: Any, longest: int = _LONGEST_NAME) -> bool:
    return isinstance(value, str) and len(value) <= longest


def _refused(section: str, kind: Any, known: Any) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer's {section} is {kind!r}, which is not read from files: "
        f"only {', '.join(known)} are. Give token ids instead."
    )


def _odd(part: str, name: str, value: Any) -> CheckpointError:
    return CheckpointError(f"the tokenizer's {part} has {name}={str(value)[:80]!r}: not allowed.")
