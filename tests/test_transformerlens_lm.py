"""TransformerLens' own tests on our models: some of them, and the table of what fails."""

import tomllib
from pathlib import Path

import pytest

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


def test_each_expected_failure_has_a_group_a_reason_and_a_file():
    listed = suite.expected(TABLE)
    counted = [test for test, (group, _) in listed.items() if group in suite.COUNTED]
    assert len(counted) <= suite.AT_MOST
    for test in listed:
        assert any(test.startswith(file) for file in TABLE["files"]), test
    assert len((HERE / "transformerlens_shim.py").read_text().splitlines()) <= 120


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
