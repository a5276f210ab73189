"""CrateConfig: the numbers that make a CRATE. JSON-native; imports neither torch nor TransformerLens.

Axes and symbols used in every signature of this library (tokens are rows):

batch, pos (tokens, the CLS token included), head (K of them), d_model (d), d_head (p), d_mlp (width of the
sparse code), patch, layer. U_k: subspace bases `[head, d_model, d_head]`. D: dictionary `[d_model, d_mlp]`; a
code z (a row) reconstructs as `z @ D.T`. Z^l: the stream before layer l; Z^{l+1/2}: after MSSA. eta: step size of
the sparse step; lambd: its threshold. eps is always the epsilon of the papers, not squared.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from crate_interp.hints import did_you_mean

FAMILIES = ("crate", "crate-alpha")
VARIANTS = ("crate", "c", "n", "t", "fix", "identity")
POOLS = ("cls", "mean")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")

# What a published layout leaves unsaid, per family: width of the code over d_model, and the LayerNorm eps of the blocks.
_FAMILY_DEFAULTS = {
    "crate": {"d_mlp_ratio": 1, "ln_eps": 1e-5, "ln_final_eps": 1e-5},
    "crate-alpha": {"d_mlp_ratio": 4, "ln_eps": 1e-6, "ln_final_eps": 1e-5},
}


@dataclass(frozen=True, kw_only=True)
class CrateConfig:
    """The shape and constants of one hooked CRATE vision model.

    A field left at None takes the published default of its family: `d_head` and `d_mlp` ints, `ln_eps` and
    `ln_final_eps` floats. `image_size` and `patch_size` take an int or (h, w) and are stored as (h, w). `variant`
    chooses the output map of MSSA (crate_interp/models/attention.py). `d_features` is the width of a linear map between
    the pooled token and the classes, which the ImageNet-21k demo model has. `resize`, `crop`, `interpolation`, `mean`, `std`
    say what `model.preprocess` does; `resize` is the length of the shorter side, or (h, w). Raises ValueError naming
    the field where a value cannot be used.
    """

    family: str
    d_model: int
    n_layers: int
    n_heads: int
    variant: str = "crate"
    image_size: Any = 224
    patch_size: Any = 16
    channels: int = 3
    n_classes: int = 1000
    d_features: int | None = None
    d_head: Any = None
    d_mlp: Any = None
    eta: float = 0.1
    lambd: float = 0.1
    ln_eps: Any = None
    ln_final_eps: Any = None
    pool: str = "cls"
    interpolate_pos: bool = False
    resize: Any = None
    crop: Any = None
    interpolation: str = "bilinear"
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    labels: Sequence[str] | None = None
    model_name: str | None = None

    # What TransformerLens reads and its tools switch while a model lives. A model owns a copy of its config and
    # writes these through models.hooked.set_runtime; they are neither saved nor compared.
    device: Any = field(default=None, init=False, compare=False, repr=False)
    dtype: Any = field(default=None, init=False, compare=False, repr=False)
    use_attn_result: bool = field(default=False, init=False, compare=False, repr=False)
    use_split_qkv_input: bool = field(default=False, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _one_of(self, "family", FAMILIES)
        _one_of(self, "variant", VARIANTS)
        _one_of(self, "pool", POOLS)
        _one_of(self, "interpolation", INTERPOLATIONS)
        for name in ("d_model", "n_layers", "n_heads", "channels", "n_classes"):
            _set(self, name, _whole(name, getattr(self, name)))
        if self.d_features is not None:
            _set(self, "d_features", _whole("d_features", self.d_features))
        self._fill_defaults()
        for name in ("d_head", "d_mlp"):
            _set(self, name, _whole(name, getattr(self, name)))
        for name in ("eta", "lambd", "ln_eps", "ln_final_eps"):
            _non_negative(self, name)
        self._check_grid()
        self._check_preprocessing()

    def _fill_defaults(self) -> None:
        """Replaces None by the default of the family and stores sizes as (h, w), tables as tuples."""
        default = _FAMILY_DEFAULTS[self.family]
        if self.d_head is None:
            if self.d_model % self.n_heads:
                raise ValueError(
                    f"n_heads={self.n_heads} does not divide d_model={self.d_model}: give another n_heads, or d_head."
                )
            _set(self, "d_head", self.d_model // self.n_heads)
        if self.d_mlp is None:
            _set(self, "d_mlp", default["d_mlp_ratio"] * self.d_model)
        for name in ("ln_eps", "ln_final_eps"):
            if getattr(self, name) is None:
                _set(self, name, default[name])
        for name in ("image_size", "patch_size"):
            _set(self, name, _height_width(name, getattr(self, name)))
        for name in ("resize", "crop"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                _set(self, name, _height_width(name, value))
            elif value is not None:
                _set(self, name, _whole(name, value))
        for name in ("mean", "std", "labels"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
                raise ValueError(f"{name}={value!r}: give a list, or None.")
            _set(self, name, None if value is None else tuple(value))

    def _check_grid(self) -> None:
        (height, width), (patch_h, patch_w) = self.image_size, self.patch_size
        if height % patch_h or width % patch_w:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size} on both sides: "
                f"give an image_size such as ({height // patch_h * patch_h or patch_h}, {width // patch_w * patch_w or patch_w})."
            )
        if self.family == "crate" and self.d_mlp != self.d_model:
            raise ValueError(
                f"d_mlp={self.d_mlp} with family='crate': its dictionary is square, so d_mlp is d_model={self.d_model}."
            )
        if self.variant in ("t", "identity") and self.n_heads * self.d_head != self.d_model:
            raise ValueError(
                f"variant={self.variant!r} needs n_heads * d_head = d_model, got {self.n_heads} * {self.d_head} != {self.d_model}."
            )

    def _check_preprocessing(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both, or neither.")
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None and len(value) != self.channels:
                raise ValueError(f"{name} has {len(value)} values for channels={self.channels}: give one per channel.")
            if value is not None and not all(_is_number(x) and (x > 0 or name == "mean") for x in value):
                raise ValueError(f"{name}={value!r}: give finite numbers{', above 0' * (name == 'std')}.")
        if not isinstance(self.interpolate_pos, bool):
            raise ValueError(f"interpolate_pos={self.interpolate_pos!r}: give True or False.")
        if self.labels is not None and len(self.labels) != self.n_classes:
            raise ValueError(f"labels has {len(self.labels)} names for n_classes={self.n_classes}: give one per class.")

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-native values; `CrateConfig.from_dict` is its inverse."""
        return {name: _plain(getattr(self, name)) for name in field_names()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CrateConfig":
        """The config of `to_dict`'s values; ValueError with the nearest names where a key is unknown."""
        check_names(values)
        return cls(**values)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across, (h, w)."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def has_output_matrix(self) -> bool:
        """Whether MSSA owns an output matrix: variants crate and fix, unless one head spans the whole stream."""
        whole_stream = self.n_heads == 1 and self.d_head == self.d_model
        return self.variant in ("crate", "fix") and not whole_stream

    # The names TransformerLens' utilities read from a config.
    @property
    def n_ctx(self) -> int:
        return self.grid[0] * self.grid[1] + 1

    @property
    def d_vocab(self) -> int:
        return self.n_classes

    @property
    def d_vocab_out(self) -> int:
        return self.n_classes

    @property
    def eps(self) -> float | None:
        return self.ln_eps

    n_key_value_heads = None
    attn_only = False
    normalization_type = "LN"
    final_rms = False
    gated_mlp = False
    act_fn = "relu"
    positional_embedding_type = "standard"


def field_names() -> tuple[str, ...]:
    """The names a CrateConfig is made from, in order."""
    return tuple(f.name for f in dataclasses.fields(CrateConfig) if f.init)


def check_names(values: dict[str, Any]) -> None:
    """ValueError where a key is no CrateConfig field, with the nearest names."""
    for name in values:
        if name not in field_names():
            hint = did_you_mean(name, field_names(), f"The fields are: {', '.join(field_names())}.")
            raise ValueError(f"CrateConfig has no field {name!r}. {hint}")


def _set(cfg: CrateConfig, name: str, value: Any) -> None:
    object.__setattr__(cfg, name, value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _one_of(cfg: CrateConfig, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(cfg, name)
    if value not in choices:
        raise ValueError(
            f"{name}={value!r} is none of {', '.join(choices)}. {did_you_mean(str(value), choices)}".rstrip()
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's integers too


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e38 < value < 1e38  # NaN is not


def check_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """The same fields with counts as ints and sizes as (h, w); ValueError naming the field that is neither."""
    checked = dict(values)
    counts, optional = {"d_model", "n_layers", "n_heads", "channels", "n_classes"}, {"d_features", "d_head", "d_mlp"}
    for name in (counts | optional) & set(values):
        if values[name] is not None or name in counts:
            checked[name] = _whole(name, values[name])
    for name in {"image_size", "patch_size"} & set(values):
        checked[name] = _height_width(name, values[name])
    return checked


def _whole(name: str, value: Any) -> int:
    if not _is_int(value) or not 1 <= value < 2**31:
        raise ValueError(f"{name}={value!r}: give a whole number of at least 1.")
    return int(value)


def _non_negative(cfg: CrateConfig, name: str) -> None:
    value = getattr(cfg, name)
    if not _is_number(value) or value < 0:
        raise ValueError(f"{name}={value!r}: give a finite number of at least 0.")


def _height_width(name: str, value: Any) -> tuple[int, int]:
    pair = (value, value) if _is_int(value) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(pair) != 2 or not all(_is_int(side) and 1 <= side < 2**31 for side in pair):
        raise ValueError(f"{name}={value!r}: give an int, or (height, width).")
    return int(pair[0]), int(pair[1])
