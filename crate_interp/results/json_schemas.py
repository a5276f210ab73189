"""What the JSON files of results and runs hold: one literal schema each, and one checker.

A schema says what a JSON value must be. It is one of: a type; a pair (words, test); a list with the
schema of every entry; a dict with the schema of each entry by name. In a dict, a name that ends in
"?" may be absent, and "*" stands for every entry. Other entries are allowed.
"""

import re
from collections.abc import Iterable
from typing import Any

from crate_interp.core.checks import is_number, shown
from crate_interp.core.safe_text import is_harmless, is_plain, plain
from crate_interp.results import sample_ranges

_DEEPEST = 100  # nested lists and dicts; no file of ours has more
_EXACT = 2**53

COUNT = ("a whole number from 0 to 2^53", lambda v: type(v) is int and 0 <= v <= _EXACT)
LAYERS = ("a number of layers, at most 10,000", lambda v: type(v) is int and 0 <= v <= 10_000)
CHUNKS = ("a whole number from 1 to 10^7", lambda v: type(v) is int and 0 < v <= 10**7)
NUMBER = ("a finite number", is_number)
ANY_NUMBER = ("a number", lambda v: type(v) in (int, float))
TEXT = ("a text on one line", lambda v: type(v) is str and is_harmless(v))
NAME = ("null or a short text", lambda v: v is None or (type(v) is str and is_plain(v)))
DIGEST = (
    "a digest",
    lambda v: type(v) is str and re.fullmatch(r"sha256:[0-9a-f]{64}", v) is not None,
)
CHUNK_FILE = (
    "the name of a file of a chunk",
    lambda v: (
        type(v) is str
        and re.fullmatch(r"[a-z]+(-[0-9]+)?-[0-9]{6,}\.(parquet|arrow)", v) is not None
    ),
)
RANGES = ("a list of fingerprint, start and stop", sample_ranges.is_valid)
ONE_RANGE = (
    "one fingerprint, start and stop",
    lambda v: sample_ranges.is_valid(v) and len(v) == 1,
)
STAGE = (
    "the name of a stage, such as untrained-0",
    lambda v: type(v) is str and re.fullmatch(r"[a-z]+(-[0-9]{1,9})?", v) is not None,
)
SIZE = ("a size from 1 to 2^31", lambda v: type(v) is int and 0 < v <= 2**31)
STORED = ("float32 or float16", lambda v: v in ("float32", "float16"))

# meta.json; each kind of result adds entries (`Result.META`)
META = {
    "n_samples": COUNT,
    "unit": TEXT,
    "n_layers": LAYERS,
    "model": NAME,
    "config": {"family?": TEXT},
    "versions": dict,
    "model_digest": TEXT,
    "dtype": TEXT,
    "device": TEXT,
    "data": RANGES,
    "counts?": {"*": ANY_NUMBER},
    "seconds?": NUMBER,
    "skipped?": [{"sample": COUNT, "name": TEXT, "why": TEXT}],
    "edits?": [TEXT],
    "titles?": dict,
    "headings?": dict,
}
# the entries of the meta.json of a store, and of the description of its datasets.Dataset
STORE = {"points": {"*": [SIZE]}, "stored": STORED, "data": ONE_RANGE}
DESCRIPTION = {**STORE, "model": NAME, "model_digest": TEXT, "dtype": TEXT, "unit": TEXT}
# run.json
RUN = {"kind": TEXT, "stages": [STAGE], "settings": dict}
# the lines of a ledger: the number of chunks of a stage, and a chunk; stamps: a digest of the sizes
# and times of the pictures that it read
LENGTH = {"stage": STAGE, "chunks": CHUNKS}
CHUNK = {
    "stage": STAGE,
    "chunk": COUNT,
    "start": COUNT,
    "stop": COUNT,
    "sha256": DIGEST,
    "seconds?": NUMBER,
    "stamps?": TEXT,
}
# a line that names a file below chunks/; the line of a chunk is one too
FILE = {"stage": STAGE, "file": CHUNK_FILE, "sha256": DIGEST}


def fault(content: object, wanted: object, where: str = "") -> str:
    """Returns what is wrong with a JSON value, such as "data is 3, not a list", or "".

    where: the name of the value in the answer; "" for the content of a file or a line.
    """
    value: Any = content
    schema: Any = wanted
    if isinstance(schema, tuple):
        return "" if schema[1](value) else f"{where} is {shown(value)}, not {schema[0]}"
    if isinstance(schema, type):
        return (
            ""
            if type(value) is schema
            else f"{where} is {shown(value)}, not of type {schema.__name__}"
        )
    if isinstance(schema, list):
        if type(value) is not list:
            return f"{where} is {shown(value)}, not a list"
        return _first(fault(own, schema[0], f"{where}[{n}]") for n, own in enumerate(value))
    if type(value) is not dict:
        return f"{where} is {shown(value)}, not an object".lstrip()
    inner = f"{where}." if where else ""
    if "*" in schema:
        every = ((f"{inner}{plain(name, 80)}", own) for name, own in value.items())
        return _first(fault(own, schema["*"], name) for name, own in every)
    for name, own in schema.items():
        known = name.removesuffix("?")
        if known in value:
            found = fault(value[known], own, f"{inner}{known}")
            if found:
                return found
        elif known == name:
            return f"{inner}{name} is missing"
    return ""


def fault_of_file(content: object, schema: object) -> str:
    """Returns what is wrong with the content of a JSON file, or "".

    Values that the schema does not name are checked too: none may be nested deeply, or hold
    unprintable text.
    """
    level, depth, odd = [content], 0, ""
    while level:
        depth += 1
        if depth > _DEEPEST:
            return f"it has more than {_DEEPEST} levels of lists and objects"
        texts = (value for value in level if isinstance(value, str))
        odd = odd or _first(text for text in texts if not is_harmless(text))
        level = [inner for value in level for inner in _inside(value)]
    found = fault(content, schema)
    return found or (f"it holds the unprintable text {plain(odd, 80)}" if odd else "")


def _inside(value: object) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _first(texts: Iterable[str]) -> str:
    """Returns the first text that is not empty, or ""."""
    return next(filter(None, texts), "")
