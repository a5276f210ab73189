"""Reads what Thrift's compact protocol wrote, which is what parquet files describe themselves in.

https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from typing import Any

_DEEPEST = 12  # structs and lists in one another


def read_struct(content: bytes, place: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Returns the fields of a struct, by number, and the place after it.

    Texts and fractions are passed over, as None. Raises ValueError for maps, which parquet files
    have none of, and IndexError where the bytes end too early.
    """
    found: dict[int, Any] = {}
    field = 0
    while head := content[place]:
        place, kind = place + 1, head & 15
        if head >> 4:
            field += head >> 4
        else:
            field, place = _signed(content, place)
        if kind in (1, 2):
            found[field] = kind == 1
        else:
            found[field], place = _value(content, place, kind, depth + 1)
    return found, place + 1


def _value(content: bytes, place: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth <= _DEEPEST:
        if kind in (4, 5, 6):
            return _signed(content, place)
        if kind == 8:
            length, place = _unsigned(content, place)
            return None, place + length
        if kind in (9, 10):
            return _list(content, place, depth)
        if kind == 12:
            return read_struct(content, place, depth)
        if kind in (1, 2, 3, 7):
            return None, place + (8 if kind == 7 else 1)
    raise ValueError("its description is damaged")


def _list(content: bytes, place: int, depth: int) -> tuple[list[Any], int]:
    head = content[place]
    length, place = head >> 4, place + 1
    if length == 15:
        length, place = _unsigned(content, place)
    if length > len(content) - place:  # each value takes a byte at least
        raise ValueError("its description is damaged")
    values = []
    for _ in range(length):
        value, place = _value(content, place, head & 15, depth + 1)
        values.append(value)
    return values, place


def _unsigned(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = content[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place
    raise ValueError("its description is damaged")


def _signed(content: bytes, place: int) -> tuple[int, int]:
    value, place = _unsigned(content, place)
    return value >> 1 ^ -(value & 1), place
