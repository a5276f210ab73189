"""Turns the source given to ci.load into a model's weights, its config and its tokenizer."""

import io
import json
import os
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from crate_interp.checkpoints import hub, model_folders, read_weights
from crate_interp.checkpoints.read_weights import Contents
from crate_interp.checkpoints.state_dicts import Rename, find_weights, rename_function
from crate_interp.core import checks
from crate_interp.core.errors import CheckpointError, NoTokenizerError
from crate_interp.core.folders import differs, listed
from crate_interp.models.hooked import hooked_part
from crate_interp.models.saving import CONFIG, TOKENIZER, WEIGHTS
from crate_interp.models.text.tokenizer import build, bytes_of_signs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


Given = str | Path | Mapping[str, Any] | torch.nn.Module

WEIGHT_SUFFIXES = (".pth", ".pt", ".safetensors", ".npz")


@dataclass(frozen=True)
class Source:
    """The source given to ci.load, and how to read it.

    fields: config fields that the caller gives. hub: the options of hub.fetch. weights: "ema"
    for averaged weights, else None.
    """

    given: Given
    family: str | None
    file: str | None
    revision: str | None
    rename: Rename | str | None
    fields: dict[str, Any]
    hub: dict[str, Any]
    weights: str | None = None

    @property
    def name(self) -> str:
        """The source's name in errors."""
        return str(self.given) if isinstance(self.given, (str, Path)) else "the state dict"

    @property
    def choice(self) -> dict[str, Any]:
        """Which weights to take, under which names: the options of find_weights."""
        rename = rename_function(self.rename)
        return {"rename": rename, "weights": self.weights, "family": self.family}

    def refuse_options(self, where: str, *names: str) -> None:
        """Raises CheckpointError for given options that have no meaning here."""
        for name in names:
            value = getattr(self, name)
            if value is not None:
                raise CheckpointError(f"{name}={value!r} has no meaning for {where}: leave it out.")

    def fetch(self, repo: str, file: str, revision: str | None) -> Path:
        """Returns the path of a file of a repo, downloaded unless the cache has it."""
        return hub.fetch(repo, file, revision=revision, **self.hub)

    def fetch_beside(self, repo: str, revision: str | None, *files: str) -> None:
        """Downloads those of these files that lie next to the weights."""
        for file in files:
            with suppress(hub.MissingFile, hub.NotCached):
                self.fetch(repo, file, revision)


def names_a_repo(name: str) -> bool:
    """Tells whether a name has the form owner/repo of the Hub, and not the form of a path."""
    path = Path(name).expanduser()
    return name.count("/") == 1 and not path.is_absolute() and path.suffix not in WEIGHT_SUFFIXES


def contents_of(source: Source) -> Contents:
    """Returns the weights of a source, with their config, their row of the table and their family.

    Raises CheckpointError if the source cannot be read.
    """
    name = source.name
    if isinstance(source.given, (Mapping, torch.nn.Module)):
        source.refuse_options("a state dict", "revision", "file")
        wrapped = hooked_part(source.given)
        if wrapped not in (None, "model"):
            raise CheckpointError(f"the source wraps a hooked model: use {wrapped}.")
        tensors, notes = find_weights(source.given, name, **source.choice)
        config, fields = read_weights.model_args(source.given), source.fields
        return Contents(tensors, name, config, family=source.family, given=fields, notes=notes)
    path = Path(source.given).expanduser()
    if os.path.isdir(path):  # pathlib would raise for a name that is too long for a file
        source.refuse_options(str(path), "file")
        return _directory(source, path)
    if os.path.exists(path):
        source.refuse_options(str(path), "revision", "file")
        return _file(source, path, hub.of_digest(path))
    row = hub.find(name)
    if row is not None:
        source.refuse_options(row["name"], "file")
        if not row["embedded"]:
            return _row(source, row)
        folder = hub.ASSETS / row["name"]
        weights = model_folders.weights_of(folder, source.revision, row["note"])
        return _saved_folder(source, folder, weights)
    if names_a_repo(name):
        return _repo(source, name)
    hint = checks.did_you_mean(name, [row["name"] for row in hub.MODELS])
    if address := re.match(r"(?:hf://|https://huggingface\.co/)([\w.-]+/[\w.-]+)", name):
        hint = f"Give {address[1]!r}, with file='...' for a file in the repo."

    raise CheckpointError(
        f"{checks.quote(name)} is not a file, folder, known model or owner/repo on the Hub."
        f"{' ' * bool(hint)}{hint} ci.list_models() lists the known models."
    )


def _file(source: Source, path: Path, row: dict[str, Any] | None = None) -> Contents:
    """Reads a weight file, or the files of an index; row: its row in the table of models."""
    family = source.family or (row or {}).get("family")
    sharded = path.name in model_folders.INDEXES
    read = model_folders.read_sharded if sharded else read_weights.read_file
    contents = read(path, **source.choice | {"family": family})
    config = None if row is None else row.get("config", {})
    return replace(contents, family=family, row=config, given=source.fields)


def _directory(source: Source, path: Path) -> Contents:
    """Reads a local folder that save_pretrained, SAELens or a trainer wrote."""
    weights, config = model_folders.weights_in(path) or path / WEIGHTS, path / CONFIG
    if (path / model_folders.STEPS).is_dir() and config.exists():
        return _saved_folder(source, path, model_folders.weights_of(path, source.revision))
    source.refuse_options(str(path), "revision")
    files = model_folders.SAELENS_CONFIG, model_folders.SAELENS_WEIGHTS
    if source.family in (None, "sae") and all((path / name).is_file() for name in files):
        source.refuse_options("a saved model", "rename", "weights")
        return model_folders.read_saelens(path, source.fields)
    # another library's config, such as nanochat's
    if read_weights.read_config(config) and weights.exists():
        return _file(source, weights)
    if config.exists() and weights.name == WEIGHTS:
        return _saved_folder(source, path, weights)
    trained = model_folders.trained_folder(path)
    if trained is None:
        raise CheckpointError(f"{path} has no {CONFIG}: give the weight file in it.")
    weights, beside = trained
    if beside is not None:
        fields = model_folders.fields_of(beside, source.fields, source.family)
        source = replace(source, family=fields.pop("family"), fields=fields)
    return _file(source, weights)


def _saved_folder(source: Source, folder: Path, weights: Path) -> Contents:
    """Reads a folder that save_pretrained wrote.

    weights: the path of the folder's weights, or of the weights after a step of training.
    """
    source.refuse_options("a saved model", "rename", "weights")
    named = {"family": source.family} if source.family else {}
    cfg = model_folders.read_own_config(folder, source.fields | named)
    if not weights.exists():
        raise CheckpointError(f"{weights} is missing.")
    changed = differs(folder, listed(folder / CONFIG)) if weights == folder / WEIGHTS else ()
    if changed:  # a step of a training has no digest
        raise CheckpointError(
            f"{folder / changed[0]} does not belong to {folder / CONFIG}, which lists another "
            "digest for it. Save or download the folder again; or remove `files` from the config "
            "to load the file as it is."
        )
    return replace(read_weights.read_file(weights), cfg=cfg, given=source.fields, folder=folder)


def _row(source: Source, row: dict[str, Any]) -> Contents:
    """Reads the file of a row in the table of models from the Hub.

    If the file is not on the Hub, the error says how to get it.
    """
    repo, file = row["repo"], row["file"]
    if file is None and row["link"] is None:
        ways = f"Give a file of the repo: ci.load({repo!r}, file='...')."
        raise CheckpointError(f"{row['name']}: {row['note']}. {ways}")
    if file is None:
        fields = ", ".join(f"{name}={value!r}" for name, value in row["config"].items())
        raise CheckpointError(
            f"{row['name']} is not on the Hub: download it from {row['link']} and load the file: "
            f"ci.load('path/to/the/file', {fields})."
        )
    revision = row["revision"] if source.revision is None else source.revision
    pinned = row if source.revision in (None, row["revision"]) else None
    path = hub.fetch(repo, file, revision=revision, row=pinned, **source.hub)
    for name in row["beside"]:
        source.fetch(repo, str(Path(file).parent / name), revision)
    return _file(source, path, row)


def _repo(source: Source, repo: str) -> Contents:
    """Reads a repo of the Hub: one of the table, one that push_to_hub made, or a file of another.

    A config or tokenizer beside the weights is downloaded with them.
    """
    file, rows, revision = source.file, hub.of_repo(repo, source.file), source.revision
    if len(rows) == 1 and (file is not None or len(hub.of_repo(repo)) == 1):
        return _row(source, rows[0])
    if file is None and rows:
        files = ", ".join(row["file"] for row in rows)
        raise CheckpointError(f"{repo} has several files: give one of them, file='...': {files}.")
    if file is not None:
        path = source.fetch(repo, file, revision)
        beside = CONFIG if file.endswith(".safetensors") else f"{Path(file).stem}_cfg.json"
        source.fetch_beside(repo, revision, str(Path(file).with_name(beside)))
        return _file(source, path)
    try:
        config = source.fetch(repo, CONFIG, revision)
    except hub.MissingFile:
        raise CheckpointError(
            f"{repo} has no {CONFIG}: name one of its weight files, ci.load({repo!r}, file='...')."
        ) from None
    weights = source.fetch(repo, WEIGHTS, revision)
    foreign = bool(read_weights.read_config(config))  # read_config returns {} if the config is ours
    source.fetch_beside(repo, revision, *(TOKENIZER_FILES if foreign else (TOKENIZER,)))
    return _file(source, weights) if foreign else _saved_folder(source, config.parent, weights)


_ON_THE_HUB = {"gpt2": "openai-community/gpt2", "bert": "google-bert/bert-base-uncased"}
TOKENIZER_FILES = _JSON, _PICKLE = "tokenizer.json", "tokenizer.pkl"
_ENCODING = "tiktoken.core.Encoding"
Model = TypeVar("Model", bound=nn.Module)


def attach(model: Model, folder: Path | None, net: dict[str, Any]) -> Model:
    """Returns the model after recording where its tokenizer is.

    The tokenizer is read when `model.tokenizer` or text is first used. folder: the folder of the
    weights, or None. net: the options of hub.fetch.
    """
    part: Any = getattr(model, "text", model)
    if getattr(getattr(part, "cfg", None), "tokenizer", None):
        kind = part.cfg.tokenizer
        part.fetch_tokenizer = partial(_fetch, kind, folder, net)  # a lambda could not be pickled
    return model


def _fetch(kind: str, folder: Path | None, net: dict[str, Any]) -> "PreTrainedTokenizerFast":
    beside = [folder / name for name in TOKENIZER_FILES] if folder else []
    path = next((path for path in beside if path.is_file()), None)
    if kind != "file":
        path = hub.fetch(_ON_THE_HUB[kind], _JSON, **net)
    if path is None:
        where = f"in {folder}" if folder else "for a model loaded from a state dict"
        raise NoTokenizerError(
            f"there is no {_JSON} and no {_PICKLE} {where}: give token ids instead of text, or "
            "load the model from a folder with one of these files."
        )
    try:
        if path.name == _PICKLE:
            return read_tiktoken(path.read_bytes())
        return build(json.loads(path.read_text(encoding="utf-8")))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CheckpointError(f"{path} is not a {path.name} that can be read: {error}") from None


def read_tiktoken(content: bytes) -> "PreTrainedTokenizerFast":
    """Returns the tokenizer in nanochat's tokenizer.pkl, a pickled tiktoken.Encoding.

    It is the byte-level BPE tokenizer with the Encoding's ranks, pattern and special tokens; it
    first merges the two neighbours that together form the token of lowest rank. Raises
    CheckpointError for a pickle that names anything but tiktoken.core.Encoding.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core

    state = _state_of_encoding(content)
    ranks, pattern, specials = state["mergeable_ranks"], state["pat_str"], state["special_tokens"]
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError("the ranks of the tokenizer's tokens are not 0, 1, 2, ...")
    signs = {byte: sign for sign, byte in bytes_of_signs().items()}
    spelled = {token: "".join(signs[byte] for byte in token) for token in ranks}
    merges = [
        (spelled[token[:at]], spelled[token[at:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    core = Core(models.BPE(vocab=vocab, merges=merges))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    core.decoder = decoders.ByteLevel()
    added = [{"id": index, "content": name, "special": True} for name, index in specials.items()]
    return build(json.loads(core.to_str()) | {"added_tokens": added})


def _state_of_encoding(content: bytes) -> dict[str, Any]:
    """Returns the attributes of the tiktoken.Encoding in a pickle, of which nothing is run."""

    class Encoding:  # a new one each time, since a pickle may write into it
        state: Any = None

        def __setstate__(self, state: Any) -> None:
            self.state = state

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> type:
            if f"{module}.{name}" == _ENCODING:
                return Encoding
            said = f"the tokenizer's pickle asks for {module}.{name}"
            raise CheckpointError(f"{said}, not {_ENCODING}: nothing ran.")

    return Reader(io.BytesIO(content)).load().state
