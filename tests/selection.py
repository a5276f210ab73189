"""Which slow tests a run has, how many examples hypothesis draws, and which oracles are recomputed.

Four environment variables choose, so that every worker of pytest-xdist chooses the same:

CRATE_SLOW         "none" (default), "all", or "0" to "15": the tests marked slow that are run
CRATE_PROFILE      "quick" (default, 25 examples) or "thorough" (200): the profile of hypothesis
CRATE_ORACLE_SEED  any text (default: the date): which tenth of the recorded oracles is recomputed
CRATE_BROWSER      "optional" (default) or "required": tests of pages skip or fail without one
"""

import os
import zlib
from collections.abc import Iterable
from datetime import date

import pytest

EXAMPLES = {"quick": 25, "thorough": 200}
SIXTEENTHS = tuple(map(str, range(16)))

# Workers start with the environment of the process that starts them: all of them keep its date.
os.environ.setdefault("CRATE_ORACLE_SEED", date.today().isoformat())


def _chosen(name: str, choices: tuple[str, ...]) -> str:
    value = os.environ.get(name) or choices[0]
    if value not in choices:
        raise ValueError(f"{name}={value}: give one of {', '.join(choices)}")
    return value


def profile() -> str:
    """Returns the profile of hypothesis; raises ValueError if CRATE_PROFILE names no profile."""
    return _chosen("CRATE_PROFILE", tuple(EXAMPLES))


def sixteenth() -> str:
    """Returns "none", "all" or a sixteenth; raises ValueError if CRATE_SLOW is something else."""
    return _chosen("CRATE_SLOW", ("none", "all", *SIXTEENTHS))


def needs_browser() -> bool:
    """Returns whether a missing browser is a failure; raises ValueError for other values."""
    return _chosen("CRATE_BROWSER", ("optional", "required")) == "required"


def sixteenth_of(nodeid: str) -> str:
    """Returns the sixteenth of a test."""
    return str(zlib.crc32(nodeid.encode()) % len(SIXTEENTHS))


def is_run(nodeid: str, slow: bool) -> bool:
    """Returns whether this run has the test."""
    return not slow or sixteenth() in ("all", sixteenth_of(nodeid))


def few(values: Iterable, count: int = 1) -> list:
    """Returns values for parametrize; all but the first `count` are slow."""
    values = list(values)
    return few_of(values, values[:count])


def few_of(values: Iterable, quick: Iterable) -> list:
    """Returns values for parametrize; all but those of `quick` are slow."""
    return [pytest.param(one, marks=[pytest.mark.slow] * (one not in quick)) for one in values]


def is_recomputed(case: str) -> bool:
    """Returns whether this run computes a recorded oracle again: one in ten."""
    return zlib.crc32(f"{os.environ['CRATE_ORACLE_SEED']} {case}".encode()) % 10 == 0


def pytest_collection_modifyitems(config, items) -> None:
    """Deselects the slow tests that this run does not have; conftest.py imports this hook."""
    run = [is_run(item.nodeid, item.get_closest_marker("slow") is not None) for item in items]
    config.hook.pytest_deselected(items=[i for i, kept in zip(items, run, strict=True) if not kept])
    items[:] = [item for item, kept in zip(items, run, strict=True) if kept]


def pytest_report_header() -> list[str]:
    """Returns the choices of this run as lines that can be copied in front of a command."""
    return [
        f"slow tests: CRATE_SLOW={sixteenth()}",
        f"hypothesis: CRATE_PROFILE={profile()}, {EXAMPLES[profile()]} examples",
        f"recomputed oracles: CRATE_ORACLE_SEED={os.environ['CRATE_ORACLE_SEED']}",
        f"tests of pages: CRATE_BROWSER={'required' if needs_browser() else 'optional'}",
    ]
