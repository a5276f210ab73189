"""Keys of a fork, in the names of the layout that it was forked from."""

from collections.abc import Callable
from dataclasses import replace

import torch

from crate_interp.checkpoints.formats.tensor_files import Contents
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError

Rename = Callable[[str], str | None]


def renamed(contents: Contents, rename: Rename | None) -> Contents:
    """Returns contents with the keys that `rename` returns; None leaves a tensor out.

    Without a function they stay as they are. Raises CheckpointError for what is no function or no
    name, and if two keys get the same name.
    """
    if rename is None:
        return contents
    if not callable(rename):
        raise CheckpointError(
            f"rename={checks.shown(rename)}: give a function from a key to its name here, such as "
            "lambda key: key.replace('encoder.', 'transformer.')."
        )
    found: dict[str, torch.Tensor] = {}
    of: dict[str, str] = {}
    for key, tensor in contents.tensors.items():
        name = rename(key)
        if name is None:
            continue
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"rename({key!r}) is {checks.shown(name)}: return a name, or None."
            )
        if name in found:
            raise CheckpointError(f"rename gives {of[name]!r} and {key!r} one name, {name!r}.")
        found[name], of[name] = tensor, key
    return replace(contents, tensors=found)
