"""Refuses parquet files that would fill the memory: a few bytes may stand for billions of values.

The sizes are taken from the header of every page, because the summary at the end of a file may say
less than its pages hold. The summary is read here, because pyarrow's reader of it may end the
process (`RowGroupMetaData.column` of a column whose statistics are damaged).
"""

import io
from typing import TYPE_CHECKING, Any

from crate_interp.results.thrift import read_struct

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

# The tables in a file may take _BYTES in memory, or _PER_BYTE times the size of the file if that is
# more: a flag takes a bit in the file and eight bytes in memory. While they are read, the process
# takes about three times as much.
_BYTES, _PER_BYTE = 2**27, 64
_WIDTH = 8  # bytes of a number, or of where a text or a list lies
_LIST = 128  # bytes of a list, beside its numbers
# fields in the description of a column: its values, its bytes in the file, where its pages begin
_VALUES, _BYTES_IN_FILE, _PAGES, _DICTIONARY = 5, 7, 9, 11


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
        groups = _groups(content)
        columns = [column for _, columns in groups for column in columns]
        pages = [_pages(content, column) for column in columns]
        rows = max(meta.num_rows, sum(rows for rows, _ in groups))
        claimed = max(
            rows * meta.num_columns,
            sum(column[_VALUES] for column in columns),
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


def _groups(content: bytes) -> list[tuple[int, list[dict[int, Any]]]]:
    """Returns the number of rows and the descriptions of the columns of each group of rows.

    The description of the file ends eight bytes before the file, after four that say its length.
    """
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    try:
        found, _ = read_struct(content, begin)
        # fields: 4 of a file: groups of rows; 1 and 3 of a group: columns, rows; 3 of a column:
        # its description
        groups = [(group[3], [column[3] for column in group[1]]) for group in found[4]]
        numbers = [rows for rows, _ in groups]
        for column in (column for _, columns in groups for column in columns):
            numbers += [column[_VALUES], column[_BYTES_IN_FILE], column[_PAGES]]
            numbers += [column.setdefault(_DICTIONARY, 0)]
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError
    except (LookupError, TypeError, AttributeError):
        raise ValueError("its description is damaged") from None
    return groups


def _pages(content: bytes, column: dict[int, int]) -> tuple[int, int]:
    """Returns how many values, and how many bytes when decompressed, the pages of a column have."""
    place, values, size = column[_PAGES], 0, 0
    if not column[_VALUES]:  # pyarrow reads no page then
        return 0, 0
    if 0 < column[_DICTIONARY] < place:
        place = column[_DICTIONARY]
    end = place + column[_BYTES_IN_FILE]
    if not 0 <= place <= end <= len(content):
        raise ValueError("a column lies outside of the file")
    try:
        while place < end:
            header, place = read_struct(content, place)
            place += header[3]
            size += header[2]
            # a data page of either version has its number of values first
            data = header.get(5) or header.get(8) or {1: 0}
            values += data[1]
            if min(header[2], header[3], data[1]) < 0:
                raise ValueError("the header of a page holds a negative size")
    except (LookupError, TypeError, AttributeError):
        raise ValueError("the header of a page is damaged") from None
    return values, size


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
