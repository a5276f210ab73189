"""Reads nanochat's tokenizer.pkl, a pickled tiktoken.Encoding, without unpickling it.

A small stack machine reads the pickle; it cannot call anything.
"""

from pickletools import genops
from typing import Any, cast

from crate_interp.errors import CheckpointError
from crate_interp.models.tokenizer import Tokenizer

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
_MAX_TOKENS, _MAX_LENGTH = 2**20, 512


class _Encoding(dict):
    """Takes the place of a tiktoken.Encoding: the state that was pickled."""


def read_tokenizer(content: bytes) -> Tokenizer:
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
    for opcode, value, _ in genops(content):
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
        if type(stack[-1]) is not dict or len(items) % 2:
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


def _build(record: dict[str, Any]) -> Tokenizer:
    """Returns the byte-level BPE of ranks and a pattern.

    Of the pairs in a piece, the one whose union has the lowest rank merges first.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    ranks, pattern, specials = _checked(record)
    text = _byte_alphabet()
    spelled = {token: "".join(text[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in known]
    core = Core(
        models.BPE(vocab={spelled[token]: rank for token, rank in ranks.items()}, merges=merges)
    )
    try:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception:
        raise CheckpointError(
            f"the tokenizer's pattern {pattern!r} is no regular expression."
        ) from None
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    return Tokenizer(core=core, specials=dict(specials))


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
            isinstance(token, bytes) and 0 < len(token) <= _MAX_LENGTH and type(rank) is int
            for token, rank in ranks.items()
        )
        and all(bytes([byte]) in ranks for byte in range(256))
        and sorted(ranks.values()) == list(range(len(ranks)))
        and isinstance(pattern, str)
        and isinstance(specials, dict)
        and all(
            isinstance(name, str) and type(index) is int and index >= 0
            for name, index in specials.items()
        )
    )
    if not right:
        raise CheckpointError(
            "the tokenizer's pickle holds no byte-level BPE: wanted mergeable_ranks "
            "(bytes to 0, 1, 2, ...), pat_str and special_tokens."
        )
    return ranks, pattern, specials


def _byte_alphabet() -> dict[int, str]:
    """Returns the printable character for each byte in byte-level BPE, as GPT-2 assigns them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
