"""Runs some test files whole on one worker, because their tests share what takes long to make.

pytest-xdist 3.8 has marks for this, but its groups do nothing with pytest 9.2: it writes them where
pytest no longer reads the id of a test.
"""

import pytest

# their tests share a report, an audit, a page or a running browser
WHOLE = (
    "test_audit_numbers.py",
    "test_answer_pages.py",
    "test_explore_page.py",
    "test_graph_page.py",
    "test_pages.py",
)


def unit_of(nodeid: str) -> str:
    """Returns what one worker runs as a whole: a file of WHOLE, else the test alone."""
    file = nodeid.split("::")[0]
    return file if file.rsplit("/")[-1] in WHOLE else nodeid


@pytest.hookimpl(optionalhook=True)  # there is no such hook without pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """Hands out tests in the units above; conftest.py imports this hook."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit_of(nodeid)

    return Units(config, log)
