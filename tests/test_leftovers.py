"""What dead processes leave in a folder goes at its next run; what living ones write stays."""

import subprocess
import sys

from crate_interp.core.files import own_name
from folders import leftovers
from killing import died_at
from test_ledgers import CHUNKS, HOLDER, WHOLE, run


def test_a_run_that_dies_at_any_step_leaves_nothing_behind(tmp_path):
    """The next run goes on or starts over: all that the dead one wrote is known to be ours."""
    seen, step, died = set(), 0, True
    while died:
        out = tmp_path / str(step)
        died = died_at(step, lambda out=out: run(out, until=1))
        seen |= {path.suffix for path in leftovers(out)}
        if step % 2:
            assert run(out, resume=False) == (WHOLE, CHUNKS)
        else:
            assert run(out)[0] == WHOLE
        assert not leftovers(out)
        step += 1
    assert step > 15 and {".part", ".lock"} <= seen


def test_locks_of_dead_shards_go_and_those_of_living_ones_stay(tmp_path):
    tmp_path.joinpath("chunks").mkdir()
    place = tmp_path / ".crate-interp-shard-2-of-3.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, place], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    try:
        run(tmp_path, shard="0/3")
        assert leftovers(tmp_path) == [place]
    finally:
        holder.kill()
        holder.communicate()
    run(tmp_path, shard="1/3")
    assert not leftovers(tmp_path)


def test_dead_stages_go_and_folders_of_the_user_stay(tmp_path):
    dead = tmp_path / own_name(".crate-interp-new-")
    own = tmp_path / ".crate-interp-new-drafts"
    for folder in (dead, own):
        folder.mkdir()
        (folder / "a.txt").write_text("half")
    run(tmp_path)
    assert not dead.exists() and (own / "a.txt").read_text() == "half"
