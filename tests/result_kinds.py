"""Every kind of result of the library, found by looking."""

import pkgutil
from functools import cache
from importlib import import_module

import crate_interp
from crate_interp.results.kinds import Kind
from crate_interp.results.result import Result


@cache
def result_kinds():
    """Returns each kind by its name: a Kind where it is measured in chunks, else of its class."""
    modules = [
        import_module(module.name)
        for module in pkgutil.walk_packages(crate_interp.__path__, "crate_interp.")
        if not module.name.endswith("__main__")
    ]
    values = [value for module in modules for value in vars(module).values()]
    classes = [one for one in values if isinstance(one, type) and issubclass(one, Result)]
    kinds = {one.KIND: Kind(one) for one in classes if one.KIND}
    return kinds | {one.name: one for one in values if isinstance(one, Kind)}
