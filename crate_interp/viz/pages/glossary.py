"""The words of the pages: what each means, shown where a page first uses it."""

import html
import re
from collections.abc import Iterable
from pathlib import Path

_FILE = Path(__file__).with_name("glossary.txt")
# word -> its other forms, and what it means; docs list the same words
TERMS: dict[str, tuple[tuple[str, ...], str]] = {}
for _line in _FILE.read_text(encoding="utf-8").splitlines():
    _names, _, _meaning = _line.partition(": ")
    _word, *_others = _names.split(", ")
    TERMS[_word] = tuple(_others), _meaning

_SKIPPED = re.compile(
    r"<(script|style|svg|title|table|button|label|legend|select|option|pre|code|summary|h1|h2|h3|a|iframe|textarea|dl)\b"
    r".*?</\1>",
    re.DOTALL,
)
_TAG = re.compile(r"<[^>]*>")
_RATE = "R<sup>c</sup>"  # R^c on a page


def forms() -> dict[str, str]:
    """Returns each form of each word, and the word."""
    return {form: word for word, (others, _) in TERMS.items() for form in (word, *others)}


def finder(known: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that finds these words, the longest that fits at each place."""
    longest = sorted(known, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, longest))})(?![\w-])")


def explained(document: str) -> str:
    """Returns an HTML page in which the first use of each word of `TERMS` shows its meaning."""
    start = document.find("<body")
    known = forms()
    known.pop("R^c")  # `_with_rate` finds it
    words, explained_words = finder(known), set[str]()

    def wrapped(match: re.Match[str]) -> str:
        word = known[match[0]]
        if word in explained_words:
            return match[0]
        explained_words.add(word)
        return f'<abbr title="{html.escape(TERMS[word][1])}">{match[0]}</abbr>'

    document = _with_rate(document, start)
    parts, at = [document[:start]], start
    while (tag := _TAG.search(document, at)) is not None:
        end = (_SKIPPED.match(document, tag.start()) or tag).end()
        parts += [words.sub(wrapped, document[at : tag.start()]), document[tag.start() : end]]
        at = end
    return "".join(parts) + document[at:]


def _with_rate(document: str, start: int) -> str:
    """Returns a page in which R^c is explained where a paragraph first has it."""
    at = document.find(_RATE, start)
    while at >= 0 and document.rfind("<p", start, at) <= document.rfind("</p>", start, at):
        at = document.find(_RATE, at + 1)
    if at < 0:
        return document
    shown = f'<abbr title="{html.escape(TERMS["R^c"][1])}">{_RATE}</abbr>'
    return f"{document[:at]}{shown}{document[at + len(_RATE) :]}"
