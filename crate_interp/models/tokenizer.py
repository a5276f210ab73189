"""Text to token ids and back, for tokenizers that the `tokenizers` library runs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

        The name of a special token is text like any other.
        """
        return self.core.encode(text, add_special_tokens=False).ids

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
        unknown = [index for index in ids if self.core.id_to_token(index) is None]
        if unknown:
            raise ValueError(
                f"no token has the id {unknown[0]}: the tokenizer has "
                f"{self.core.get_vocab_size()} tokens."
            )
        return self.core.decode(ids, skip_special_tokens=False) if ids else ""

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


def parse(text: str) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json; any exception means that it is not one."""
    from tokenizers import Tokenizer as Core

    content = json.loads(text)
    added = content.pop("added_tokens", None) or []
    specials = {token["content"]: token["id"] for token in added if token["special"]}
    if not all(
        isinstance(name, str) and type(index) is int and 0 <= index < 2**31
        for name, index in specials.items()
    ):
        raise ValueError("special tokens are names and ids")
    plain = [token for token in added if not token["special"]]  # these do match text
    # the tokens of a text are all of them, and no others
    complete = {"added_tokens": plain, "truncation": None, "padding": None}
    return Tokenizer(core=Core.from_str(json.dumps(content | complete)), specials=specials)
