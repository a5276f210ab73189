"""SIGKILLs of a sweep and an audit that go on; `make kill` has 20 of each on 5,000 images."""

import pytest

import kill_runs


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sweep", "audit"])
def test_three_kills_at_random_moments(verb):
    counts = kill_runs.run(verb, 600, 3)
    assert counts["kills"] == 3 and counts["chunks"] >= 11
