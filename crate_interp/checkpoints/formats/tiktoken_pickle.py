"""Reads nanochat's tokenizer.pkl, a pickled tiktoken.Encoding, without unpickling it.

A small stack machine reads the pickle; it cannot call anything.
"""

import json
from pickletools import genops
from typing import TYPE_CHECKING, Any, cast

from crate_interp.core.errors import CheckpointError
from crate_interp.models.text.split_patterns import check_pattern
from crate_interp.models.text.tokenizer import build, safely
from crate_interp.models.text.tokenizer_rules import check_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ENCODING = ("tiktoken.core", "Encoding")
_VALUES = (
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINUNICODE8",
    "BINBYTES8",
)
_NEW = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_MARK = object()
_MAX_STEPS = 2**21
_MAX_TOKENS, _MAX_LENGTH, _MAX_TOTAL = 2**18, 256, 2**21  # the last two in bytes
_MAX_SPECIALS = 10_000


class _Encoding(dict):
    """Takes the place of a tiktoken.Encoding: the state that was pickled."""


def read_tokenizer(content: bytes) -> "PreTrainedTokenizerFast":
    """Returns the tokenizer in a pickle.

    Raises CheckpointError for a pickle that imports anything but tiktoken.core.Encoding, or
    does anything that no tiktoken.Encoding needs.
    """
    try:
        record = _run(content)
    except CheckpointError:
        raise
    except Exception:  # a damaged pickle breaks the machine in any way
        raise CheckpointError("the tokenizer's pickle is damaged.") from None
    if not isinstance(record, _Encoding):
        raise CheckpointError(
            f"the tokenizer's pickle holds a {type(record).__name__}, wanted a tiktoken.Encoding."
        )
    return _build(record)


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for step, (opcode, value, _) in enumerate(genops(content)):
        if step > _MAX_STEPS:
            raise CheckpointError("the tokenizer's pickle is longer than any tiktoken.Encoding.")
        name, argument = opcode.name, cast(Any, value)
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name in _VALUES:
            stack.append(argument)
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            _compose(name, argument, stack)
    raise CheckpointError("the tokenizer's pickle has no end.")


def _compose(name: str, argument: Any, stack: list[Any]) -> None:
    """Runs one of the few operations that combine values on the stack."""
    if name in ("GLOBAL", "STACK_GLOBAL"):
        wanted = tuple(argument.split(" ")) if name == "GLOBAL" else (stack.pop(-2), stack.pop())
        if wanted != _ENCODING:
            raise CheckpointError(
                f"the tokenizer's pickle asks for {'.'.join(map(str, wanted))}: "
                f"only {'.'.join(_ENCODING)} is admitted, nothing was run."
            )
        stack.append(_Encoding)
    elif name == "NEWOBJ" and stack[-2] is _Encoding and stack[-1] == ():
        stack[-2:] = [_Encoding()]
    elif name == "BUILD" and type(stack[-2]) is _Encoding and type(stack[-1]) is dict:
        stack[-2].update(stack.pop())
    elif name in ("SETITEMS", "SETITEM"):
        items = _after_mark(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
        # the hash of a number is no secret: thousands of keys can be made to share one
        texts = all(type(key) in (str, bytes) for key in items[::2])
        if type(stack[-1]) is not dict or len(items) % 2 or not texts:
            raise CheckpointError("the tokenizer's pickle is damaged.")
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    else:
        raise CheckpointError(
            f"the tokenizer's pickle uses {name}, which no tiktoken.Encoding needs: "
            "nothing was run."
        )


def _after_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1
    while stack[place] is not _MARK:
        place -= 1
        if place < 0:
            raise CheckpointError("the tokenizer's pickle is damaged.")
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _build(record: dict[str, Any]) -> "PreTrainedTokenizerFast":
    """Returns the byte-level BPE of ranks and a pattern.

    Of the pairs in a piece, the one whose union has the lowest rank merges first.
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
    """Returns the two tokens that merge last into a token, or None if they never do.

    One pair a token is enough. Until two neighbours merge into the whole, nothing outside has
    merged with them, so inside they became what they become when the token stands alone: no
    other pair of tokens with this union is ever side by side.
    """
    never = len(ranks)
    ends = list(range(len(token) + 1))  # of the parts
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


def _checked(record: dict[str, Any]) -> tuple[dict[bytes, int], str, dict[str, int]]:
    """Returns ranks, pattern and special tokens of an Encoding's state.

    Raises CheckpointError if one of them is missing or of another kind.
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
            "the tokenizer's pickle holds no byte-level BPE: wanted mergeable_ranks "
            f"(at most {_MAX_TOKENS} tokens of at most {_MAX_LENGTH} bytes, {_MAX_TOTAL} in all, "
            "to 0, 1, 2, ...), pat_str and special_tokens."
        )
    for name in specials:
        check_name(name)
    return ranks, pattern, specials


def _byte_alphabet() -> dict[int, str]:
    """Returns the printable character for each byte in byte-level BPE, as GPT-2 assigns them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
