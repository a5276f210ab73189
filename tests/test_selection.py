"""Which tests a run has: every slow test is in one sixteenth, and all workers agree on it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chromium
import scheduling
import selection

NAME = Path(__file__).name

IDS = [f"tests/test_notebooks.py::test_it_runs[{number:02}]" for number in range(997)]


@pytest.fixture(autouse=True)
def default(monkeypatch):
    for name in ("CRATE_SLOW", "CRATE_PROFILE", "CRATE_BROWSER"):
        monkeypatch.delenv(name, raising=False)


def test_every_slow_test_is_in_one_sixteenth(monkeypatch):
    runs = []
    for sixteenth in selection.SIXTEENTHS:
        monkeypatch.setenv("CRATE_SLOW", sixteenth)
        runs.append({nodeid for nodeid in IDS if selection.is_run(nodeid, slow=True)})
        assert all(selection.is_run(nodeid, slow=False) for nodeid in IDS)
        assert abs(len(runs[-1]) - 997 / 16) < 5 * (997 * 15 / 256) ** 0.5  # binomial
    assert sum(map(len, runs)) == 997 and set().union(*runs) == set(IDS)


def two_workers(folder, *options, **environment):
    """What pytest prints of the tests in a folder, in a process of its own with two workers."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    here = os.path.dirname(selection.__file__)
    # other plugins take seconds to import
    settings = {"PYTHONPATH": here, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", *options, str(folder)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | settings, cwd=folder
    )


@pytest.mark.slow
def test_a_run_deselects_and_does_not_skip(tmp_path):
    """With two workers that must collect the same tests."""
    hooks = "pytest_collection_modifyitems, pytest_report_header"
    (tmp_path / "conftest.py").write_text(f"from selection import {hooks}  # noqa: F401\n")
    body = "import pytest\n\n\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(40))\n"
    (tmp_path / "test_a.py").write_text(f"{body}def test_slow(n):\n    pass\n")
    done = two_workers(tmp_path, CRATE_SLOW="1")
    count = sum(
        selection.sixteenth_of(f"test_a.py::test_slow[{number}]") == "1" for number in range(40)
    )
    assert f"{count} passed" in done.stdout and "skipped" not in done.stdout, done.stdout
    assert "slow tests: CRATE_SLOW=1" in done.stdout


@pytest.mark.slow
def test_a_file_whose_tests_share_something_slow_runs_on_one_worker(tmp_path):
    hook = "from scheduling import pytest_xdist_make_scheduler  # noqa: F401\n"
    (tmp_path / "conftest.py").write_text(hook)
    body = "import pytest\nimport time\n\n\n@pytest.mark.parametrize('n', range(9))\n"
    for name in ("test_pages.py", "test_a.py"):
        (tmp_path / name).write_text(f"{body}def test_it(n):\n    time.sleep(0.01)\n")
    done = two_workers(tmp_path, "-v", "--dist", "loadgroup")
    ran = re.findall(r"\[(gw\d)\].*PASSED (test_\w+\.py)", done.stdout)
    workers = {name: {worker for worker, file in ran if file == name} for _, name in ran}
    assert len(ran) == 18, done.stdout
    assert len(workers["test_pages.py"]) == 1
    here = Path(selection.__file__).parent
    assert all((here / name).exists() for name in scheduling.WHOLE)


def names_of_tests(path):
    """The tests of a file, and those of them that look at pages in a browser."""
    functions = [node for node in ast.parse(path.read_text()).body if type(node) is ast.FunctionDef]
    arguments = {node.name: {argument.arg for argument in node.args.args} for node in functions}
    shown = {"driven"}
    for _ in functions:  # a fixture that takes the browser hands it on
        shown |= {name for name, taken in arguments.items() if taken & shown}
    shown |= {node.name for node in functions if "require()" in ast.unparse(node)}
    tests = {name for name in arguments if name.startswith("test_")}
    return tests, tests & shown


def test_the_list_of_skips_has_every_test_of_a_page_and_no_test_that_is_gone():
    here = Path(selection.__file__).parent
    listed = set(re.findall(r"`(test_\w+)`", (here / "SKIPS.md").read_text()))
    found = [names_of_tests(path) for path in here.rglob("test_*.py") if path.name != NAME]
    assert listed <= set().union(*(tests for tests, _ in found))
    in_browser = set().union(*(shown for _, shown in found))
    assert in_browser <= listed and len(in_browser) > 30


def test_continuous_integration_asks_for_a_browser():
    root = Path(selection.__file__).parent.parent
    assert "bash tests/install_chromium.sh" in (root / "Makefile").read_text()
    script = (root / "tests" / "install_chromium.sh").read_text()
    assert " ".join(chromium.NAMES) in script
    run = (root / ".ci" / "run").read_text()
    assert 'export CRATE_BROWSER="${CRATE_BROWSER:-required}"' in run
