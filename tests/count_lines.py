"""Prints the lines of the library by room: code, docstrings, imports, comments and blanks.

Code is what is neither docstring, comment nor blank; imports are part of it. A file is small under
40 lines. Usage: python tests/count_lines.py [another checkout]
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLUMNS = ("files", "small", "lines", "code", "imports", "docstrings", "comments", "functions")
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_SILENT |= {tokenize.ENCODING, tokenize.ENDMARKER}


def counts(text: str) -> Counter[str]:
    """Returns how many lines of each kind a Python file has."""
    tree, lines = ast.parse(text), len(text.splitlines())
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    filled = {
        number
        for token in tokens
        if token.type not in _SILENT
        for number in range(token.start[0], token.end[0] + 1)
    }
    documented, imported, functions = set(), set(), 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            functions += isinstance(node, ast.FunctionDef)
            first = node.body[0] if node.body else None
            if ast.get_docstring(node) is not None and isinstance(first, ast.Expr):
                documented |= set(range(first.lineno, (first.end_lineno or 0) + 1))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imported |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    noted = {token.start[0] for token in tokens if token.type == tokenize.COMMENT} - filled
    return Counter(
        files=1, small=int(lines < 40), lines=lines, code=len(filled - documented),
        imports=len(imported), docstrings=len(documented), comments=len(noted),
        functions=functions,
    )  # fmt: skip


def by_room(root: Path) -> dict[str, Counter[str]]:
    """Returns the counts of each room of a checkout, and of crate_hooks."""
    rooms: dict[str, Counter[str]] = {}
    package = root / "crate_interp"
    for path in sorted([*package.rglob("*.py"), *(root / "hooks").rglob("*.py")]):
        inside = package in path.parents
        room = path.relative_to(package).parts[0] if inside else "crate_hooks"
        rooms.setdefault(room, Counter()).update(counts(path.read_text(encoding="utf-8")))
    return rooms


def main() -> None:
    """Prints a table with a row a room, and their sum."""
    rooms = by_room(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    rooms["all"] = sum(rooms.values(), Counter())
    print(f"{'room':<16}" + "".join(f"{name:>12}" for name in COLUMNS))
    for room, found in rooms.items():
        print(f"{room:<16}" + "".join(f"{found[name]:>12,}" for name in COLUMNS))


if __name__ == "__main__":
    main()
