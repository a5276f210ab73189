"""Runs the README's Python lines in the folder at hand, where nothing but the package is installed.

Usage: python tests/readme_lines.py README.md
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    if find_spec("pytest") is not None:
        raise SystemExit("pytest is installed: this is no environment of the package alone.")
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(lines, "README.md", "exec"), {"__name__": "readme"})
    if Path("explore.html").stat().st_size < 5000:
        raise SystemExit("explore.html is empty")
