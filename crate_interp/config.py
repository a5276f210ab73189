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
from typing import Any

from crate_interp import checks
from crate_interp.families import FAMILIES, FIELDS_OF, OTHER_STEPS

VARIANTS = ("crate", "c", "n", "t", "fix", "identity")
POOLS = ("cls", "mean")
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")

TOKENIZERS = ("gpt2", "bert", "file")
_COUNTS = ("d_model", "n_layers", "n_heads", "channels", "n_classes")
_OPTIONAL_COUNTS = (
    "d_features", "d_head", "d_mlp", "n_ctx", "d_vocab", "d_embed", "text_d_model", "text_n_layers", "text_n_heads",
    "decoder_n_layers", "decoder_n_heads",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CrateConfig:
    """The shape and constants of one hooked model.

    A field left at None takes the published default of its family: `sparse_step`, `lambd`, `ln_eps`, `ln_final_eps`,
    and the ints `d_head`, `d_mlp`, `decoder_n_layers`, `decoder_n_heads`. `variant` chooses the output map of MSSA
    (crate_interp/models/attention.py), `sparse_step` what follows it (models/sparsify.py). `output_matrix`: whether MSSA
    owns an output matrix; None: as the torch code has it, which leaves it out where one head spans the whole stream.

    Images: `image_size` and `patch_size` take an int or (h, w) and are stored as (h, w). `resize`, `crop`,
    `interpolation`, `mean`, `std` say what `model.preprocess` does; `resize` is the length of the shorter side, or (h, w).
    `d_features` is the width of a linear map between the pooled token and the classes (the ImageNet-21k demo model).
    Text: `n_ctx` and `d_vocab` are required. `bias` (gpt-baseline): whether its Linears and LayerNorms have one.
    `window`, `window_pattern`, `softcap`, `rotary_base` (nanochat-crate). `tokenizer`: "gpt2", "bert", or "file" where it
    lies beside the weights; `prepend_bos`: whether its separator comes first.
    CLIP: `d_embed`, the width both towers end in, and `text_d_model`, `text_n_layers`,
    `text_n_heads`; `n_ctx` and `d_vocab` are those of its text. MAE: `norm_pix_loss` normalises the target patch by patch.

    Raises ValueError naming the field where a value cannot be used, or belongs to another family.
    """

    family: str
    d_model: int
    n_layers: int
    n_heads: int
    variant: str = "crate"
    output_matrix: Any = None
    sparse_step: Any = None
    image_size: Any = 224
    patch_size: Any = 16
    channels: int = 3
    n_classes: int = 1000
    d_features: int | None = None
    d_head: Any = None
    d_mlp: Any = None
    eta: float = 0.1
    lambd: Any = None
    ln_eps: Any = None
    ln_final_eps: Any = None
    n_ctx: Any = None
    d_vocab: Any = None
    bias: Any = False
    window: Any = False
    window_pattern: Any = "L"
    softcap: Any = None
    rotary_base: Any = 10000.0
    tokenizer: Any = None
    prepend_bos: Any = None
    decoder_n_layers: Any = None
    decoder_n_heads: Any = None
    norm_pix_loss: Any = False
    d_embed: Any = None
    text_d_model: Any = None
    text_n_layers: Any = None
    text_n_heads: Any = None
    pool: str = "cls"
    interpolate_pos: Any = False
    resize: Any = None
    crop: Any = None
    interpolation: str = "bilinear"
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    labels: Sequence[Any] | None = None
    model_name: str | None = None

    # What TransformerLens reads and its tools switch while a model lives. A model owns a copy of its config and
    # writes these through models.hooked.set_runtime; they are neither saved nor compared.
    device: Any = field(default=None, init=False, compare=False, repr=False)
    dtype: Any = field(default=None, init=False, compare=False, repr=False)
    use_attn_result: bool = field(default=False, init=False, compare=False, repr=False)
    use_split_qkv_input: bool = field(default=False, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _one_of(self, "family", tuple(FAMILIES))
        _one_of(self, "variant", VARIANTS)
        _one_of(self, "pool", POOLS)
        _one_of(self, "interpolation", INTERPOLATIONS)
        self._check_fields()
        own = set(field_names()) - foreign_fields(self.family)
        for name, value in check_sizes({name: getattr(self, name) for name in own}).items():
            _set(self, name, value)
        self._fill_defaults()
        self._check_steps()
        for name in ("eta", "lambd", "ln_eps", "ln_final_eps"):
            _non_negative(self, name)
        if self.kind != "text":
            self._check_grid()
            self._check_preprocessing()
        self._check_text()

    def _check_fields(self) -> None:
        """ValueError for a field that only models of another kind have, set to something else than its default."""
        for name in foreign_fields(self.family):
            if getattr(self, name) != _DEFAULTS[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: models of family {self.family!r} have no {name}."
                )
        for name in (
            "interpolate_pos",
            "bias",
            "window",
            "norm_pix_loss",
            *(["output_matrix"] if self.output_matrix is not None else []),
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: give True or False.")

    def _fill_defaults(self) -> None:
        """Replaces None by the default of the family, and stores tables as tuples."""
        facts = FAMILIES[self.family]
        if self.d_head is None:
            _set(self, "d_head", _share(self, "n_heads", "d_model"))
        for name in ("sparse_step", "lambd", "ln_eps", "ln_final_eps", "prepend_bos", "softcap"):
            if getattr(self, name) is None:
                _set(self, name, facts.get(name))
        if self.d_mlp is None:
            _set(
                self,
                "d_mlp",
                self.d_model * (1 if self.sparse_step == "ista" else facts["d_mlp_ratio"]),
            )
        for name in ("resize", "crop"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                _set(self, name, checks.size(name, value))
            elif value is not None:
                _set(self, name, checks.count(name, value))
        for name in ("mean", "std", "labels"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
                raise ValueError(f"{name}={value!r}: give a list, or None.")
            _set(self, name, None if value is None else tuple(value))
        if self.kind == "mae":
            _set(self, "decoder_n_layers", self.decoder_n_layers or self.n_layers)
            _set(self, "decoder_n_heads", self.decoder_n_heads or self.n_heads)
        if self.output_matrix is None:
            _set(self, "output_matrix", _owns_output_matrix(self))

    def _check_steps(self) -> None:
        steps = (FAMILIES[self.family]["sparse_step"], *OTHER_STEPS.get(self.family, ()))
        _one_of(self, "sparse_step", steps)
        if self.sparse_step == "ista" and self.d_mlp != self.d_model:
            raise ValueError(
                f"d_mlp={self.d_mlp} with family={self.family!r}: its dictionary is square, so d_mlp is d_model={self.d_model}."
            )
        if self.variant in ("t", "identity") and self.n_heads * self.d_head != self.d_model:
            raise ValueError(
                f"variant={self.variant!r} needs n_heads * d_head = d_model, got {self.n_heads} * {self.d_head} != {self.d_model}."
            )
        if self.output_matrix and self.variant not in ("crate", "fix"):
            raise ValueError(
                f"variant={self.variant!r} has no output matrix of its own: leave output_matrix out."
            )
        if self.variant != "crate" and self.family not in ("crate", "crate-alpha"):
            raise ValueError(
                f"variant={self.variant!r}: only families crate and crate-alpha have it."
            )

    def _check_grid(self) -> None:
        (height, width), (patch_h, patch_w) = self.image_size, self.patch_size
        if height % patch_h or width % patch_w:
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size} on both sides: "
                f"give an image_size such as ({height // patch_h * patch_h or patch_h}, {width // patch_w * patch_w or patch_w})."
            )
        told = {
            "vision": (self.n_tokens, self.n_classes),
            "mae": (self.n_tokens, self.patch_values),
        }.get(self.kind)
        for name, value in zip(("n_ctx", "d_vocab"), told or (), strict=False):
            if getattr(self, name) not in (None, value):
                raise ValueError(
                    f"{name}={getattr(self, name)} contradicts the other fields, which make it {value}."
                )
            _set(self, name, value)

    def _check_text(self) -> None:
        wanted = (
            ("d_embed", "text_d_model", "text_n_layers", "text_n_heads")
            if self.kind == "clip"
            else ()
        )
        for name in ("n_ctx", "d_vocab", *wanted):
            if getattr(self, name) is None:
                raise ValueError(f"a model of family {self.family!r} needs {name}: give {name}=...")
        if self.kind == "clip":
            _share(self, "text_n_heads", "text_d_model")
        if self.prepend_bos not in (None, True, False):
            raise ValueError(f"prepend_bos={self.prepend_bos!r}: give True, False or None.")
        if self.tokenizer is not None:
            _one_of(self, "tokenizer", TOKENIZERS)
        if (
            not isinstance(self.window_pattern, str)
            or not self.window_pattern
            or set(self.window_pattern) - set("SL")
        ):
            raise ValueError(
                f"window_pattern={self.window_pattern!r}: give letters S (short) and L (long)."
            )
        if self.rotary and (
            self.d_head % 2 or not checks.is_number(self.rotary_base) or self.rotary_base <= 0
        ):
            raise ValueError(
                f"d_head={self.d_head}, rotary_base={self.rotary_base!r}: rotary codes need an even d_head and a base above 0."
            )
        if self.softcap is not None and (not checks.is_number(self.softcap) or self.softcap <= 0):
            raise ValueError(f"softcap={self.softcap!r}: give a number above 0, or None.")

    def _check_preprocessing(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both, or neither.")
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None and len(value) != self.channels:
                raise ValueError(
                    f"{name} has {len(value)} values for channels={self.channels}: give one per channel."
                )
            if value is not None and not all(
                checks.is_number(x) and (x > 0 or name == "mean") for x in value
            ):
                raise ValueError(
                    f"{name}={value!r}: give finite numbers{', above 0' * (name == 'std')}."
                )
        if self.labels is not None and not all(isinstance(name, str) for name in self.labels):
            raise ValueError("labels are names: give strings, one per class.")
        if self.labels is not None and len(self.labels) != self.n_classes:
            raise ValueError(
                f"labels has {len(self.labels)} names for n_classes={self.n_classes}: give one per class."
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields this family has, as JSON-native values; `CrateConfig.from_dict` is its inverse."""
        derived = ("n_ctx", "d_vocab") if self.kind in ("vision", "mae") else ()
        skipped = {*foreign_fields(self.family), *derived}
        return {name: _plain(getattr(self, name)) for name in field_names() if name not in skipped}

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
    def kind(self) -> str:
        """Which forward: "vision", "mae", "text" or "clip"."""
        return FAMILIES[self.family]["kind"]

    @property
    def residual(self) -> bool:
        """Whether the output of the sparse step is added to the stream; the square ISTA step always replaces it."""
        return FAMILIES[self.family]["residual"] and self.sparse_step != "ista"

    @property
    def tied(self) -> bool:
        """Whether query, key and value are one code."""
        return FAMILIES[self.family]["tied"]

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return FAMILIES[self.family].get("causal", False)

    @property
    def rotary(self) -> bool:
        """Whether positions enter as rotations of the codes."""
        return self.family == "nanochat-crate"

    @property
    def output_bias(self) -> bool:
        """Whether the output map of attention has a bias."""
        bias = FAMILIES[self.family]["output_bias"]
        return self.bias if bias is None else bias

    @property
    def n_tokens(self) -> int:
        """Tokens of an image, CLS included."""
        return self.grid[0] * self.grid[1] + 1

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return self.patch_size[0] * self.patch_size[1] * self.channels

    # The names TransformerLens' utilities read from a config.
    @property
    def d_vocab_out(self) -> int:
        return self.d_vocab

    @property
    def eps(self) -> float | None:
        return self.ln_eps

    @property
    def default_prepend_bos(self) -> bool:
        return bool(self.prepend_bos)

    @property
    def normalization_type(self) -> str:
        return FAMILIES[self.family]["norm"]

    @property
    def final_rms(self) -> bool:
        return self.normalization_type == "RMS"

    @property
    def positional_embedding_type(self) -> str:
        return "rotary" if self.rotary else "standard"

    n_key_value_heads = None
    attn_only = False
    gated_mlp = False
    act_fn = "relu"


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(CrateConfig)}


def foreign_fields(family: str) -> set[str]:
    """The fields that models of this family do not have."""
    every = {name for names in FIELDS_OF.values() for name in names}
    return every - set(FIELDS_OF[FAMILIES[family]["kind"]])


def field_names() -> tuple[str, ...]:
    """The names a CrateConfig is made from, in order."""
    return tuple(f.name for f in dataclasses.fields(CrateConfig) if f.init)


def check_names(values: dict[str, Any]) -> None:
    """ValueError where a key is no CrateConfig field, with the nearest names."""
    for name in values:
        if name not in field_names():
            hint = checks.did_you_mean(
                name, field_names(), f"The fields are: {', '.join(field_names())}."
            )
            raise ValueError(f"CrateConfig has no field {name!r}. {hint}")


def _set(cfg: CrateConfig, name: str, value: Any) -> None:
    object.__setattr__(cfg, name, value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _one_of(cfg: CrateConfig, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(cfg, name)
    if value not in choices:
        raise ValueError(
            f"{name}={value!r} is none of {', '.join(choices)}. {checks.did_you_mean(str(value), choices)}".rstrip()
        )


def check_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """The same fields with counts as ints and sizes as (h, w); ValueError naming the field that is neither."""
    checked = dict(values)
    for name in set(_COUNTS + _OPTIONAL_COUNTS) & set(values):
        if values[name] is not None or name in _COUNTS:
            checked[name] = checks.count(name, values[name])
    for name in {"image_size", "patch_size"} & set(values):
        checked[name] = checks.size(name, values[name])
    return checked


def _owns_output_matrix(cfg: CrateConfig) -> bool:
    """Variants crate and fix have one; CRATE's vision code leaves it out where one head spans the whole stream."""
    whole_stream = (
        cfg.n_heads == 1
        and cfg.d_head == cfg.d_model
        and cfg.family in ("crate", "crate-alpha", "crate-mae")
    )
    return cfg.variant in ("crate", "fix") and not whole_stream


def _share(cfg: CrateConfig, heads: str, width: str) -> int:
    """The width of one of several heads."""
    if getattr(cfg, width) % getattr(cfg, heads):
        raise ValueError(
            f"{heads}={getattr(cfg, heads)} does not divide {width}={getattr(cfg, width)}: give another {heads}"
            f"{', or d_head' * (heads == 'n_heads')}."
        )
    return getattr(cfg, width) // getattr(cfg, heads)


def _non_negative(cfg: CrateConfig, name: str) -> None:
    value = getattr(cfg, name)
    if not checks.is_number(value) or value < 0:
        raise ValueError(f"{name}={value!r}: give a finite number of at least 0.")
