"""A few SIGKILLs of what writes a folder, and of runs that go on; `make kill` has 240."""

import pytest

import kill
import kill_runs

SLOW = {"report", "audit", "atlas", "convert"}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in kill.CASES]
)
def test_a_killed_writer_leaves_one_of_two_wholes_or_nothing_that_loads(case):
    left = [0]
    verdicts = kill.run(case, 5, left, timed=False)
    assert left == [0]
    assert set(verdicts) <= {"the-old", "the-new", "refused"}, verdicts


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sweep", "audit"])
def test_three_kills_of_a_run_at_random_moments(verb):
    counts = kill_runs.run(verb, 600, 3)
    assert counts["kills"] == 3 and counts["chunks"] >= 11
