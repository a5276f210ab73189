"""What lies in a folder before it is written: nothing of the user's is lost, no name leads out."""

import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import crate_interp as ci
from conftest import make
from crate_interp.core.files import write_text
from crate_interp.core.folders import LOCK, is_inside
from crate_interp.results import result_reading
from folders import files_of, two_sweeps
from selection import few

INDEX = "meta.json"


@pytest.fixture(scope="module")
def sweeps():
    return two_sweeps()


NAMES = st.lists(
    st.one_of(
        st.sampled_from(["..", ".", "", "a", "~", "\0", "C:", "a\\b", "x.png", "figures", LOCK]),
        st.text(st.characters(codec="utf-8"), max_size=5),
    ),
    min_size=1,
    max_size=6,
).map("/".join)


@given(NAMES, st.sampled_from(["", ".png", ".parquet", ".txt", ".sh"]))
def test_no_name_leads_out_of_the_folder(tmp_path_factory, name, suffix):
    out = Path("/somewhere/out")
    if is_inside(name + suffix):
        place = Path(os.path.normpath(out / (name + suffix)))
        assert out in place.parents and not place.name.startswith(".") and suffix != ".sh"


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
        (out / INDEX).write_text(json.dumps(content))
        sweeps[0].save(out)
        assert ci.SweepResult.load(out).meta == sweeps[0].meta
    assert outside.read_text() == "precious" and (out / "thesis.docx").exists()


def test_a_link_in_an_old_folder_leads_nowhere(sweeps, tmp_path):
    out = victim(tmp_path)
    (out / "figures").symlink_to(tmp_path / "victim")
    with (
        pytest.raises(ValueError, match="figures' is a link: remove it, or give another"),
        sweeps[0].saved_with_pages(out) as stage,
    ):
        (stage / "figures").mkdir()
        (stage / "figures" / "x.png").write_text("new")
    assert (tmp_path / "victim" / "x.png").read_text() == "precious"
    (out / "samples.parquet").unlink()
    (out / "samples.parquet").symlink_to(tmp_path / "victim" / "x.png")
    with pytest.raises(ValueError, match="samples.parquet' is a link where a file is to be"):
        sweeps[1].save(out)
    assert (tmp_path / "victim" / "x.png").read_text() == "precious"
    os.remove(out / "samples.parquet")
    (out / "samples.parquet").mkdir()
    with pytest.raises(
        ValueError, match="samples.parquet' is a folder where a file is to be written"
    ):
        sweeps[0].save(out)


@pytest.mark.parametrize("old", few(["missing column", "statistics: 3", "deep", "pipe"], 2))
def test_a_report_into_a_strange_folder_loses_nothing(sweeps, old, tmp_path):
    sweeps[0].save(tmp_path)
    if old == "missing column":
        table = sweeps[0].table("samples").drop(columns="layer")
        table.to_parquet(tmp_path / "samples.parquet")
    elif old == "statistics: 3":
        meta = json.loads((tmp_path / INDEX).read_text())
        (tmp_path / INDEX).write_text(json.dumps(meta | {"statistics": 3}))
    else:
        (tmp_path / INDEX).unlink()
        if old == "deep":
            (tmp_path / INDEX).write_text("[" * 10**5)
        else:
            os.mkfifo(tmp_path / INDEX)
    data = torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    options = dict(probes="sparsity", untrained=0, progress=False)
    words = "holds another meta.json, which would be lost" if old in ("deep", "pipe") else None
    words = "changed since.*'samples.parquet'. Nothing" if old == "missing column" else words
    if words:  # nothing of ours: refused before the sweep begins
        with pytest.raises(ValueError, match=words):
            ci.report(make(), data, tmp_path, **options)
        return
    page = ci.report(make(n_layers=1, n_heads=2), data, tmp_path, **options)
    assert page.exists() and ci.SweepResult.load(tmp_path).meta["n_samples"] == 3


def test_what_somebody_else_wrote_is_not_lost(sweeps, tmp_path):
    (tmp_path / INDEX).write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="holds another meta.json, which would be lost: give"):
        sweeps[0].save(tmp_path)
    (tmp_path / INDEX).write_text('{"result": "audit", "format": 1}')
    with pytest.raises(ValueError, match="holds a result of kind 'audit', which would be lost"):
        sweeps[0].save(tmp_path)
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "vit"}')
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a config.json of another library"):
        make().save_pretrained(other)
    assert set(files_of(other)) == {"config.json", "tokenizer.json"}
    (tmp_path / INDEX).unlink()
    with sweeps[0].saved_with_pages(tmp_path) as stage:
        write_text(stage / "page.html", "ours")
        write_text(stage / "notes.txt", "ours")
    (tmp_path / "notes.txt").write_text("the user's by now")
    sweeps[1].save(tmp_path)
    assert (tmp_path / "notes.txt").exists() and not (tmp_path / "page.html").exists()


def test_a_report_is_refused_before_work_where_its_audit_has_no_place(tmp_path):
    (tmp_path / "audit").write_text("a file")
    with pytest.raises(ValueError, match="cannot write into .*audit"):
        ci.report(make(), torch.randn(2, 3, 6, 20), tmp_path, audit=True, progress=False)
    assert set(files_of(tmp_path)) == {"audit"}


def test_a_place_that_cannot_be_written_costs_nothing(sweeps, tmp_path):
    with sweeps[0].saved_with_pages(tmp_path) as stage:
        (stage / "figures").mkdir()
        write_text(stage / "figures" / "a.txt", "old")
    shutil.rmtree(tmp_path / "figures")
    (tmp_path / "figures").write_text("a file in the place of a folder")
    before = files_of(tmp_path)
    with (
        pytest.raises(ValueError, match="figures' is not a folder: remove it, or give another"),
        sweeps[1].saved_with_pages(tmp_path) as stage,
    ):
        (stage / "figures").mkdir()
        write_text(stage / "figures" / "a.txt", "new")
    assert ci.SweepResult.load(tmp_path).meta == sweeps[1].meta
    assert files_of(tmp_path)["figures"] == before["figures"]


def test_a_reader_beside_a_writer_reads_one_run(sweeps, tmp_path, monkeypatch):
    """The files are replaced between any two reads of them."""
    sweeps[0].save(tmp_path / "a")
    sweeps[1].save(tmp_path / "b")
    real, seen = result_reading.open_regular, []
    for turn in range(8):
        folder = tmp_path / f"read-{turn}"
        shutil.copytree(tmp_path / "a", folder)
        count = 0

        def swapped(path, folder=folder, turn=turn):
            nonlocal count
            count += 1
            if count == turn:
                shutil.copytree(tmp_path / "b", folder, dirs_exist_ok=True)
            return real(path)

        monkeypatch.setattr(result_reading, "open_regular", swapped)
        try:
            loaded = ci.SweepResult.load(folder)
        except ValueError as error:
            seen.append(str(error))
        else:
            wanted = next(one for one in sweeps if one.meta["model"] == loaded.meta["model"])
            for table in wanted.STORED:
                pd.testing.assert_frame_equal(loaded.stored[table], wanted.stored[table])
        monkeypatch.undo()
    assert any("does not belong to the saved SweepResult" in words for words in seen)


@pytest.mark.slow
def test_a_data_set_of_pictures_does_not_grow_by_the_report_on_it(tmp_path):
    for name in ("a", "b"):
        Image.new("RGB", (20, 6)).save(tmp_path / f"{name}.png")
    options = dict(probes="sparsity", untrained=0, progress=False)
    model = make(resize=(6, 20), mean=(0.5,) * 3, std=(0.5,) * 3)
    for out in (tmp_path, tmp_path / "report"):
        for _ in range(2):
            ci.report(model, f"imagefolder:{tmp_path}", out, **options)
            assert ci.SweepResult.load(out).meta["n_samples"] == 2
