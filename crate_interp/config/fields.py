"""What the fields of a config may be: one table for the fields of all kinds."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from crate_interp.config.families import FAMILIES, SUBSPACES, UNTESTABLE
from crate_interp.core import checks, safe_text

# A check takes a field's name and value, and returns the value in its stored form, or raises.
Check = Callable[[str, Any], Any]

_LONGEST = 1000  # characters of a label: some labels of ImageNet-21k list a dozen synonyms


def _one_of(*choices: str) -> Check:
    return partial(checks.one_of, choices=choices)


def _side_or_size(name: str, value: object) -> int | tuple[int, int]:
    """Returns the length of a side as an int, or a size as (height, width)."""
    sized = isinstance(value, (list, tuple))
    return checks.size(name, value) if sized else checks.count(name, value)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        such = "[0.5, 0.5, 0.5]" if name in ("mean", "std") else '["cat", "dog"]'
        raise ValueError(f"{name}={checks.shown(value)}: give a list such as {such}, or None.")
    return tuple(value)


def _bits(name: str, value: object) -> int:
    if not checks.is_int(value) or value not in (8, 16):
        raise ValueError(f"{name}={checks.shown(value)}: give 8, or 16 for 16-bit grey pictures.")
    return int(value)


def _per_channel(name: str, value: Any) -> tuple[Any, ...]:
    """Returns one number per channel as a tuple; a single number means a grey model."""
    numbers = (value,) if checks.is_number(value) else _as_tuple(name, value)
    if not all(checks.is_number(one) and (one > 0 or name == "mean") for one in numbers):
        raise ValueError(f"{name}={checks.shown(value)}: give finite numbers; std is above 0.")
    return numbers


def _class_names(name: str, value: object) -> tuple[str, ...]:
    """Returns a list of names as a tuple. Any script is allowed, control characters are not."""
    names = _as_tuple(name, value)
    for label in names:
        if not isinstance(label, str) or len(label) > _LONGEST or not safe_text.is_harmless(label):
            shown = checks.shown(label)
            raise ValueError(f"{name}: {shown} is no name of at most {_LONGEST} plain characters.")
    return names


def _window_letters(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) < 1000 or set(value) - set("SL"):
        raise ValueError(f"{name}={checks.shown(value)}: give letters S (short) and L (long).")
    return value


def _assumed(name: str, value: object) -> tuple[str, ...]:
    return tuple(checks.one_of(name, one, UNTESTABLE) for one in _as_tuple(name, value))


_count, _flag, _number, _from_0 = (
    checks.count, checks.flag, checks.non_negative, partial(checks.count, least=0),
)  # fmt: skip
# field -> its check, whatever the kind of config, in the order of config.json
FIELDS: dict[str, Check] = {
    "family": _one_of(*FAMILIES), "d_model": _count, "n_layers": _count, "n_heads": _count,
    "variant": _one_of("crate", "c", "n", "t", "fix", "identity"), "output_matrix": _flag,
    "sparse_step": checks.one_line, "image_size": checks.size, "patch_size": checks.size,
    "channels": _count, "n_classes": _from_0, "d_features": _count, "d_head": _count,
    "d_mlp": _count, "eta": _number, "lambd": _number, "ln_eps": _number, "ln_final_eps": _number,
    "n_ctx": _count, "d_vocab": _from_0, "bias": _flag, "window": _flag,
    "window_pattern": _window_letters, "softcap": checks.positive, "rotary_base": checks.positive,
    "tokenizer": _one_of("gpt2", "bert", "file"), "prepend_bos": _flag,
    "decoder_n_layers": _count, "decoder_n_heads": _count, "norm_pix_loss": _flag,
    "d_embed": _count, "text_d_model": _count, "text_n_layers": _count, "text_n_heads": _count,
    "pool": _one_of("cls", "mean"), "stem": _one_of("linear", "conv"), "class_layers": _from_0,
    "interpolate_pos": _flag, "resize": _side_or_size, "crop": _side_or_size,
    "interpolation": _one_of("nearest", "bilinear", "bicubic", "lanczos"),
    "transparency": _one_of("drop", "white"), "bits": _bits, "mean": _per_channel,
    "std": _per_channel, "labels": _class_names, "model_name": checks.one_line,
    "architecture": checks.one_line, "subspaces": _one_of(*SUBSPACES), "value_heads": _count,
    "special_tokens": _count, "rms_norm": _flag, "rotations": _flag, "grid_guessed": _flag,
    "assumed": _assumed,
}  # fmt: skip
