"""Tables as text."""


def as_text(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table with aligned columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        for row in [header, *rows]
    ]
    return "\n".join("  ".join(line) for line in lines)
