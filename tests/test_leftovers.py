"""What dead processes leave in a folder goes at its next run; what living ones write stays."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

import crate_interp as ci
from crate_interp.core.files import own_name, write, write_text
from folders import leftovers
from killing import died_at
from test_chunks import CHUNKS, WHOLE, run


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


def test_dead_stages_go_and_folders_of_the_user_stay(tmp_path):
    dead = tmp_path / own_name(".crate-interp-new-")
    own = tmp_path / ".crate-interp-new-drafts"
    for folder in (dead, own):
        folder.mkdir()
        (folder / "a.txt").write_text("half")
    run(tmp_path)
    assert not dead.exists() and (own / "a.txt").read_text() == "half"


# --- single files ---


def test_what_a_dead_writer_left_of_a_file_goes(tmp_path):
    path, ours = tmp_path / "page.html", f"-{os.getpid()}-"
    died = subprocess.Popen(["true"])
    died.wait()
    dead, living, elsewhere, other = (
        tmp_path / own_name(f".{name}.html.", ".part") for name in ("page", "page", "page", "other")
    )
    dead = dead.with_name(dead.name.replace(ours, f"-{died.pid}-"))
    other = other.with_name(other.name.replace(ours, f"-{died.pid}-"))
    elsewhere = elsewhere.with_name(f".page.html.0a1b2c3d-{died.pid}-0a1b2c3d.part")
    stays = [living, elsewhere, other]
    stays += [tmp_path / name for name in ("mine.part", ".page.html.abc.part", ".page.html.part")]
    for part in (dead, *stays):
        part.write_text("half")
    write_text(path, "whole")
    assert not dead.exists() and all(part.exists() for part in stays)
    with pytest.raises(ZeroDivisionError):
        write(path, lambda part: 1 / 0)
    assert path.read_text() == "whole" and len(list(tmp_path.iterdir())) == 1 + len(stays)


# --- files that a caller asked for ---


WRITERS = {
    "page.html": lambda path: ci.viz.pages.page.Html("title", "text").save(path),
    "circuit.json": lambda path: ci.circuits.Circuit([]).save(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_write_that_fails_leaves_the_older_file(name, tmp_path, monkeypatch):
    path = tmp_path / name
    WRITERS[name](path)
    content = path.read_bytes()
    path.write_bytes(b"older")

    def full(self, data, *args, **options):
        with open(self, "wb") as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            WRITERS[name](path)
    assert path.read_bytes() == b"older" and list(path.parent.iterdir()) == [path]
    WRITERS[name](path)
    assert path.read_bytes() == content
