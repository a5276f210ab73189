"""Documentation: its code runs, its links and names lead somewhere, and the site builds."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import crate_hooks
import crate_interp as ci

ROOT = Path(__file__).parent.parent
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
# installed, the packages stand elsewhere than the texts
PACKAGE, HOOKS = Path(ci.__file__).parent, Path(crate_hooks.__file__).parent
SUFFIXES = (".md", ".py", ".toml", ".yml", ".css")
PATH = re.compile(r"\b(crate_interp|crate_hooks)((?:/[\w-]+)+(?:\.[a-z0-9]+)?)")
NAME = re.compile(r"\b(?:crate_interp|crate_hooks)(?:\.[A-Za-z]\w*)+")


def texts():
    """The files that may name a file of the library; the changelog tells of old ones."""
    places = [ROOT / name for name in ("demos", "tests", ".github", "hooks")]
    inside = [path for place in (*places, PACKAGE, HOOKS) for path in place.rglob("*")]
    for path in {*inside, *ROOT.glob("*")}:
        known = path.suffix in SUFFIXES or path.name == "Makefile"
        if path.is_file() and known and path.name != "CHANGELOG.md":
            yield path, path.read_text(encoding="utf-8")


def in_rooms(heading):
    """The first words of the lines in the block of code under a heading."""
    block = CONTRIBUTING.split(f"\n## {heading}\n", 1)[1].split("```", 2)[1]
    return [line.split()[0] for line in block.splitlines() if line.strip()]


def test_every_room_has_one_line_and_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    assert all((folder / "__init__.py").exists() for folder in folders)
    rooms = in_rooms("The rooms")
    assert sorted(rooms) == sorted(f"{folder.relative_to(PACKAGE)}/" for folder in folders)


def walks():
    """The title of each walk, with its files and the words that are to be found in them."""
    section = CONTRIBUTING.split("\n## Four walks\n", 1)[1].split("\n## ", 1)[0]
    for walk in re.split(r"\n(?=\*\*)", section)[1:]:
        steps = re.findall(r"^\d\. (.*(?:\n   .*)*)", walk, flags=re.MULTILINE)
        yield walk.split("**")[1], [re.findall(r"`([^`]+)`", step) for step in steps]


def test_the_walks_name_files_and_what_is_in_them():
    most = {
        "Add a statistic to a probe": 3,
        "Add a claim to the audit": 3,
        "Add a streamed verb with a page": 5,
        "Add a member of the family, with an attention and a layout of its own": 5,
    }
    found = dict(walks())
    assert found.keys() == most.keys()
    for title, steps in found.items():
        assert 0 < len(steps) <= most[title]
        assert steps[-1][0].startswith("tests/test_") or steps[-1][0].startswith("tests/measures/")
        for path, *words in steps:
            place = ROOT if path.startswith("tests/") else PACKAGE.parent
            text = (place / path).read_text(encoding="utf-8")
            assert all(word in text for word in words), (path, words)


def is_there(name):
    package, *parts = name.split(".")
    place = PACKAGE if package == "crate_interp" else HOOKS
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    file = place / "__init__.py"
    if parts and (place / f"{parts[0]}.py").exists():
        file = place / f"{parts.pop(0)}.py"
    return not parts or bool(re.search(rf"\b{parts[0]}\b", file.read_text(encoding="utf-8")))


def test_what_texts_name_exists():
    names = {}
    for path, text in texts():
        for package, rest in PATH.findall(text):
            place = (PACKAGE if package == "crate_interp" else HOOKS).parent / f"{package}{rest}"
            assert place.exists(), f"{path} names {package}{rest}"
        names |= dict.fromkeys(NAME.findall(text), path)
    suffixes = {suffix.strip(".") for suffix in SUFFIXES}
    for name, path in names.items():
        if name.split(".")[-1] not in suffixes:
            assert is_there(name), f"{path} names {name}"
    assert len(names) > 100
    gone = ("audits.left", "audits.claims.left", "left")
    assert not any(is_there(f"{PACKAGE.name}.{name}") for name in gone)


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
