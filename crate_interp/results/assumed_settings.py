"""What a result says of its model's settings that only a default gave."""

from collections.abc import Mapping
from typing import Any


def assumed(meta: Mapping[str, Any]) -> str:
    """Returns a sentence on eta and lambd if only a default gave them to a result's model, or "".

    A wrong eta or lambd gives other numbers, and no tensor of a file can tell.
    """
    config = meta.get("config", {})
    sides = {"": config} if "family" in config else {f" of {side}": config[side] for side in config}
    words = [
        f"{name}{side} {one[name]:g}"
        for side, one in sides.items()
        if isinstance(one, Mapping)
        for name in one.get("assumed", ())
        if name in ("eta", "lambd")
    ]
    return f"Assumed: {', '.join(words)}." if words else ""


def without_list(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without the list: an assumed setting and the same when given are one."""
    return {name: value for name, value in config.items() if name != "assumed"}


def near_chance(meta: Mapping[str, Any], accuracy: float) -> str:
    """Returns a warning if answers are little better than chance while settings are assumed.

    accuracy: of the model's own answers. Twice chance counts as little; with two answers that is 1.
    """
    config = meta["config"]
    choices, names = config.get("n_classes") or config.get("d_vocab") or 1, config.get("assumed")
    if not names or choices <= 2 or choices * accuracy >= 2:
        return ""
    return (
        f"The model is right in {accuracy:.1%} of its answers, by chance in {1 / choices:.1%}, and "
        f"{', '.join(names)} were assumed: load it with those of its training."
    )
