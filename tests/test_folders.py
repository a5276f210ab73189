"""Folders are whole or refused: at every step of a save, for every writer, in every old folder."""

import shutil
import subprocess
import sys

import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import FIXTURES, make, refuses
from crate_interp.core.files import write_text
from crate_interp.core.folders import listed, replacing
from folders import files_of, two_sweeps
from killing import died_at

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
@pytest.mark.parametrize("kind", ["save", pytest.param("pages", marks=pytest.mark.slow)])
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
