"""Fields, checks, defaults and JSON that configs of all kinds share.

A config holds plain values, so that it can be written as JSON. Nothing here imports torch,
NumPy or TransformerLens.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, TypeVar

from crate_interp.config import families
from crate_interp.config.families import FAMILIES, SUBSPACES, UNTESTABLE, Facts
from crate_interp.core import checks, safe_text

if TYPE_CHECKING:
    T = TypeVar("T")
    Filled = Annotated[T, "None is replaced by a default"]
    Size = tuple[int, int]  # (h, w)
    SideOrSize = int | tuple[int, int]
else:
    Filled = Optional
    Size = SideOrSize = int | tuple[int, int] | list[int]


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
        raise ValueError(f"{name}={checks.quote(value)}: give a list such as {such}, or None.")
    return tuple(value)


def _bits(name: str, value: object) -> int:
    if not checks.is_int(value) or value not in (8, 16):
        raise ValueError(f"{name}={checks.quote(value)}: give 8, or 16 for 16-bit grey pictures.")
    return int(value)


def _per_channel(name: str, value: Any) -> tuple[Any, ...]:
    """Returns one number per channel as a tuple; a single number means a grey model."""
    numbers = (value,) if checks.is_number(value) else _as_tuple(name, value)
    if not all(checks.is_number(one) and (one > 0 or name == "mean") for one in numbers):
        raise ValueError(f"{name}={checks.quote(value)}: give finite numbers; std is above 0.")
    return numbers


def _class_names(name: str, value: object) -> tuple[str, ...]:
    """Returns a list of names as a tuple. Any script is allowed, control characters are not."""
    names = _as_tuple(name, value)
    for label in names:
        if not isinstance(label, str) or len(label) > _LONGEST or not safe_text.is_harmless(label):
            shown = checks.quote(label)
            raise ValueError(f"{name}: {shown} is not a name of up to {_LONGEST} plain characters.")
    return names


def _window_letters(name: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) < 1000 or set(value) - set("SL"):
        raise ValueError(f"{name}={checks.quote(value)}: give letters S (short) and L (long).")
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
    "attention_mask": _one_of("meant", "published", "causal"),
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


DEFAULT: Any = None  # the value of a Filled field that was not given

# In the official code of these families, MSSA has no output matrix if one head spans the stream.
_NO_MATRIX_FOR_ONE_HEAD = ("crate", "crate-alpha", "crate-mae")


def fact(name: str, doc: str) -> Any:
    """Returns a property from the families' table; False if the table lacks it."""
    return property(lambda cfg: cfg.facts.get(name, False), doc=doc)


@dataclass(frozen=True, kw_only=True)
class CrateConfig:
    """The shape and constants of one hooked model.

    `CrateConfig(family=...)` makes a config of the family's kind: a VisionConfig, MAEConfig,
    TextConfig or CLIPConfig (crate_interp/config/). Each of these has the fields below and further
    fields.

    These fields, if left at None, take the published default of the family: `sparse_step`, `lambd`,
    `ln_eps`, `ln_final_eps`, and the integers `d_head` and `d_mlp`. `variant` chooses the output
    map of MSSA (models/layers/attention.py), `sparse_step` the step that follows MSSA
    (models/layers/sparse_steps.py). `output_matrix` says whether MSSA has an output matrix. None
    follows the official code for images: MSSA has a matrix unless one head spans the whole stream.
    `n_ctx` and `d_vocab` are required for text; for images they follow from the other fields.
    `assumed` names the fields that no source of a checkpoint gave and no tensor can contradict, so
    that their published defaults may be wrong.

    Raises ValueError, naming the field, for a value that cannot be used and for a field that
    models of this family do not have.
    """

    kind: ClassVar[str]  # which forward the model has: "vision", "mae", "text" or "clip"
    # kind -> class, with "bridged " before the kind for networks other than CRATE; filled in
    # config/__init__.py
    classes: ClassVar[dict[str, type["CrateConfig"]]]
    # fields that are computed from others and are not saved
    derived: ClassVar[tuple[str, ...]] = ()
    family: str
    d_model: int
    n_layers: int
    n_heads: int
    variant: Filled[str] = DEFAULT
    output_matrix: Filled[bool] = DEFAULT
    sparse_step: Filled[str] = DEFAULT
    d_head: Filled[int] = DEFAULT
    d_mlp: Filled[int] = DEFAULT
    eta: float = 0.1
    lambd: Filled[float] = DEFAULT
    ln_eps: Filled[float] = DEFAULT
    ln_final_eps: Filled[float] = DEFAULT
    n_ctx: Filled[int] = DEFAULT
    d_vocab: Filled[int] = DEFAULT
    model_name: str | None = None
    assumed: Sequence[str] = field(default=(), compare=False)

    # TransformerLens reads these fields, and its tools change them after a model is made. A model
    # owns a copy of its config and writes these fields there with set_runtime
    # (models/hook_points.py). The fields are neither saved nor compared.
    use_attn_result: bool = field(default=False, init=False, compare=False, repr=False)
    use_split_qkv_input: bool = field(default=False, init=False, compare=False, repr=False)
    use_attn_in: bool = field(default=False, init=False, compare=False, repr=False)
    use_hook_mlp_in: bool = field(default=False, init=False, compare=False, repr=False)

    # where a model's config reads device and dtype; set by `follow` (models/hook_points.py)
    _runtime: ClassVar[Any] = None

    def __new__(cls, **values: Any) -> Any:
        """Returns a config of the class that belongs to its family."""
        if cls is CrateConfig:
            family = checks.one_of("family", values.get("family"), FAMILIES)
            cls = CrateConfig.classes[class_name(FAMILIES[family])]
        check_names(values)
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if missing := [f"{name}=" for name in needed if values and name not in values]:
            raise ValueError(f"CrateConfig lacks {', '.join(missing)}: give them.")
        for name in values.keys() - cls.__dataclass_fields__.keys():
            family = checks.quote(values.get("family"))
            raise ValueError(f"{name}: models of family {family} have no such field; leave it out.")
        return object.__new__(cls)

    if TYPE_CHECKING:  # so that type checkers accept the fields of every kind in CrateConfig(...)

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        self._set(**self.checked_values(values))
        if not isinstance(self, CrateConfig.classes[class_name(self.facts)]):
            raise ValueError(f"family={self.family!r} needs CrateConfig(family=...).")
        self._set(**{k: self.facts.get(k) for k in values if getattr(self, k) is None})
        # defaults that are computed from other fields
        square = self.sparse_step in families.SQUARE_STEPS
        ratio = 1 if square else self.facts["d_mlp_ratio"]
        self._set(variant=self.variant or "crate", d_mlp=self.d_mlp or self.d_model * ratio)
        if self.d_head is None:
            self._set(d_head=self.share("n_heads", "d_model"))
        if self.output_matrix is None:
            spans = self.n_heads == 1 and self.d_head == self.d_model
            left_out = spans and self.family in _NO_MATRIX_FOR_ONE_HEAD
            self._set(output_matrix=self.variant in ("crate", "fix") and not left_out)
        steps = (self.facts["sparse_step"], *families.OTHER_STEPS.get(self.family, ()))
        checks.one_of("sparse_step", self.sparse_step, steps)
        if square and self.d_mlp != self.d_model:
            raise ValueError(f"d_mlp={self.d_mlp}: the dictionary is square; leave d_mlp out.")
        if self.variant in ("t", "identity") and self.n_heads * self.d_head != self.d_model:
            sizes = f"{self.n_heads} * {self.d_head} != {self.d_model}"
            raise ValueError(f"variant={self.variant!r}: n_heads * d_head = d_model, not {sizes}.")
        if self.output_matrix and self.variant not in ("crate", "fix"):
            raise ValueError(
                f"variant={self.variant!r} has no output matrix: leave out output_matrix."
            )
        if self.family not in families.WITH_VARIANTS:
            checks.one_of("variant", self.variant, ("crate",))
        self._check_kind()

    @classmethod
    def checked_values(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the given values of fields in the form that a config stores.

        Counts become ints, sizes become (h, w), lists become tuples. None is kept if the field may
        be None. Raises ValueError, naming the field, for a value that cannot be used.
        """
        fields = cls.__dataclass_fields__
        return {
            name: None
            if value is None and fields[name].default is None
            else FIELDS[name](name, value)
            for name, value in values.items()
        }

    def _set(self, **values: Any) -> None:
        """Writes fields of this frozen config while it is being made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def set_model_name(self, name: str) -> None:
        """Sets the name of a model without a name, in the model's own frozen config."""
        self._set(model_name=checks.one_line("model_name", name))

    def assume(self, facts: Mapping[str, Any]) -> None:
        """Lists in `assumed` every setting of this model that only a default has given.

        facts: the fields that the caller, a config (with its own `assumed`) or the tensors gave.
        """
        without = () if self.sparse_step in families.STEPS_WITH_ETA else ("eta", "lambd")
        without += () if self.family in families.WITH_VARIANTS else ("variant",)
        without += () if self.rotary else ("window",)
        known = set(facts) - set(facts.get("assumed", ()))
        names = [name for name in UNTESTABLE if name in self.__dataclass_fields__]
        self._set(assumed=tuple(name for name in names if name not in (*known, *without)))

    def share(self, heads: str, width: str) -> int:
        """Returns the width of one head.

        heads, width: the names of two fields, such as "n_heads" and "d_model". Raises ValueError
        unless the number of heads divides the width.
        """
        n, d = getattr(self, heads), getattr(self, width)
        if d % n:
            raise ValueError(f"{heads}={n} must divide {width}={d}: change it, or give d_head.")
        return d // n

    def _check_kind(self) -> None:
        """Checks fields that only one kind of config has."""

    def check_given(self, *names: str) -> None:
        """Raises ValueError if one of these fields is None or 0."""
        for name in names:
            if not getattr(self, name):
                raise ValueError(f"a model of family {self.family!r} needs {name}: give {name}=...")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON values; `CrateConfig.from_dict` is the inverse."""
        return {
            name: list(value) if isinstance(value := getattr(self, name), tuple) else value
            for name in FIELDS
            if name in self.__dataclass_fields__
            and name not in self.derived
            and (name != "assumed" or self.assumed)
        }

    def _repr_html_(self) -> str:
        from crate_interp.viz.page import render

        values = {name: getattr(self, name, None) for name in FIELDS if name != "assumed"}
        values = {name: value for name, value in values.items() if value is not None}
        return render("cells/config.html", values=values, cfg=self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CrateConfig":
        """Returns the config whose fields `to_dict` returned.

        Raises ValueError, with the nearest names, if a key is not a field.
        """
        return cls(**values)

    @property
    def facts(self) -> Facts:
        """The properties that set the family apart (crate_interp/config/families.py)."""
        return FAMILIES[self.family]

    @property
    def residual(self) -> bool:
        """Whether the sparse step's output is added to the stream or (False) replaces it."""
        return self.facts["residual"] and self.sparse_step not in families.SQUARE_STEPS

    @property
    def tied(self) -> bool:
        """Whether all that attention reads of a token is one code, Z U_k."""
        return self.facts["attention"] != "self"

    @property
    def code_bias(self) -> bool:
        """Whether the map to the codes has a bias."""
        bias = self.facts.get("code_bias", False)
        return self.bias if bias is None else bias

    layer_scale = fact("layer_scale", "Whether what a layer adds is scaled, feature by feature.")
    causal = fact("causal", "Whether a token sees only itself and the tokens before it.")

    @property
    def norm_bias(self) -> bool:
        """Whether the LayerNorms have a bias; RMS norms never have one."""
        return self.facts["output_bias"] is not None or bool(self.output_bias)

    @property
    def attn_only(self) -> bool:
        """Whether a layer is attention alone, under TransformerLens' name."""
        return self.sparse_step == "none"

    @property
    def has_mlp(self) -> bool:
        """Whether an MLP stands where CRATE has its sparse step."""
        return self.sparse_step.startswith("mlp")

    @property
    def rotary(self) -> bool:
        """Whether positions enter as rotations of queries and keys."""
        return self.family == "nanochat-crate"

    @property
    def output_bias(self) -> bool:
        """Whether the output map of attention has a bias."""
        return bool(self.facts["output_bias"])

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy of this config; the copy belongs to no model."""
        return {name: value for name, value in self.__dict__.items() if name != "_runtime"}

    # The names under which TransformerLens' utilities read a config.
    @property
    def device(self) -> Any:
        """The torch.device of the model that owns this config; None if no model does."""
        return self._runtime and self._runtime.device

    @property
    def dtype(self) -> Any:
        """The torch.dtype of the model that owns this config; None if no model does."""
        return self._runtime and self._runtime.dtype

    @property
    def normalization_type(self) -> str:
        """The kind of norm: "LN" or "RMS"."""
        return self.facts["norm"]

    @property
    def positional_embedding_type(self) -> str:
        """How positions enter: "rotary" turns queries and keys, "standard" adds to the stream."""
        return "rotary" if self.rotary else "standard"

    d_vocab_out = property(lambda self: self.d_vocab)  # how many tokens have a logit
    eps = property(lambda self: self.ln_eps)
    final_rms = property(lambda self: self.normalization_type == "RMS")
    # whether BOS is put before texts
    default_prepend_bos = property(lambda self: bool(getattr(self, "prepend_bos", False)))
    n_key_value_heads = None
    parallel_attn_mlp = False
    n_devices = 1
    gated_mlp = False
    act_fn = "relu"


def class_name(facts: Facts) -> str:
    """Returns the key of a family's config class in CrateConfig.classes."""
    return f"bridged {facts['kind']}" if facts.get("bridged") else facts["kind"]


def check_names(values: Mapping[str, Any]) -> None:
    """Raises ValueError, with the nearest names, for a key that no kind of config has."""
    for name in values:
        if name not in FIELDS:
            hint = checks.did_you_mean(name, FIELDS, f"The fields are: {', '.join(FIELDS)}.")
            raise ValueError(f"CrateConfig has no field {checks.quote(name)}. {hint}")
