"""Reads nanochat's tokenizer.pkl, a pickled tiktoken.Encoding, without unpickling it.

The interpreter in pickles.py reads the pickle, and is allowed to call nothing.
"""

import json
from typing import TYPE_CHECKING, Any

import crate_interp.checkpoints.formats.pickles as pickles
from crate_interp.core.errors import CheckpointError
from crate_interp.models.text.split_patterns import check_pattern
from crate_interp.models.text.tokenizer import build, safely
from crate_interp.models.text.tokenizer_rules import check_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ENCODING = pickles.Record("tiktoken.core.Encoding")
_MAX_TOKENS, _MAX_LENGTH, _MAX_TOTAL = 2**18, 256, 2**21  # the last two are in bytes
_MAX_SPECIALS = 10_000


def read_tokenizer(content: bytes) -> "PreTrainedTokenizerFast":
    """Returns the tokenizer in a pickle.

    Raises CheckpointError for a pickle that imports anything but tiktoken.core.Encoding, or
    does anything that no tiktoken.Encoding needs.
    """
    try:
        held = pickles.read_pickle(content, _DIALECT).value
    except pickles.NotAdmittedError as error:
        raise CheckpointError(
            f"the tokenizer's pickle asks for {error}, but only {_ENCODING.name} is admitted; "
            "nothing was run."
        ) from None
    except pickles.PickleError as error:
        raise CheckpointError(f"the tokenizer's pickle is damaged: it {error}.") from None
    if type(held) is not pickles.Bag:
        raise CheckpointError(
            f"the tokenizer's pickle holds a {type(held).__name__}; expected a tiktoken.Encoding."
        )
    return _build(held.values or {})


def _key_of(value: Any) -> str | bytes:
    # hashes of numbers are predictable: a file could hold thousands of keys with the same hash
    if type(value) not in (str, bytes):
        raise pickles.PickleError(
            f"has a {type(value).__name__} as the key of a dict; expected text"
        )
    return value


_DIALECT = pickles.Dialect(
    {_ENCODING.name: _ENCODING},
    (2, 3, 4, 5),
    "NONE NEWTRUE NEWFALSE EMPTY_TUPLE EMPTY_DICT EMPTY_LIST BININT BININT1 BININT2 LONG1 "
    "SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 MARK SETITEM "
    "SETITEMS MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL NEWOBJ BUILD FRAME",
    _key_of,
)


def _build(record: dict[Any, Any]) -> "PreTrainedTokenizerFast":
    """Returns the byte-level BPE tokenizer with the ranks and the pattern of an Encoding.

    The tokenizer first merges the two neighbours that together form the token of lowest rank.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    ranks, pattern, specials = _checked(record)
    text = _byte_alphabet()
    spelled = {token: "".join(text[byte] for byte in token) for token in ranks}
    pairs = (_last_pair(token, ranks) for token in sorted(ranks, key=ranks.__getitem__))
    merges = [(spelled[pair[0]], spelled[pair[1]]) for pair in pairs if pair]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    core = safely(lambda: Core(models.BPE(vocab=vocab, merges=merges)))
    check_pattern(pattern)
    split = safely(lambda: pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    added = [{"id": index, "content": name, "special": True} for name, index in specials.items()]
    return build(json.loads(core.to_str()) | {"added_tokens": added})


def _last_pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """Returns the two tokens whose merge completes `token`, or None if no merge does.

    One pair per token is enough. Until this last merge, the bytes of `token` merge only with one
    another, so they merge in the same way as when `token` stands alone. So no other two tokens that
    together form `token` ever become neighbours.
    """
    never = len(ranks)
    ends = list(range(len(token) + 1))  # where the parts begin, and where the last part ends
    costs = [ranks.get(token[at : at + 2], never) for at in range(len(token) - 1)]
    while len(costs) > 1:
        least = min(costs)
        if least == never:
            return None
        at = costs.index(least)
        del ends[at + 1], costs[at]
        if at < len(costs):
            costs[at] = ranks.get(token[ends[at] : ends[at + 2]], never)
        if at:
            costs[at - 1] = ranks.get(token[ends[at - 1] : ends[at + 1]], never)
    return (token[: ends[1]], token[ends[1] :]) if costs else None


def _checked(record: dict[Any, Any]) -> tuple[dict[bytes, int], str, dict[str, int]]:
    """Returns the ranks, the pattern and the special tokens in an Encoding's state.

    Raises CheckpointError if one of these three is missing or invalid.
    """
    ranks: Any = record.get("mergeable_ranks")
    pattern: Any = record.get("pat_str")
    specials: Any = record.get("special_tokens")
    right = (
        isinstance(ranks, dict)
        and len(ranks) <= _MAX_TOKENS
        and all(
            isinstance(token, bytes)
            and 0 < len(token) <= _MAX_LENGTH
            and type(rank) is int
            and 0 <= rank < len(ranks)
            for token, rank in ranks.items()
        )
        and sum(map(len, ranks)) <= _MAX_TOTAL
        and all(bytes([byte]) in ranks for byte in range(256))
        and len(set(ranks.values())) == len(ranks)
        and isinstance(pattern, str)
        and isinstance(specials, dict)
        and len(specials) <= _MAX_SPECIALS
        and all(type(index) is int and 0 <= index < 2**31 for index in specials.values())
    )
    if not right:
        raise CheckpointError(
            "the tokenizer's pickle holds no byte-level BPE: expected mergeable_ranks "
            f"(at most {_MAX_TOKENS} tokens of at most {_MAX_LENGTH} bytes, with at most "
            f"{_MAX_TOTAL} bytes in all, ranked 0, 1, 2, ...), pat_str and special_tokens."
        )
    for name in specials:
        check_name(name)
    return ranks, pattern, specials


def _byte_alphabet() -> dict[int, str]:
    """Returns the printable character that stands for each byte in GPT-2's byte-level BPE."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
