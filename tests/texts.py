"""What strangers write into files: texts, JSON, and what a page shows of it."""

import unicodedata
from html.parser import HTMLParser

from hypothesis import strategies as st

ANY = st.text(st.characters(codec=None, categories=None), max_size=60)
NO_TEXT = [5, -0.5, True, ["a"], {"a": 1}, [[[[]]]] * 3]
HARMFUL = ["\ud800", "a\nb", "\x1b[31mred", "a\u202eb", "\x85", "nul\0", " ends ", "x" * 20_000]
KINDS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY, inner, max_size=3),
    max_leaves=8,
)


class Words:
    """A tokenizer of texts that are numbers."""

    bos = 46

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


class Page(HTMLParser):
    """The tags of a page, with their attributes, and its words."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)


def harmless(text, spaces="\u200c\u200d\t\n\r"):
    """Nothing in a text is obeyed, and a file can hold it."""
    return not {unicodedata.category(sign) for sign in text if sign not in spaces} & KINDS


def deep(levels):
    nested = []
    for _ in range(levels):
        nested = [nested]
    return nested
