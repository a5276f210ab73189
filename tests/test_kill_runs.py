"""SIGKILLs of a sweep and an audit that go on; `make kill` has 20 of each on 5,000 images."""

import pytest

import kill_runs
from killing import died_at
from working import CHUNK, digest, work


@pytest.mark.slow
def test_a_killed_sweep_goes_on_to_the_same_result(tmp_path):
    wanted = digest(work("sweep", 103))
    assert died_at(20, lambda: work("sweep", 103, out=tmp_path / "out"))
    there = list((tmp_path / "out" / "chunks").glob("*.parquet"))
    assert len(there) == 1 < 103 / CHUNK
    assert digest(work("sweep", 103, out=tmp_path / "out")) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sweep", "audit"])
def test_three_kills_at_random_moments(verb):
    counts = kill_runs.run(verb, 600, 3)
    assert counts["kills"] == 3 and counts["chunks"] >= 11
