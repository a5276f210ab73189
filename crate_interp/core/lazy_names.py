"""Public names of a package that are imported when they are first used."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy(package: str, file: str) -> tuple[dict[str, str], Callable[[str], Any], Callable]:
    """Returns where a package's names are, and its `__getattr__` and `__dir__`.

    The names are those that the package's file imports for type checkers, under TYPE_CHECKING.
    """
    parts = ast.parse(Path(file).read_text(encoding="utf-8")).body
    (block,) = (part for part in parts if isinstance(part, ast.If))
    module_of: dict[str, str] = {}
    modules: set[str] = set()  # names of modules
    for node in block.body:
        for alias in getattr(node, "names", ()):
            name, where = alias.asname or alias.name, getattr(node, "module", package)
            if where == package:  # `import a.b as name`, or a module of the package itself
                modules.add(name)
                inside = isinstance(node, ast.ImportFrom)
                where = f"{package}.{alias.name}" if inside else alias.name
            module_of[name] = where

    def load(name: str) -> Any:
        if name not in module_of:
            known = ", ".join(sorted(module_of))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {known}")
        import_module("crate_interp.core.run_options")  # before others load tqdm, which may warn
        loaded = import_module(module_of[name])
        return loaded if name in modules else getattr(loaded, name)

    return module_of, load, lambda: sorted(module_of)
