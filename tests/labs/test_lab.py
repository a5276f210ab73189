"""What the labs share: claims, kept steps, the command."""

import math

import lab
import pytest


def row(**changes):
    given = dict(answer="supported", why="It is.", size="published size") | changes
    return lab.claim("One is one.", "nowhere, eq. 1", 1.0, **given)


def test_a_claim_says_its_answer_and_names_its_baseline():
    assert list(row()) == lab.CLAIMS
    assert row(baseline=0.5, baseline_is="chance")["baseline_is"] == "chance"
    with pytest.raises(ValueError, match="answer='yes': give one of supported"):
        row(answer="yes")
    with pytest.raises(ValueError, match=r"baseline=0.5 of ''"):
        row(baseline=0.5)
    with pytest.raises(ValueError, match="of 'chance'"):
        row(baseline_is="chance")


def test_an_interval_is_students():
    mean, (low, high) = lab.mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert high - mean == pytest.approx(4.302653 / math.sqrt(3)) == mean - low
    assert all(math.isnan(end) for end in lab.mean_and_interval([1.0])[1])


def test_steps_are_done_once_and_belong_to_their_settings(tmp_path):
    done = []
    for _ in range(2):
        steps = lab.Steps(tmp_path / "steps", form="quick")
        assert steps.do("one", lambda: done.append(1) or {"a": (1, 2)}) == {"a": [1, 2]}
    assert len(done) == 1
    with pytest.raises(SystemExit, match="was made with"):
        lab.Steps(tmp_path / "steps", form="full").do("one", lambda: 2)
    assert lab.Steps(None).do("one", lambda: (3,)) == [3]


def test_the_command_prints_and_writes(tmp_path, capsys):
    from matplotlib import pyplot

    def run(form, steps):
        """A lab."""
        return lab.result("one", form, "One is one.", [row()], [("x", "a", 0, 1, 2.0)])

    found = lab.main(run, lambda result: pyplot.figure(), ["--out", str(tmp_path)])
    assert "One is one." in capsys.readouterr().out and (tmp_path / "one.png").exists()
    again = lab.LabResult.load(tmp_path)
    assert again.headline() == found.headline() and again.digest() == found.digest()
    assert again.numbers("x", setting="a")["value"].tolist() == [2.0]
