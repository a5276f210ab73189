"""Folders are whole or refused, for every writer, and nothing of the user is removed."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crate_interp as ci
import kill
import kill_runs
from conftest import FIXTURES, make, refuses
from crate_interp.core.files import write_text
from crate_interp.core.folders import LOCK, listed, replacing
from crate_interp.questions.chunks import InFolder
from folders import files_of, leftovers, two_sweeps
from killing import died_at
from selection import few_of
from test_chunks import CHUNKS, WHOLE, run

INDEX = "meta.json"
CHAT = FIXTURES / "nanochat_crate_alpha"


def put(folder, content, **files):
    with replacing(folder, INDEX, {"run": content}) as stage:
        for name, text in files.items():
            place = stage / name.replace("__", "/")
            place.parent.mkdir(exist_ok=True)
            write_text(place.with_suffix(".txt"), text)


@pytest.fixture(scope="module")
def sweeps():
    return two_sweeps()


def test_files_take_their_place_together(tmp_path):
    out = tmp_path / "deep" / "er"
    put(out, 1, a="1", b="2", figures__c="3")
    assert set(files_of(out)) == {"a.txt", "b.txt", "figures/c.txt", INDEX}
    assert set(listed(out / INDEX)) == {"a.txt", "b.txt", "figures/c.txt"}
    (out / "mine.docx").write_text("kept")
    before = files_of(out)
    with pytest.raises(ZeroDivisionError), replacing(out, INDEX, {}) as stage:
        (stage / "a.txt").write_text("other")
        _ = 1 / 0
    assert files_of(out) == before  # nothing has changed, and nothing is left of the stage
    put(out, 2, a="1", d="4")
    assert set(files_of(out)) == {"a.txt", "d.txt", INDEX, "mine.docx"}
    assert not (out / "figures").exists()


def steps_of(old, work, judge, tmp_path):
    """Lets `work` die at each of its steps over a copy of an old folder; returns the verdicts."""
    verdicts, step = [], 0
    while True:
        out = tmp_path / f"step-{step}"
        shutil.copytree(old, out)
        died = died_at(step, lambda out=out: work(out))
        verdicts.append(judge(out))
        assert not any(name.endswith(".part") for name in files_of(out)) or died
        if not died:
            return verdicts
        work(out)  # and the next run goes through, whatever the dead one left
        assert judge(out) == "new"
        assert not [path for path in out.iterdir() if path.name.startswith(".")]
        step += 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["save", "pages"])
def test_a_result_that_dies_at_any_step_is_one_of_two_wholes_or_refused(sweeps, kind, tmp_path):
    first, second = sweeps

    def work(out, result=second):
        if kind == "save":
            result.save(out)
            return
        with result.saved_with_pages(out) as stage:
            write_text(stage / "page.html", result.meta["model"])

    def judge(out):
        try:
            loaded = ci.SweepResult.load(out)
        except ValueError as error:
            assert "a save that was interrupted" in str(error).lower() and "\n" not in str(error)
            return "refused"
        name = "old" if loaded.meta["model"] == first.meta["model"] else "new"
        wanted = first if name == "old" else second
        for table in wanted.STORED:
            pd.testing.assert_frame_equal(loaded.stored[table], wanted.stored[table])
        for page in out.glob("*.html"):
            assert page.read_text() == loaded.meta["model"]
        return name

    with first.saved_with_pages(tmp_path / "old") as stage:
        write_text(stage / "page.html", first.meta["model"])
        write_text(stage / "more.html", first.meta["model"])
    verdicts = steps_of(tmp_path / "old", work, judge, tmp_path)
    assert {"old", "refused", "new"} == set(verdicts) and len(verdicts) > 15
    assert verdicts[-1] == "new"


def test_files_of_two_saves_are_not_one_model(tmp_path):
    one = make("crate").save_pretrained(tmp_path / "one")
    two = make("crate", seed=1, eta=0.2).save_pretrained(tmp_path / "two")
    shutil.copy(two / "config.json", one / "config.json")
    with pytest.raises(ci.CheckpointError, match="model.safetensors does not belong to .*config"):
        ci.load(one)
    chat = ci.load(CHAT).save_pretrained(tmp_path / "chat")
    (chat / "tokenizer.json").write_text("{}")
    refuses("tokenizer.json does not belong to", lambda: ci.load(chat), ci.CheckpointError)


def test_the_same_result_again_keeps_its_pages(sweeps, tmp_path):
    with sweeps[0].saved_with_pages(tmp_path) as stage:
        write_text(stage / "page.html", "of the first")
    sweeps[0].save(tmp_path)
    assert (tmp_path / "page.html").exists() and "page.html" in listed(tmp_path / INDEX)
    sweeps[1].save(tmp_path)
    assert not (tmp_path / "page.html").exists()


HOLDER = """
import sys, time
from crate_interp.core.folders import replacing
with replacing(sys.argv[1], "meta.json", {}) as stage:
    (stage / "a.txt").write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_second_writer_is_refused_and_a_dead_one_is_not(sweeps, tmp_path):
    sweeps[0].save(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout and holder.stdout.readline() == "ready\n"
            words = "is being written by another process, wait until it ends"
            refuses(words, lambda: sweeps[1].save(tmp_path))
            data = torch.randn(2, 3, 6, 20)
            refuses(words, lambda: ci.report(make(), data, tmp_path))
            refuses(words, lambda: make().save_pretrained(tmp_path))
            assert ci.SweepResult.load(tmp_path).meta == sweeps[0].meta
        finally:
            holder.kill()
    assert any(path.name.startswith(".crate-interp-new-") for path in tmp_path.iterdir())
    sweeps[1].save(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert ci.SweepResult.load(tmp_path).meta == sweeps[1].meta


QUIET = {"progress": False}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sweeps):
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("whole")
    run(out)
    sweeps[0].save(out)
    return out


# --- what was lost before ---


@pytest.mark.parametrize("name", ["samples.parquet", "report.html", "summary.txt"])
def test_a_report_replaces_no_file_of_another(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match=f"did not write.*{name!r}"):
        ci.report(make(), torch.rand(2, 3, 6, 20), tmp_path, **QUIET)
    assert set(files_of(tmp_path)) == {name}


# --- links ---


@pytest.mark.parametrize(
    "name",
    ["run.json", "chunks/sweep-000002.parquet", "chunks/sweep.json", "chunks",
     "chunks/shard-0-of-1.lock", ".crate-interp-fold.lock"],
)  # fmt: skip
@pytest.mark.parametrize("resume", [True, False])
def test_nothing_is_written_through_a_link(tmp_path, name, resume):
    out, victim = tmp_path / "out", tmp_path / "victim"
    run(out, until=2)
    path = out / name
    if name == "chunks":
        path.rename(victim)
    else:
        victim.write_text("precious")
        path.unlink(missing_ok=True)
    path.symlink_to(victim)
    before = files_of(victim) if name == "chunks" else victim.read_text()
    refuses(f"{name}' is a link.*remove it", lambda: run(out, resume=resume))
    assert before == (files_of(victim) if name == "chunks" else victim.read_text())
    assert path.is_symlink()


# --- names that we look for, as what the user may have there ---

NAMES = [
    "chunks/thesis.txt", "chunks/sweep-000000+4.parquet", "chunks/sweep-000009.parquet",
    "chunks/sweep.json", "chunks/.x.part", "run.json", ".run.json.host-7.part", "meta.json",
    "samples.parquet", ".samples.parquet.abc.part", ".crate-interp-new-a",
]  # fmt: skip
CONTENTS = ["precious", "{}", '{"files": {}}', '{"stage": "sweep"}\n', '{"stage": 1}', "[]\n\n"]
ENTRIES = st.tuples(
    st.sampled_from(NAMES), st.sampled_from(["file", "link", "folder"]),
    st.sampled_from(CONTENTS), st.booleans(),
)  # fmt: skip


def placed(out, name, kind, content, over):
    """Puts something of the user's into a folder; returns a test of whether it is still there."""
    path, victim = out / name, out.parent / "victim"
    if os.path.lexists(path):
        if not over:
            return lambda: True
        path.unlink()
    if kind == "file":
        path.write_text(content)
        return lambda: content.encode() in files_of(out).values()
    if kind == "folder":
        path.mkdir()
        (path / "thesis.txt").write_text(content)
        return lambda: (path / "thesis.txt").read_text() == content
    victim.write_text("precious")
    path.symlink_to(victim)
    return lambda: path.is_symlink() and victim.read_text() == "precious"


def failing(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InFolder, "ended", lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            run(out)


ACTIONS = {
    "resume": run,
    "restart": lambda out: run(out, resume=False),
    "another shard": lambda out: run(out, shard="1/2"),
    "failing": failing,
    "save": lambda out: SAVED[-1].save(out),
}
SAVED = []


@settings(max_examples=settings.default.max_examples * 2)
@given(st.lists(ENTRIES, min_size=1, max_size=3), st.lists(st.sampled_from([*ACTIONS]), max_size=3))
def test_all_of_the_users_is_there_whatever_happens(
    tmp_path_factory, whole, sweeps, entries, actions
):
    SAVED[:] = sweeps[1:]
    place = tmp_path_factory.mktemp("place")
    out = place / "out"
    shutil.copytree(whole, out)
    if len(entries) > 1:  # a part of the chunks is missing
        (out / "chunks" / "sweep-000000+4.parquet").unlink()
    there = {
        entry: placed(out, *entry) for entry in dict((one[0], one) for one in entries).values()
    }
    for action in ("resume", *actions, "restart"):
        try:
            ACTIONS[action](out)
        except ValueError as error:
            assert "\n" not in str(error), error
        for entry, is_there in there.items():
            assert is_there(), (action, entry)
    shutil.rmtree(place)


# --- what lies in a folder before it is written ---


def victim(tmp_path):
    """A file outside of the folder that is written, and one of the user's inside of it."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "x.png").write_text("precious")
    out = tmp_path / "runs" / "out"
    out.mkdir(parents=True)
    (out / "thesis.docx").write_text("precious too")
    return out


def test_nothing_outside_is_removed_by_names_in_an_old_folder(sweeps, tmp_path):
    out = victim(tmp_path)
    outside = tmp_path / "victim" / "x.png"
    names = ["../../victim/x.png", str(outside), "figures/../../../victim/x.png", "thesis.docx"]
    names += [LOCK, "", ".", "..", "\0.png", "a\\..\\x.png"]
    meta = {"result": "sweep", "format": 1, "files": dict.fromkeys(names, "sha256:0")}
    for content in (meta, meta | {"statistics": {"../../victim/x": 3}}):
        (out / "meta.json").write_text(json.dumps(content))
        sweeps[0].save(out)
        assert ci.SweepResult.load(out).meta == sweeps[0].meta
    assert outside.read_text() == "precious" and (out / "thesis.docx").exists()


def test_what_somebody_else_wrote_is_not_lost(sweeps, tmp_path):
    (tmp_path / "meta.json").write_text('{"mine": 1}')
    refuses("holds the meta.json of .* which would be lost", lambda: sweeps[0].save(tmp_path))
    (tmp_path / "meta.json").write_text('{"result": "audit", "format": 1}')
    refuses(
        "holds the meta.json of a result of kind 'audit', which would be lost",
        lambda: sweeps[0].save(tmp_path),
    )
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "vit"}')
    (other / "tokenizer.json").write_text("{}")
    refuses("holds a config.json of another library", lambda: make().save_pretrained(other))
    assert set(files_of(other)) == {"config.json", "tokenizer.json"}
    (tmp_path / "meta.json").unlink()
    with sweeps[0].saved_with_pages(tmp_path) as stage:
        write_text(stage / "page.html", "ours")
        write_text(stage / "notes.txt", "ours")
    (tmp_path / "notes.txt").write_text("the user's by now")
    sweeps[1].save(tmp_path)
    assert (tmp_path / "notes.txt").exists() and not (tmp_path / "page.html").exists()


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


@pytest.mark.parametrize("case", few_of(kill.CASES, ["save_pretrained"]))
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
