"""Reads `rename`, which gives the keys of a fork the names that are published."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError

Rename = Callable[[str], str | None]
_FORM = "such as 's/^net\\.//' or 's/encoder/transformer/g'"


def as_function(rename: Rename | str | None) -> Rename | None:
    """Returns `rename` as a function from a key to its published name, or None for None.

    rename: such a function, or a text s/PATTERN/REPLACEMENT/ as in sed: PATTERN is a regular
    expression of Python, a g at the end replaces all matches instead of the first, and any other
    character may take the place of the slash. A key of which nothing remains is left out. Raises
    CheckpointError for anything else.
    """
    if isinstance(rename, str):
        return _substitution(rename)
    if rename is not None and not callable(rename):
        raise CheckpointError(
            f"rename={checks.shown(rename)}: give a function from a key to the published key, such "
            "as lambda key: key.replace('encoder.', 'transformer.'), or a text, "
            f"{_FORM}."
        )
    return rename


def _substitution(text: str) -> Rename:
    sign = text[1:2]
    parts = re.split(rf"(?<!\\){re.escape(sign)}", text) if sign else []
    usual = bool(sign) and not sign.isalnum() and sign not in "\\ "
    if not usual or len(parts) != 4 or parts[0] != "s" or parts[3] not in ("", "g") or not parts[1]:
        raise CheckpointError(f"rename={text!r}: write s/PATTERN/REPLACEMENT/, {_FORM}.")
    pattern, new = (part.replace("\\" + sign, sign) for part in parts[1:3])
    count = 0 if parts[3] else 1
    try:
        found = re.compile(pattern)
        found.sub(new, "")  # raises for a group that `new` names and the pattern lacks
    except (re.error, IndexError) as error:
        raise CheckpointError(
            f"rename={text!r}: {pattern!r} and {new!r} are no regular expression and its "
            f"replacement: {error}. Write s/PATTERN/REPLACEMENT/, {_FORM}."
        ) from None
    return lambda key: found.sub(new, key, count=count) or None


def renamed(tensors: Mapping[str, Any], rename: Rename | None) -> dict[str, Any]:
    """Returns the tensors under the names that `rename` returns.

    A tensor is left out if `rename` returns None for its key. Raises CheckpointError if `rename`
    returns something other than a name or None, or gives two keys the same name.
    """
    if rename is None:
        return dict(tensors)
    named: dict[str, Any] = {}
    key_of: dict[str, str] = {}
    for key, tensor in tensors.items():
        name = rename(key)
        if name is None:
            continue
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"rename({key!r}) is {checks.shown(name)}: "
                "return a name, or None to leave the tensor out."
            )
        if name in named:
            raise CheckpointError(
                f"rename gives {key_of[name]!r} and {key!r} the same name, {name!r}."
            )
        named[name], key_of[name] = tensor, key
    return named
