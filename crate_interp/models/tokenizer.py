"""Text to token ids and back, for tokenizers that the `tokenizers` library runs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crate_interp.errors import CheckpointError
from crate_interp.models.tokenizer_rules import check_added, check_content, lone_surrogate

_SEPARATORS = ("<|bos|>", "<|endoftext|>", "[CLS]")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the `tokenizers` library. Text never becomes a special token.

    core: a tokenizers.Tokenizer without special tokens; specials: their names and ids.
    """

    core: Any
    specials: dict[str, int]

    @property
    def bos(self) -> int | None:
        """The id of the separator that may begin a text.

        It is <|bos|>, GPT-2's <|endoftext|>, or BERT's [CLS].
        """
        return next((self.specials[name] for name in _SEPARATORS if name in self.specials), None)

    def encode(self, text: str) -> list[int]:
        """Returns token ids of a text, with nothing added.

        The name of a special token is text like any other. Raises ValueError for a text with
        half of a surrogate pair, and CheckpointError if the library fails.
        """
        if half := lone_surrogate(text):
            raise ValueError(
                f"character {half.start()} of the text is half of a surrogate pair, "
                f"U+{ord(half.group()):04X}: no tokenizer has a token for it. To put a "
                "replacement mark there: text.encode('utf-16', 'surrogatepass')"
                ".decode('utf-16', 'replace')."
            )
        return safely(lambda: self.core.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens by their names.

        Raises ValueError for an id that no token has.
        """
        names = {index: name for name, index in self.specials.items()}
        parts, run = [], []
        for index in ids:
            if index in names:
                parts += [self._plain(run), names[index]]
                run = []
            else:
                run.append(index)
        return "".join([*parts, self._plain(run)])

    def _plain(self, ids: list[int]) -> str:
        unknown = [
            index for index in ids if not 0 <= index < 2**32 or self.core.id_to_token(index) is None
        ]
        if unknown:
            raise ValueError(
                f"no token has the id {unknown[0]}: the tokenizer has "
                f"{self.core.get_vocab_size()} tokens."
            )
        return safely(lambda: self.core.decode(ids, skip_special_tokens=False)) if ids else ""

    def to_json(self) -> str:
        """Returns the content of a tokenizer.json, for `parse` and Hugging Face's libraries."""
        content = json.loads(self.core.to_str())
        flags = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        content["added_tokens"] += [
            {"id": index, "content": name} | flags for name, index in self.specials.items()
        ]
        return json.dumps(content, ensure_ascii=False)


def safely(call: Callable[[], Any]) -> Any:
    """Returns what a call of the library returns.

    Raises CheckpointError if it fails: a panic of its Rust code is no Exception. The panic has
    written to stderr by then, which nothing in Python can prevent.
    """
    try:
        return call()
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise CheckpointError(f"the tokenizers library fails: {error}.") from None
        raise


def parse(text: str) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json.

    Raises CheckpointError for parts that are not admitted; any other exception means that the
    text is no tokenizer.json.
    """
    from tokenizers import Tokenizer as Core

    content = json.loads(text)
    added = content.pop("added_tokens", None) or []
    check_added(added)
    specials = {token["content"]: token["id"] for token in added if token["special"]}
    if not all(type(token["id"]) is int and 0 <= token["id"] < 2**31 for token in added):
        raise ValueError("the ids of added tokens are no ids")
    plain = [token for token in added if not token["special"]]  # these do match text
    # the tokens of a text are all of them, and no others
    complete = {"added_tokens": plain, "truncation": None, "padding": None}
    checked = json.dumps(check_content(content) | complete)
    core = safely(lambda: Core.from_str(checked))
    return Tokenizer(core=core, specials=specials)
