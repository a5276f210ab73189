"""The tokenizer of a language model, and where to find it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from crate_interp.checkpoints import hub
from crate_interp.checkpoints.formats.tiktoken_pickle import read_tokenizer
from crate_interp.core.errors import CheckpointError, NoTokenizerError
from crate_interp.models.text.tokenizer import parse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ON_THE_HUB = {"gpt2": "openai-community/gpt2", "bert": "google-bert/bert-base-uncased"}
TOKENIZER_FILES = _JSON, _PICKLE = "tokenizer.json", "tokenizer.pkl"
_MAX_BYTES = {_JSON: 2**26, _PICKLE: 2**24}
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
    beside = [folder / name for name in TOKENIZER_FILES] if folder and kind == "file" else []
    found = next((path for path in beside if path.exists()), None)
    if found is None and kind == "file":
        where = f"in {folder}" if folder else "for a model loaded from a state dict"
        raise NoTokenizerError(
            f"there is no {_JSON} and no {_PICKLE} {where}: give token ids instead of text, or "
            "load the model from a folder with one of these files."
        )
    return _read(found or hub.fetch(_ON_THE_HUB[kind], _JSON, **net))


def _read(path: Path) -> "PreTrainedTokenizerFast":
    if not path.is_file():
        raise CheckpointError(f"{path} is not a regular file.")
    if path.stat().st_size > _MAX_BYTES[path.name]:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes: no tokenizer is so large.")
    try:
        if path.name == _PICKLE:
            return read_tokenizer(path.read_bytes())
        return parse(path.read_text(encoding="utf-8"))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception:  # the tokenizers library raises bare exceptions
        raise CheckpointError(
            f"{path} is not a tokenizer.json that the tokenizers library can read."
        ) from None
