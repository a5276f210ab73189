"""Tables as text."""

from crate_interp.core.safe_text import plain


def as_text(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table as text with aligned columns; long cells are cut to one line."""
    cells = [[plain(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    return "\n".join("  ".join(line) for line in lines)
