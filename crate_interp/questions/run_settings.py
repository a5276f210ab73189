"""Compares the settings of a run with those in its folder, field by field."""

from collections.abc import Iterator, Mapping
from typing import Any

from crate_interp.core import checks
from crate_interp.core.safe_text import plain

_ABSENT = object()


def check_same(there: Mapping[str, Any], here: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if two settings differ; the message names the fields that differ.

    there: the settings of the run in the folder `where`. here: the settings of the call.
    """
    old, new = dict(_flat(there)), dict(_flat(here))
    names = [
        name
        for name in dict.fromkeys([*new, *old])
        # an assumed setting and the same setting when given make the same numbers
        if old.get(name, _ABSENT) != new.get(name, _ABSENT) and not name.endswith("config.assumed")
    ]
    if names:
        # the settings of a run contain the settings of its result, hence the double prefix
        named = {name: name.replace("settings.settings.", "settings.") for name in names[:3]}
        shown = "; ".join(_difference(own, name, old, new) for name, own in named.items())
        more = f" (and {len(names) - 3} more)" if names[3:] else ""
        raise ValueError(
            f"{where!r} holds a run with other settings: {shown}{more}. Give the same settings to "
            "continue, another folder, or resume=False (--restart) to start over."
        )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the fields of nested dictionaries by their dotted names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _difference(shown: str, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    whose = plain(shown.removeprefix("code."), 100)
    if shown != whose and name in old and name in new and str(new[name]).startswith("sha256:"):
        return f"{whose} has changed"  # a digest says nothing to a reader
    return f"{whose} is {_value(old, name)} there and {_value(new, name)} here"


def _value(fields: Mapping[str, Any], name: str) -> str:
    return checks.shown(fields[name]) if name in fields else "absent"
