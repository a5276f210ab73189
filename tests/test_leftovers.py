"""What dead processes leave in a folder goes at its next run; what living ones write stays."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import crate_interp as ci
from conftest import make
from crate_interp.core.files import own_name, unfinished, write_text
from crate_interp.core.folders import replacing
from folders import leftovers, two_sweeps
from killing import died_at
from selection import few
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


@pytest.mark.parametrize("resume", few([True, False]))
def test_a_store_that_dies_at_any_step_leaves_nothing_behind(tmp_path, resume):
    out, model, images = tmp_path / "s", make(n_layers=1), torch.rand(13, 3, 6, 20)

    def work(resume=True):
        point, quiet = "blocks.0.hook_resid_post", {"progress": False, "resume": resume}
        ci.store(model, images, points=point, out=out, chunk_size=7, **quiet)

    died = 0
    for step in (7, 10, 12, 14, 17):
        shutil.rmtree(out, ignore_errors=True)
        died += died_at(step, work)
        work(resume)
        assert not leftovers(out) and ci.open_store(out)["sample"][:] == list(range(13))
    assert died > 3


VERBS = {
    "atoms": lambda *given, **run: ci.atoms(*given, **run).digest(),
    "sweep": lambda *given, **run: ci.sweep(*given, probes="sparsity", controls=0, **run).digest(),
}


@pytest.mark.parametrize("verb", few(VERBS))
def test_a_measurement_that_dies_leaves_nothing_behind(tmp_path, verb):
    model, images = make(n_layers=1), torch.rand(5, 3, 6, 20)

    def work(out):
        return VERBS[verb](model, images, out=out, chunk_size=3, progress=False)

    wanted, died = work(tmp_path / "whole"), 0
    for step in (9, 12, 16):
        out = tmp_path / str(step)
        died += died_at(step, lambda out=out: work(out))
        assert work(out) == wanted and not leftovers(out)
    assert died == 3


@pytest.mark.slow
def test_the_next_run_of_a_folder_finishes_what_a_dead_save_left(tmp_path):
    first, second = two_sweeps()
    run(tmp_path / "old")
    first.save(tmp_path / "old")
    seen, died, step = set(), True, 0
    while died:
        out = shutil.copytree(tmp_path / "old", tmp_path / str(step))
        died = died_at(step, lambda out=out: second.save(out))
        seen |= {path.name[:18] for path in leftovers(out)}
        run(out)
        if (out / "meta.json").exists():
            assert not leftovers(out)
        second.save(out)
        assert not leftovers(out) and ci.SweepResult.load(out).meta == second.meta
        step += 4
    assert {".crate-interp-new-", ".crate-interp-chan", ".crate-interp.lock"} <= seen


WRITER = """
import sys, time
from pathlib import Path
from crate_interp.core.files import unfinished
with unfinished(Path(sys.argv[1])) as part:
    part.write_text("half")
    print(part.name, flush=True)
    time.sleep(600)
"""


def test_what_a_living_process_writes_stays(tmp_path):
    command = [sys.executable, "-c", WRITER, tmp_path / "page.html"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            part = tmp_path / writer.stdout.readline().strip()
            os.utime(part, (0, 0))
            write_text(tmp_path / "page.html", "whole")
            run(tmp_path)
            assert part.read_text() == "half"
            with replacing(tmp_path, "meta.json", {}), unfinished(tmp_path / "other") as own:
                assert part.exists() and own.exists()
        finally:
            writer.send_signal(signal.SIGKILL)
    assert part.exists()
    run(tmp_path)
    assert not part.exists()


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
