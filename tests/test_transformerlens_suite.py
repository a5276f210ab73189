"""The script that runs TransformerLens' own tests, and a few of those tests.

All of them: `python tests/transformerlens_suite.py` and `python tests/transformerlens_demos.py`.
"""

import json
import tomllib
from pathlib import Path

import pytest

import transformerlens_demos as demos
import transformerlens_sdist as sdist
import transformerlens_suite as suite

HERE = Path(__file__).parent
TABLE = tomllib.loads(suite.TABLE.read_text())
FAST = [
    "tests/integration/model_bridge/test_bridge_start_at_layer.py",
    "tests/unit/model_bridge/test_gated_hooks.py",
    "tests/unit/model_bridge/test_caching_remove_batch_dim.py",
    "tests/unit/test_generate_no_tokenizer.py",
]


def row(outcome, message=""):
    return {"outcome": outcome, "message": message, "ours": True}


def test_each_expected_failure_has_a_group_a_reason_and_a_file():
    listed = suite.expected(TABLE)
    counted = [test for test, (group, _) in listed.items() if group in suite.COUNTED]
    assert len(counted) <= suite.AT_MOST
    for test in listed:
        assert any(test.startswith(file) for file in TABLE["files"]), test
    assert len((HERE / "transformerlens_shim.py").read_text().splitlines()) <= 120


def test_a_table_with_a_test_twice_or_an_odd_group_is_refused():
    entry = {"group": "other", "reason": "so", "tests": ["a::b"]}
    assert suite.expected({"expected": [entry]}) == {"a::b": ("other", "so")}
    for odd in ([entry, entry], [entry | {"group": "mine"}], [entry | {"reason": ""}]):
        with pytest.raises(ValueError, match="stands twice|group"):
            suite.expected({"expected": odd})


def test_what_the_table_does_not_say_is_told():
    listed = {"a": ("other", "so"), "b": ("other", "so"), "e": ("by design", "so")}
    found = {"a": row("failed"), "b": row("passed"), "c": row("failed", "x\ny"), "d": row("passed")}
    told = suite.differences(found, listed)
    assert told == [
        "passes, but stands in the table: b",
        "not in the table: c: ['x']",
    ]
    text, kept = suite.summary(found, listed)
    assert kept == 2 and text.startswith("4 cases: 2 pass, 2 fail, 0 skip")


def test_a_failure_of_any_phase_is_one_of_the_test(tmp_path):
    lines = [
        {"test": "a"} | row("passed"),
        {"test": "a"} | row("failed"),
        {"test": "b"} | row("passed"),
    ]
    (tmp_path / "r").write_text("\n".join(map(json.dumps, lines)))
    found = suite.outcomes(tmp_path / "r")
    assert {name: each["outcome"] for name, each in found.items()} == {"a": "failed", "b": "passed"}
    assert suite.outcomes(tmp_path / "none") == {}


def test_cells_and_their_failures(tmp_path):
    cell = lambda text: {"cell_type": "code", "source": [text]}  # noqa: E731
    cells = [cell("%pip install x\na = 1"), cell("assert a == 2"), {"cell_type": "markdown"}]
    cells += [cell("%%time\nb = a + 1"), cell("raise OSError('no huggingface.co')"), cell("b + c")]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    failed = demos.run(tmp_path / "n.ipynb")
    assert [(place, kind) for place, kind, _ in failed] == [
        (1, "ours"),
        (3, "network"),
        (4, "ours"),
    ]
    assert failed[2][2] == "NameError: name 'c' is not defined (n[4]:1)"


def test_another_archive_is_refused(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(b"no")
    with pytest.raises(ValueError, match="has the SHA-256"):
        sdist.unpacked(tmp_path / "x.tar.gz", tmp_path)
    assert sdist.unpacked(tmp_path, tmp_path) == tmp_path


@pytest.mark.slow
def test_some_of_transformerlens_own_tests(tmp_path, monkeypatch):
    try:
        source = sdist.unpacked(None, tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    words = tmp_path / "tokenizer.json"
    words.write_text(sdist.tokenizer(sdist.words(source)))
    monkeypatch.setenv("TL_TOKENIZER", str(words))
    suite.run(source, FAST, 0, tmp_path / "report")
    found = suite.outcomes(tmp_path / "report")
    assert len(found) > 40 and sum(each["ours"] for each in found.values()) > 20
    assert suite.differences(found, suite.expected(TABLE)) == []
