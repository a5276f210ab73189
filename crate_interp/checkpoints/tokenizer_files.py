"""The tokenizer of a language model, and where to find it."""

import io
import json
import pickle
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from crate_interp.checkpoints import hub
from crate_interp.core.errors import CheckpointError, NoTokenizerError
from crate_interp.models.text.tokenizer import build, bytes_of_signs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
        raise CheckpointError(
            f"{path} is not a {path.name} that the tokenizers library can read: {error}"
        ) from None


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
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
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
            raise CheckpointError(
                f"the tokenizer's pickle asks for {module}.{name}, but only {_ENCODING} is "
                "admitted; nothing was run."
            )

    return Reader(io.BytesIO(content)).load().state
