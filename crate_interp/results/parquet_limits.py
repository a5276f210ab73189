"""Refuses parquet files that would fill the memory: a few bytes may stand for billions of values.

The sizes are taken from the header of every page, because the summary at the end of a file may say
less than its pages hold.
"""

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

# The tables in a file may take _BYTES in memory, or _PER_BYTE times the size of the file if that is
# more: a flag takes a bit in the file and eight bytes in memory. While they are read, the process
# takes about three times as much.
_BYTES, _PER_BYTE = 2**27, 64
_WIDTH = 8  # bytes of a number, or of where a text or a list lies
_LIST = 128  # bytes of a list, beside its numbers
_DEEPEST = 4  # structs in the header of a page


def allowed(size: int) -> int:
    """Returns how many bytes in memory the tables in a file of this size may take."""
    return max(_BYTES, _PER_BYTE * size)


def check_size(content: bytes, most: int) -> int:
    """Returns how many bytes in memory the bytes of a parquet file stand for.

    Raises ValueError if they are more than `most`, and for types of columns that no saved table
    has. May also raise an error of pyarrow, if the bytes are not a parquet file.
    """
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(io.BytesIO(content)) as file:
        meta = file.metadata
        lists, texts = _columns(file)
        groups = [meta.row_group(place) for place in range(meta.num_row_groups)]
        columns = [group.column(n) for group in groups for n in range(meta.num_columns)]
        pages = [_pages(content, column) for column in columns]
        rows = max(meta.num_rows, sum(group.num_rows for group in groups))
        claimed = max(
            rows * meta.num_columns,
            sum(column.num_values for column in columns),
            sum(values for values, _ in pages),
        )
        size = claimed * _WIDTH + rows * lists * _LIST
        if size > most:
            raise ValueError(f"it claims {claimed:,} values, more than its size allows")
        unpacked = sum(length for _, length in pages)
        if unpacked > most:
            raise ValueError(f"it claims {unpacked:,} bytes, more than its size allows")
    if texts:
        table = parquet.read_table(io.BytesIO(content), columns=texts, read_dictionary=texts)
        length = sum(_length(column) for column in table.columns)
        if size + length > most:
            raise ValueError(f"it claims {length:,} characters, more than its size allows")
        size += length
    return max(size, unpacked)


def _pages(content: bytes, column: Any) -> tuple[int, int]:
    """Returns how many values, and how many bytes when decompressed, the pages of a column have."""
    place, values, size = column.data_page_offset, 0, 0
    if not column.num_values:  # pyarrow reads no page then
        return 0, 0
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < place:
        place = column.dictionary_page_offset
    end = place + column.total_compressed_size
    if not 0 <= place <= end <= len(content):
        raise ValueError("a column lies outside of the file")
    try:
        while place < end:
            header, place = _struct(content, place)
            place += header[3]
            size += header[2]
            # a data page of either version has its number of values first
            data = header.get(5) or header.get(8) or {1: 0}
            values += data[1]
            if min(header[2], header[3], data[1]) < 0:
                raise ValueError("the header of a page holds a negative size")
    except (LookupError, TypeError):
        raise ValueError("the header of a page is damaged") from None
    return values, size


def _struct(content: bytes, place: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Reads a struct in Thrift's compact protocol, and returns its fields and the place after it.

    Texts and fractions are passed over. Raises ValueError for lists, which no page header has.
    """
    found: dict[int, Any] = {}
    field = 0
    while head := content[place]:
        place, kind, value = place + 1, head & 15, None
        if head >> 4:
            field += head >> 4
        else:
            field, place = _whole(content, place)
        if kind in (1, 2):
            value = kind == 1
        elif kind in (4, 5, 6):
            value, place = _whole(content, place)
        elif kind == 8:
            length, place = _varint(content, place)
            place += length
        elif kind == 12 and depth < _DEEPEST:
            value, place = _struct(content, place, depth + 1)
        elif kind in (3, 7):
            place += 1 if kind == 3 else 8
        else:
            raise ValueError("the header of a page is damaged")
        found[field] = value
    return found, place + 1


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = content[place]
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            return value, place
    raise ValueError("the header of a page is damaged")


def _whole(content: bytes, place: int) -> tuple[int, int]:
    value, place = _varint(content, place)
    return value >> 1 ^ -(value & 1), place


def _columns(file: Any) -> tuple[int, list[str]]:
    """Returns how many columns of a parquet file hold lists, and which hold texts or bytes.

    Raises ValueError for columns that no saved table has, such as texts in lists. A value of some
    types takes far more memory than its bytes.
    """
    from pyarrow import types

    of_text = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    of_number = (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    lists, texts = 0, []
    for column in file.schema_arrow:
        listed = types.is_list(column.type)
        nested = listed or types.is_dictionary(column.type)
        kind = column.type.value_type if nested else column.type
        if any(test(kind) for test in of_text) and not listed:
            texts.append(column.name)
        elif not any(test(kind) for test in of_number):
            raise ValueError(f"its column {column.name} holds values of type {column.type}")
        lists += listed
    return lists, texts


def _length(column: "ChunkedArray") -> int:
    """Returns how many bytes the texts of a column take, counting repeated texts each time."""
    import pyarrow.compute

    of: Any = pyarrow.compute  # pyarrow creates its functions on import, unseen by a type checker
    lengths = [
        of.sum(of.take(of.binary_length(chunk.dictionary), chunk.indices))
        for chunk in column.chunks
    ]
    return sum(length.as_py() or 0 for length in lengths)
