"""Text to token ids and back, by Hugging Face tokenizers."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from crate_interp.core.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# role of a token, in Hugging Face's terms -> its names in published tokenizers; the first name that
# a tokenizer has is used
ROLES = {
    "bos_token": ("<|bos|>", "<|endoftext|>", "[CLS]"),
    "eos_token": ("<|endoftext|>", "[SEP]", "<|bos|>"),
    "pad_token": ("<|pad|>", "[PAD]", "<|endoftext|>", "<|bos|>", "[SEP]"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]",),
}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def encode(tokenizer: object, text: str) -> list[int]:
    """Returns the token ids of a text, with no special token added.

    tokenizer: a Hugging Face tokenizer, or any object with `encode`.
    """
    options = {"add_special_tokens": False} if is_hugging_face(tokenizer) else {}
    held: Any = tokenizer
    return held.encode(text, **options)


def decode(tokenizer: object, ids: Sequence[int]) -> str:
    """Returns the text of token ids; special tokens appear by their names.

    Raises ValueError for an id that no token has.
    """
    held: Any = tokenizer
    core = getattr(held, "backend_tokenizer", None)  # five times as fast, and drops no ids
    if core is None:
        return held.decode(ids)
    for index in ids:
        if not 0 <= index < len(held):
            raise ValueError(f"there is no token {index}: the tokenizer has {len(held)} tokens.")
    return core.decode(ids, skip_special_tokens=False)


def token_name(tokenizer: object, index: int) -> str:
    """Returns the text of one token, with names such as <E6> for bytes that form no character.

    `decode` shows a replacement mark for such bytes, so many tokens would share one name. The bytes
    are known for byte-level tokenizers of Hugging Face; other tokenizers keep the mark. Raises
    ValueError for an id that no token has.
    """
    text = decode(tokenizer, [index])
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    spelled = core.id_to_token(index)
    one = re.fullmatch("<0x([0-9A-F]{2})>", spelled)  # Llama's name for a byte
    if one:
        return f"<{one[1]}>"
    values: list[Any] = [bytes_of_signs().get(sign) for sign in spelled]
    return text if None in values else _named_bytes(bytes(values))


def _named_bytes(content: bytes) -> str:
    """Returns bytes as text; bytes that form no UTF-8 character show as <E6>."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        names = "".join(f"<{byte:02X}>" for byte in content[error.start : error.end])
        return content[: error.start].decode() + names + _named_bytes(content[error.end :])


@cache
def bytes_of_signs() -> dict[str, int]:
    """Returns the byte for which each character of GPT-2's byte-level alphabet stands."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(256 + place): byte for place, byte in enumerate(others)}
    return signs | {chr(byte): byte for byte in printable}


def separator(tokenizer: object) -> int | None:
    """Returns the id of the separator that may begin a text, or None."""
    held: Any = tokenizer
    return held.bos_token_id if is_hugging_face(tokenizer) else held.bos


def spelled_specials(tokenizer: object, text: str) -> list[str]:
    """Returns the special tokens whose names stand in a text, and are ordinary text there."""
    if not getattr(tokenizer, "split_special_tokens", False):
        return []
    held: Any = tokenizer
    added = held.added_tokens_decoder.values()
    return [token.content for token in added if token.special and token.content in text]


def is_hugging_face(tokenizer: object) -> bool:
    """Tells whether a tokenizer is Hugging Face's; others have only `encode` and `bos`."""
    return hasattr(tokenizer, "bos_token_id")


def to_json(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Returns a tokenizer.json that `build` and Hugging Face's libraries can read.

    Raises CheckpointError for a tokenizer that `build` would refuse.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    check(content)
    return json.dumps(content | {"truncation": None, "padding": None}, ensure_ascii=False)


def check(content: dict[str, Any]) -> None:
    """Raises CheckpointError for a tokenizer.json that drops merges at random."""
    if content["model"].get("dropout"):
        raise CheckpointError(
            f"the tokenizer has dropout={content['model']['dropout']}, so a text would become "
            "other tokens each time: set dropout to null in its tokenizer.json."
        )


def build(content: dict[str, Any]) -> "PreTrainedTokenizerFast":
    """Returns the Hugging Face tokenizer made from the content of a tokenizer.json.

    Raises CheckpointError for one that drops merges at random; any other exception means that this
    is not the content of a tokenizer.json. No text is cut or padded.

    The name of a special token in a text is ordinary text and never becomes that token. Hugging
    Face's default is the opposite; `tokenizer(text, split_special_tokens=False)` restores it. The
    tokenizer's separator (<|bos|>, GPT-2's <|endoftext|>, BERT's [CLS]) is `bos_token`. If a
    tokenizer has no padding token, its separator is used as one, as in TransformerLens.
    """
    from tokenizers import Tokenizer as Core
    from transformers import PreTrainedTokenizerFast

    check(content)
    added = sorted(content.get("added_tokens") or [], key=lambda token: token["id"])
    specials = {token["content"]: token["id"] for token in added if token["special"]}
    # with these flags off, a special token matches no text
    exact = [token | dict.fromkeys(_FLAGS, False) if token["special"] else token for token in added]
    content = content | {"added_tokens": exact, "truncation": None, "padding": None}
    core = Core.from_str(json.dumps(content))
    found = {
        role: next(name for name in names if name in specials)
        for role, names in ROLES.items()
        if set(names) & set(specials)
    }
    unknown = content["model"].get("unk_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="right",
        **found | ({"unk_token": unknown} if unknown else {}),
    )
