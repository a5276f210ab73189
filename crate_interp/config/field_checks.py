"""What the fields of a config may be: one table for the fields of all kinds."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from crate_interp.config import families
from crate_interp.core import checks, safe_text

# A check takes a field's name and value, and returns the value in its stored form, or raises.
Check = Callable[[str, Any], Any]

_LONGEST = 1000  # characters of a label: some labels of ImageNet-21k list a dozen synonyms


def _choice(choices: Collection[str]) -> Check:
    return partial(checks.one_of, choices=choices)


def _side_or_size(name: str, value: object) -> int | tuple[int, int]:
    """Returns the length of a side as an int, or a size as (height, width)."""
    sized = isinstance(value, (list, tuple))
    return checks.size(name, value) if sized else checks.count(name, value)


def _as_tuple(name: str, value: Any, such: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name}={checks.shown(value)}: give a list{such}, or None.")
    return tuple(value)


def _bits(name: str, value: object) -> int:
    if not checks.is_int(value) or value not in (8, 16):
        raise ValueError(
            f"{name}={checks.shown(value)}: give 8, or 16 to allow 16-bit grey pictures too."
        )
    return int(value)


def _per_channel(name: str, value: object) -> tuple[Any, ...]:
    """Returns one number per channel as a tuple; a single number means a grey model."""
    such = " with a number for each channel, such as [0.5, 0.5, 0.5] or, for a grey model, [0.5]"
    return (value,) if checks.is_number(value) else _as_tuple(name, value, such)


def _class_names(name: str, value: object) -> tuple[str, ...]:
    """Returns a list of names as a tuple. Any script is allowed, control characters are not."""
    names = _as_tuple(name, value, ' of names in the order of the outputs, such as ["cat", "dog"]')
    for place, label in enumerate(names):
        if not isinstance(label, str) or len(label) > _LONGEST or not safe_text.is_harmless(label):
            raise ValueError(
                f"{name} must be names, but number {place} is {checks.shown(label)}: give one "
                f"string per class, of at most {_LONGEST} characters, without control characters."
            )
    return names


def _window_letters(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) < 1000 or set(value) - set("SL"):
        raise ValueError(f"{name}={checks.shown(value)}: give letters S (short) and L (long).")
    return value


def _untestable(name: str, value: Sequence[str]) -> tuple[str, ...]:
    return tuple(checks.one_of(name, one, families.UNTESTABLE) for one in value)


_COUNTS = (
    "d_model", "n_layers", "n_heads", "d_head", "d_mlp", "n_ctx", "channels", "d_features",
    "decoder_n_layers", "decoder_n_heads", "d_embed", "text_d_model", "text_n_layers",
    "text_n_heads", "value_heads", "special_tokens",
)  # fmt: skip
_FLAGS = (
    "output_matrix", "interpolate_pos", "grid_guessed", "norm_pix_loss", "bias", "window",
    "prepend_bos", "rms_norm", "rotations",
)  # fmt: skip
# field -> its check, whatever the kind of config
CHECKS: dict[str, Check] = {
    **dict.fromkeys(_COUNTS, checks.count),
    **dict.fromkeys(_FLAGS, checks.flag),
    **dict.fromkeys(("n_classes", "class_layers"), partial(checks.count, least=0)),
    **dict.fromkeys(("eta", "lambd", "ln_eps", "ln_final_eps"), checks.non_negative),
    **dict.fromkeys(("softcap", "rotary_base"), checks.positive),
    **dict.fromkeys(("model_name", "architecture"), checks.one_line),
    **dict.fromkeys(("image_size", "patch_size"), checks.size),
    **dict.fromkeys(("resize", "crop"), _side_or_size),
    **dict.fromkeys(("mean", "std"), _per_channel),
    "d_vocab": partial(checks.count, least=0),
    "variant": _choice(families.VARIANTS),
    "pool": _choice(families.POOLS),
    "stem": _choice(families.STEMS),
    "interpolation": _choice(families.INTERPOLATIONS),
    "transparency": _choice(families.TRANSPARENCIES),
    "tokenizer": _choice(families.TOKENIZERS),
    "subspaces": _choice(families.SUBSPACES),
    "bits": _bits,
    "labels": _class_names,
    "window_pattern": _window_letters,
    "assumed": _untestable,
}  # fmt: skip
