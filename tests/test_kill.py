"""A few SIGKILLs of everything that writes a folder; `make kill` has 200."""

import pytest

import kill

SLOW = {"report", "audit", "atlas", "convert"}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in kill.CASES]
)
def test_a_killed_writer_leaves_one_of_two_wholes_or_nothing_that_loads(case):
    left = [0]
    verdicts = kill.run(case, 5, left, timed=False)
    assert left == [0]
    assert set(verdicts) <= {"the-old", "the-new", "refused"}, verdicts
