"""Which tests a run has: every slow test is in one eighth, and all workers agree on it."""

import os
import subprocess
import sys

import pytest
from hypothesis import settings

import selection

IDS = [f"tests/test_notebooks.py::test_it_runs[{number:02}]" for number in range(997)]


@pytest.fixture(autouse=True)
def default(monkeypatch):
    for name in ("CRATE_SLOW", "CRATE_PROFILE"):
        monkeypatch.delenv(name, raising=False)


def test_every_slow_test_is_in_one_eighth(monkeypatch):
    runs = []
    for eighth in selection.EIGHTHS:
        monkeypatch.setenv("CRATE_SLOW", eighth)
        runs.append({nodeid for nodeid in IDS if selection.is_run(nodeid, slow=True)})
        assert all(selection.is_run(nodeid, slow=False) for nodeid in IDS)
        assert abs(len(runs[-1]) - 997 / 8) < 5 * (997 * 7 / 64) ** 0.5  # binomial
    assert sum(map(len, runs)) == 997 and set().union(*runs) == set(IDS)


def test_none_and_all(monkeypatch):
    assert not any(selection.is_run(nodeid, slow=True) for nodeid in IDS)
    monkeypatch.setenv("CRATE_SLOW", "all")
    assert all(selection.is_run(nodeid, slow=True) for nodeid in IDS)


def test_the_eighth_is_that_of_the_id_without_its_group():
    assert selection.eighth_of(IDS[0]) == selection.eighth_of(IDS[0] + "@notebooks")
    assert selection.eighth_of("tests/test_hostile.py::test_a") == "1"  # in every process


def test_a_tenth_of_the_oracles_is_recomputed(monkeypatch):
    tenths = {}
    for seed in ("2026-11-22", "2026-11-23"):
        monkeypatch.setenv("CRATE_ORACLE_SEED", seed)
        tenths[seed] = {nodeid for nodeid in IDS if selection.is_recomputed(nodeid)}
        assert abs(len(tenths[seed]) - 99.7) < 5 * (997 * 9 / 100) ** 0.5
    assert tenths["2026-11-22"] != tenths["2026-11-23"]


@pytest.mark.parametrize("name", ["CRATE_SLOW", "CRATE_PROFILE"])
def test_other_values_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "half")
    with pytest.raises(ValueError, match=f"{name}=half: give one of "):
        selection.pytest_report_header()


def test_the_header_gives_the_choices_back(monkeypatch):
    monkeypatch.setenv("CRATE_ORACLE_SEED", "7")
    monkeypatch.setenv("CRATE_SLOW", "3")
    assert selection.pytest_report_header() == [
        "slow tests: CRATE_SLOW=3",
        "hypothesis: CRATE_PROFILE=quick, 25 examples",
        "recomputed oracles: CRATE_ORACLE_SEED=7",
    ]


def test_a_run_deselects_and_does_not_skip(tmp_path):
    """In a process of its own, with two workers that must collect the same tests."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    hooks = "pytest_collection_modifyitems, pytest_report_header"
    (tmp_path / "conftest.py").write_text(f"from selection import {hooks}  # noqa: F401\n")
    body = "import pytest\n\n\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(40))\n"
    (tmp_path / "test_a.py").write_text(f"{body}def test_slow(n):\n    pass\n")
    here = os.path.dirname(selection.__file__)
    environment = os.environ | {"CRATE_SLOW": "1", "PYTHONPATH": here}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take seconds to import
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    count = sum(
        selection.eighth_of(f"test_a.py::test_slow[{number}]") == "1" for number in range(40)
    )
    assert f"{count} passed" in done.stdout and "skipped" not in done.stdout, done.stdout
    assert "slow tests: CRATE_SLOW=1" in done.stdout


def test_hypothesis_has_the_profile():
    assert settings.default.max_examples in selection.EXAMPLES.values()
    assert settings.default.deadline is None
