"""Strings of strangers: nothing that is shown can be obeyed."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
from crate_interp.core.safe_text import cell, file_name, is_plain, plain

ANY = st.text(st.characters(codec=None, categories=None), max_size=60)


@given(ANY)
def test_what_is_shown_is_one_line_that_nothing_obeys(text):
    shown = plain(text)
    assert "\n" not in shown and len(shown) <= 204
    kinds = {unicodedata.category(sign) for sign in shown if sign not in "\u200c\u200d"}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode("utf-8")  # no lone surrogate
    assert plain(shown) == shown or len(shown) > 200


def test_plain_text_stays_and_the_rest_is_readable():
    for text in ("crate-tiny", "naïve 注意", "می‌خواهم", "👩‍👧", "a 'b' \"c\" <d>"):
        assert plain(text) == text and is_plain(text)
    assert plain("a\x1b[31mred\x1b[0m") == "a\\x1b[31mred\\x1b[0m"
    assert plain("abc\u202egnp") == "abc\\u202egnp"
    assert plain("x\ud800y") == "x\\ud800y" and not is_plain("x\ud800y")
    assert plain(" a\n\t b\u2028c ") == "a b c"
    assert plain("x" * 5000) == "x" * 200 + " ..." and plain("\x1b" * 900, 8) == "\\x1b\\x1b ..."
    assert plain(" " * 10_000 + "end") == " ..."


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", " =1", "\t=1", "\n=HYPERLINK(1)"])
def test_a_cell_is_no_formula(text):
    assert cell(text).startswith("'")


@given(ANY)
def test_every_cell(text):
    shown = cell(text)
    assert shown[:1] not in ("=", "+", "-", "@", "\t", "\r")
    shown.encode("utf-8")


def test_numbers_stay_numbers():
    assert cell(-1.5) == -1.5 and cell(None) is None and cell("a-b") == "a-b"


@given(ANY)
def test_a_file_name_stays_in_its_folder(text):
    name = file_name(text)
    assert name and not name.startswith(".") and not {"/", "\\", "\0"} & set(name)
    assert len(name) <= 100 and name.isascii()


def test_an_error_is_one_plain_line():
    error = ci.CheckpointError("key \x1b]0;owned\x07 of\n\n a\u202efile " + "x" * 5000)
    assert str(error).startswith("key \\x1b]0;owned\\x07 of a\\u202efile xxx")
    assert len(str(error)) <= 1504
