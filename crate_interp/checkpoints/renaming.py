"""Keys of a fork, in the names of the layout that it was forked from."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crate_interp import checks
from crate_interp.checkpoints.tensors import Contents, model_args, read_file, state_dict_of
from crate_interp.errors import CheckpointError

Rename = Callable[[str], str | None]


def renamed(source: Any, rename: Rename) -> Contents:
    """Returns what a file, state dict or module holds, with the keys that `rename` returns.

    None leaves a tensor out. Raises CheckpointError for another source, for what is no name, and if
    two keys get the same name.
    """
    if not callable(rename):
        raise CheckpointError(
            f"rename={checks.shown(rename)}: give a function from a key to its name here, such as "
            "lambda key: key.replace('encoder.', 'transformer.')."
        )
    if isinstance(source, (Mapping, torch.nn.Module)):
        contents = Contents(state_dict_of(source, "the state dict"), model_args(source))
    elif Path(source).is_file():
        contents = read_file(Path(source))
    else:
        raise CheckpointError(
            f"rename= is for a weight file or a state dict, and {str(source)!r} is neither."
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
