"""The documentation: its code runs, its links lead somewhere, and the site builds."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import crate_interp as ci

DOCS = Path(__file__).parent.parent / "demos" / "docs"
PAGES = DOCS / "pages"


def pages():
    return sorted(str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md"))


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (PAGES / name).read_text(), flags=re.DOTALL)


WITH_CODE = [name for name in pages() if blocks(name)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Matplotlib is currently using agg")
@pytest.mark.usefixtures("unchecked")  # as readers run it
@pytest.mark.parametrize("name", WITH_CODE)
def test_the_code_of_a_page_runs_alone(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks(name):
        exec(compile(block, name, "exec"), names)


def generated():
    sys.path.append(str(DOCS))
    import generated

    return generated


@pytest.mark.parametrize("name", sorted(generated().api()))
def test_every_public_name_has_an_example_with_its_name(name):
    given = generated().examples(name)
    assert set(given) == {"before", *generated().public(name)}
    for own, text in given.items():
        assert own == "before" or ">>> " in text
        assert own in text or own[0].isupper() or own == "before", own


def test_the_pages_of_the_reference_cover_what_is_public():
    modules = {name for name in dir(ci) if isinstance(getattr(ci, name), ModuleType)}
    assert modules | {"", "hooks.edit"} == set(generated().api())


LONG = ("ci", "circuits", "viz", "saes", "surgeries", "data")  # they run models on data


@pytest.mark.filterwarnings("ignore:Matplotlib is currently using agg")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])
        for path in sorted((DOCS / "examples").glob("*.txt"))
    ],
)
def test_the_examples_show_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(
        str(DOCS / "examples" / f"{name}.txt"), module_relative=False, encoding="utf-8"
    )
    assert failed == 0 and tried > 5


@pytest.mark.parametrize("name", pages())
def test_links_lead_somewhere(name):
    text = (PAGES / name).read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            place = os.path.normpath((PAGES / name).parent / link)
            # these tests also run beside a wheel, where the package lies elsewhere
            inside = os.path.relpath(place, PAGES.parent.parent.parent)
            if inside.startswith("crate_interp/"):
                place = Path(ci.__file__).parent.parent / inside
            assert os.path.exists(place), (name, link)


def test_pages_of_data_say_what_the_data_say():
    """`python demos/docs/generated.py` writes them."""
    for name, text in generated().written().items():
        assert (PAGES / name).read_text() == f"{text}\n", name


@pytest.mark.slow
def test_the_site_builds_without_a_network(tmp_path):
    """Strict: a broken link, a missing page or a bad reference fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "-f", DOCS / "mkdocs.yml", "-d", tmp_path]
    settings = {
        "NO_MKDOCS_2_WARNING": "1",
        "http_proxy": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "1",
    }
    environment = {**os.environ, **settings, "https_proxy": settings["http_proxy"]}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    words = (tmp_path / "search" / "search_index.json").read_text()
    for probe in ci.probes.available():
        for statistic in ci.probes.resolve(probe)[0].statistics:
            assert f"{probe}.{statistic}" in words, statistic
    every = "".join(path.read_text() for path in (tmp_path / "reference" / "api").glob("*.html"))
    for name in ci.__all__:
        assert f"ci.{name}" in every, name
    assert "fonts.googleapis" not in every and "unpkg.com" not in every


@pytest.mark.parametrize("name", [name for name in pages() if name != "claims.md"])
def test_lines_are_no_longer_than_100_columns(name):
    lines = (PAGES / name).read_text().splitlines()
    assert not [line for line in lines if len(line) > 100 and not line.startswith("|")
                and "](" not in line]  # fmt: skip
