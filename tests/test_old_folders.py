"""What lies in a folder before it is written: nothing of the user's is lost, no name leads out."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make
from crate_interp.core.files import write_text
from crate_interp.core.folders import LOCK, is_inside
from folders import files_of, two_sweeps

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
