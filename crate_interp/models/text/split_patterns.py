"""Checks that a downloaded tokenizer splits text by regular expressions of linear time.

Oniguruma, the engine of the `tokenizers` library, backtracks: `(a+)+$` takes time exponential in
the length of the text, and `a+b|a` quadratic time. So a pattern is parsed here before it is used. A
pattern is a list of alternatives. An alternative may repeat without bound only if nothing after the
repetition can fail to match; then no text is read twice. The patterns of public models break this
rule at their end, for white space, in a few known ways, which are allowed.
"""

import re

from crate_interp.core.errors import CheckpointError

_LONGEST = 1000
# the quantifiers below are possessive, so that reading a pattern never backtracks
_CLASS = r"\\[pP]\{\w{1,20}\}|\\[sSwWdDrnt]|\\[^\w\s]"
_ATOM = rf"(?:{_CLASS}|\[\^?(?:{_CLASS}|[^\\\[\]&])++\]|[^\\\[\](){{}}|*+?.^$])"
_PLAIN = rf"(?:{_ATOM}(?![?*+{{]))"  # an atom without a quantifier
_GROUP = rf"\(\?i?:{_PLAIN}++(?:\|{_PLAIN}++)*+\)"
_FIRM = rf"(?:{_PLAIN}|{_GROUP}(?![?*+{{]))"
# `x{1,3}+` is not allowed: Oniguruma reads (x{1,3})+, other engines read a possessive x{1,3}
_SOME = rf"(?:{_ATOM}|{_GROUP})(?:\?\+?|\{{1,[1-9]\}})(?![?*+{{])"
_ENDLESS = rf"{_ATOM}[+*]\+?(?![?*+{{])(?:{_ATOM}[*?]\+?(?![?*+{{]))*+"
_ALTERNATIVE = rf"{_FIRM}*+(?:{_SOME}{_FIRM}*+){{0,2}}+(?:{_ENDLESS})?+"
_ALTERNATIVES = re.compile(rf"{_ALTERNATIVE}(?:\|{_ALTERNATIVE})*+")
# in each of these ends, the last alternative matches the white space that the alternatives before
# it only looked ahead at
_ENDS = (
    r"\s*[\r\n]|\s+(?!\S)|\s+",
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"\s+(?!\S)|\s+",
)
# the pattern of o200k: its second alternative matches text that the first alternative gave back
_WHOLE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def check_pattern(pattern: str) -> None:
    """Raises CheckpointError for a pattern that may take more than linear time."""
    if pattern in _WHOLE:
        return
    end = next((end for end in _ENDS if f"|{pattern}".endswith(f"|{end}")), None)
    rest = pattern if end is None else pattern.removesuffix(end).removesuffix("|")
    if len(pattern) > _LONGEST or not _ALTERNATIVES.fullmatch(rest):
        raise CheckpointError(
            f"the tokenizer splits text by {pattern[:200]!r}, which may take for ever. Patterns "
            "must have alternatives like those of GPT-2 and nanochat. Give token ids instead."
        )
