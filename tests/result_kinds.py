"""Every kind of result of the library, found by looking."""

import pkgutil
from functools import cache
from importlib import import_module

import crate_interp
from crate_interp.results.result import Result


@cache
def result_kinds():
    """Returns the class of each kind of result, by the name of the kind."""
    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(crate_interp.__path__, "crate_interp.")
        if not module.name.endswith("__main__")
    ]
    values = [value for module in modules for value in vars(module).values()]
    classes = [one for one in values if isinstance(one, type) and issubclass(one, Result)]
    return {one.KIND: one for one in classes if one.KIND}
