"""ci.bridge.load: any model by name, folder or repo, a CRATE or a black box of transformers."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from crate_interp.checkpoints import hub, model_folders
from crate_interp.checkpoints.load import load as load_crate
from crate_interp.checkpoints.read_weights import read_config, read_json
from crate_interp.checkpoints.sources import Source, names_a_repo
from crate_interp.config.families import SUBSPACES
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError
from crate_interp.models.hooked import HookedModel
from crate_interp.models.text.tokenizer import check

_FILE = "preprocessor_config.json"
# Pillow's numbers for its filters
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# networks that interpolate their positions for any size
_FREE = ("dinov2", "dinov2_with_registers")


def preprocessing(folder: Path, config: object) -> dict[str, Any]:
    """Returns resize, crop, interpolation, mean, std, and image_size if the model takes any size.

    config: transformers' config of the network. Returns {} without preprocessor_config.json.

    Raises CheckpointError if pictures are to be scaled by anything but 1 / 255, and KeyError for an
    unknown filter or size.
    """
    found = read_config(folder / _FILE)
    if not found:
        return {}
    scaled = abs(float(found.get("rescale_factor", 1 / 255)) * 255 - 1) <= 1e-6
    if found.get("do_rescale") is False or not scaled:
        said = f"{folder / _FILE} does not scale pictures to [0, 1]"
        raise CheckpointError(f"{said}: give floats, and remove the file.")
    fields: dict[str, Any] = {}
    if found.get("do_resize", True) and "size" in found:
        fields["interpolation"] = _FILTERS[found.get("resample", 2)]
        fields["resize"] = _side(found["size"])
    if found.get("do_center_crop") and "crop_size" in found:
        fields["crop"] = _side(found["crop_size"])
    channels = getattr(config, "num_channels", 3)
    if not found.get("do_normalize", True):
        fields |= {"mean": [0.0] * channels, "std": [1.0] * channels}
    elif "image_mean" in found and "image_std" in found:
        fields |= {"mean": found["image_mean"], "std": found["image_std"]}
    if getattr(config, "model_type", "") in _FREE:
        fields["interpolate_pos"] = True
        size = fields.get("crop", fields.get("resize"))
        if isinstance(size, tuple):
            fields["image_size"] = size
    return fields


def _side(size: Any) -> int | tuple[int, int]:
    """Returns (height, width), or the length of the shorter side."""
    if isinstance(size, int):
        return size, size
    return size["shortest_edge"] if "shortest_edge" in size else (size["height"], size["width"])


# model_type in config.json -> transformers classes that config.json may name. If it names none, the
# last class of the list is loaded; for images, this class has no head.
BLACK_BOXES: dict[str, tuple[str, ...]] = {
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassification", "DeiTModel"),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Model"),
    "dinov2_with_registers": (
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersModel",
    ),
    "gpt2": ("GPT2LMHeadModel",),
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
}
# classes that add a pooler, which no output depends on, unless told otherwise
_POOLED = ("ViTModel", "DeiTModel")
# ends of the keys that may stay unread, each with the reason why no output depends on them
_UNREAD = (
    "pooler.dense.weight",  # classifiers of ViT and DeiT read the CLS token, not the pooler
    "pooler.dense.bias",
    "embeddings.mask_token",  # stands for hidden patches, which only pretraining has
    "attn.masked_bias",  # a constant of old GPT-2 files, which the code now holds
)
_WEIGHTS, _SHARDS = "model.safetensors", "model.safetensors.index.json"
_CONFIG, _SAFE = "config.json", ".safetensors"
_TOKENIZER, _MOST_WORDS = "tokenizer.json", 1000
_BESIDE = (
    "preprocessor_config.json", _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt",
)  # fmt: skip


def load(
    source: str | Path,
    *,
    subspaces: str = "value",
    family: str | None = None,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    **config: Any,
) -> HookedModel:
    """Returns the hooked model for a name, folder or repo: a CRATE or a black box.

    A folder or repo whose config.json has a known model_type (`BLACK_BOXES`: vit, deit, dinov2,
    gpt2, llama, ...) is loaded by transformers, bridged, and given to `ci.from_bridge` with
    `subspaces` and `config`. Its weights must be safetensors: pickles and code of the repo are
    never read. `model.preprocess` does what the source's preprocessor_config.json says. Any other
    source goes to `ci.load` with the same arguments, without `subspaces`.

    Args:
        source: A name in `ci.list_models()`, a folder, or "owner/repo" on the Hub.
        subspaces: As in `ci.from_bridge`.
        family: As in `ci.load`.
        revision: As in `ci.load`.
        device: As in `ci.load`.
        dtype: As in `ci.load`.
        cache_dir: As in `ci.load`.
        local_files_only: As in `ci.load`.
        token: As in `ci.load`.
        config: Fields of the config, as in `ci.from_bridge`.

    Raises:
        CheckpointError: In one line, for any fault of a source.
    """
    checks.one_of("subspaces", subspaces, SUBSPACES)
    net = {"cache_dir": cache_dir, "local_files_only": local_files_only, "token": token}
    folder = _folder(Source(source, family, config.get("file"), revision, None, config, net))
    if folder is None:
        options: dict[str, Any] = {"device": device, "dtype": dtype, **net, **config}
        return load_crate(source, family=family, revision=revision, **options)
    if not (folder / _WEIGHTS).exists() and not (folder / _SHARDS).exists():
        raise CheckpointError(_no_safetensors(str(folder)))
    from crate_interp.bridge.adapter import build
    from crate_interp.bridge.bridge_to_hooked import from_bridge

    name = str(source)
    try:
        network = _network(folder, dtype or torch.float32)
        fields = {"model_name": name if name.count("/") == 1 else folder.name}
        fields |= preprocessing(folder, network.config) | config
        bridge = build(network, tokenizer=_tokenizer(folder))
        return from_bridge(bridge, subspaces=subspaces, **fields).to(torch.device(device))
    except CheckpointError:
        raise
    except Exception as error:  # transformers' errors about a config have no common class
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{source} cannot be loaded: {words[:_MOST_WORDS]}") from error


def _folder(source: Source) -> Path | None:
    """Returns the folder of a black box, downloaded if need be; None for any other source."""
    given, name = source.given, source.name
    foreign = source.file is None and source.family in (None, "vit", "gpt")
    if not foreign or not isinstance(given, (str, Path)):
        return None
    path = Path(given).expanduser()
    if os.path.isdir(path):
        if not _is_black_box(path):
            return None
        source.refuse_options(f"the folder {path}", "revision")
        return path
    if os.path.exists(path) or not names_a_repo(name) or hub.of_repo(name):
        return None
    try:
        config = source.fetch(name, _CONFIG, source.revision)
    except hub.MissingFile:
        return None  # ci.load's error says what to do
    return _downloaded(source, config) if _is_black_box(config.parent) else None


def _is_black_box(folder: Path) -> bool:
    """Tells whether a folder's config.json has the model_type of a black box."""
    content = read_json(folder / _CONFIG)
    known = isinstance(content, dict) and content.get("library") != "crate_interp"
    return known and str(content.get("model_type")) in BLACK_BOXES


def _downloaded(source: Source, config: Path) -> Path:
    """Returns the folder of a repo's snapshot, with the weights and their companion files."""
    # the commit of the config, since a branch may move in the meantime
    repo, commit = source.name, config.parent.name
    try:
        files = [source.fetch(repo, _WEIGHTS, commit).name]
    except hub.MissingFile:
        try:
            index = read_json(source.fetch(repo, _SHARDS, commit))
        except hub.MissingFile:
            raise CheckpointError(_no_safetensors(repo)) from None
        # transformers would follow any path, and give any other file to torch.load
        files = model_folders.files_of(index, f"{repo}/{_SHARDS}", _SAFE)
    for name in files:
        source.fetch(repo, name, commit)
    source.fetch_beside(repo, commit, *_BESIDE)
    return config.parent


def _no_safetensors(where: str) -> str:
    return (
        f"{where} has no {_WEIGHTS}, and pickled weights are not read: load it with transformers, "
        "save it with network.save_pretrained(folder), and load that folder."
    )


def _network(folder: Path, dtype: torch.dtype) -> Any:
    """Returns the transformers network, with every parameter from the file, and all of the file."""
    import transformers

    config, where = read_json(folder / _CONFIG), str(folder / _CONFIG)
    if not (folder / _WEIGHTS).exists():  # raises for files that transformers would unpickle
        model_folders.files_of(read_json(folder / _SHARDS), str(folder / _SHARDS), _SAFE)
    known = BLACK_BOXES[config["model_type"]]
    named = config.get("architectures") or known[-1:]  # another class may have other heads
    if len(named) != 1 or named[0] not in known:
        raise CheckpointError(
            f"{where} says architectures={str(named)[:80]}, but known are {', '.join(known)}. Load "
            "the network with transformers, and save it as one of these classes."
        )
    name = named[0]
    kind = getattr(transformers, name)
    if config.get("quantization_config") is not None:
        raise CheckpointError(f"{where} has a quantization_config: give weights without one.")
    read: Any = kind.config_class.from_pretrained(folder, local_files_only=True)
    read._attn_implementation = "eager"  # a config may name code on the Hub instead
    network, info = kind.from_pretrained(
        folder, config=read, attn_implementation="eager", use_safetensors=True,
        local_files_only=True, dtype=dtype, output_loading_info=True,
        **({"add_pooling_layer": False} if name in _POOLED else {}),
    )  # fmt: skip
    unread = [str(key) for key in info["unexpected_keys"] if not str(key).endswith(_UNREAD)]
    if unread:
        raise CheckpointError(
            f"{name} does not read these keys of {folder}: {sorted(unread)[:8]}. Name another "
            f"class in {_CONFIG} ({', '.join(known)}), or save the network without these keys."
        )
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            wrong = [str(one) for one in info[what]][:8]
            raise CheckpointError(f"the weights in {folder} do not fit {name}: {what} {wrong}.")
    return network.eval()


def _tokenizer(folder: Path) -> object:
    """Returns the tokenizer saved with the weights, or None.

    A tokenizer that the tokenizers library cannot read, or that drops merges at random, is left out
    with a warning.
    """
    path = folder / _TOKENIZER
    if not path.exists():
        return None
    # not AutoTokenizer, which would ask whether to run a class in the folder
    from transformers import PreTrainedTokenizerFast

    try:
        check(read_json(path))
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        warnings.warn(f"{path} is left out: {error}", stacklevel=3)
        return None
