"""Documentation: its code runs, its names lead somewhere; one record for each statistic."""

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import crate_hooks
import crate_interp as ci
from browser import driven, opened  # noqa: F401
from conftest import make
from crate_interp.audits import claims
from crate_interp.cli import COMMANDS
from crate_interp.probes import sparsity_probe
from crate_interp.results.statistic import Statistic
from crate_interp.sweeps.layer_curves import legend, numbers, summary
from crate_interp.viz.report_pages import report_page
from selection import few_of

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


EXAMPLES = sorted(path.stem for path in (DOCS / "examples").glob("*.txt"))
LONG = ("ci", "circuits", "viz", "saes", "surgeries", "data")  # they run models on data


@pytest.mark.filterwarnings("ignore:Matplotlib is currently using agg")
@pytest.mark.parametrize("name", few_of(EXAMPLES, {*EXAMPLES} - {*LONG}))
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


def test_each_method_of_the_papers_has_a_place_that_runs():
    """`python demos/docs/papers.py` writes the page; --check asks commands for help too."""
    sys.path.append(str(DOCS))
    import papers

    assert (PAGES / "papers.md").read_text() == papers.page()
    scope, rows = papers.names(), [row for each in papers.documents() for row in each["rows"]]
    assert len({(what, run) for what, run, _ in rows}) == len(rows) > 50
    for what, run, page in rows:
        assert what and page, what
        if run.startswith("$ demos"):
            assert "__main__" in (papers.ROOT / run[2:]).read_text(), what
        elif run.startswith("$"):
            assert run.split()[2] in COMMANDS, what
        elif run:
            assert papers.run_smallest(run, scope) is not None, what


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built strictly and without a network: a broken link or a bad reference fails."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", DOCS / "mkdocs.yml", "-d", out]
    settings = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = os.environ | settings | {"NO_MKDOCS_2_WARNING": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.slow
def test_the_site_has_all_names(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = {each["title"] for each in index["docs"]}
    assert {"ci.ablate_heads", "ci.viz.layers", "run_with_cache"} <= titles
    words = json.dumps(index)
    for probe in ci.probes.available():
        for statistic in ci.probes.resolve(probe)[0].statistics:
            assert f"{probe}.{statistic}" in words, statistic
    every = "".join(path.read_text() for path in (site / "reference" / "api").glob("*.html"))
    for name in ci.__all__:
        assert f"ci.{name}" in every, name
    assert "fonts.googleapis" not in every and "unpkg.com" not in every


@pytest.mark.slow
def test_no_table_of_the_site_is_cut(site, driven):  # noqa: F811
    script = Path(__file__).with_name("cut_tables.js").read_text()
    for page in sorted(site.rglob("*.html")):
        with opened(driven, page, 1280) as shown:
            assert shown.page.evaluate(script) == [], page


LARGEST = Statistic(
    "Largest entry of the code",
    "higher is spikier",
    "units of the code",
    0.0,
    None,
    "The largest entry of a token's code, mean over tokens.",
    column="largest",
)
MOSTLY_ZERO = claims.Claim(
    group="The sparse step",
    needs=("lasso",),
    title="Most of the code is zero",
    short="mostly zeros",
    says="The code of the sparse step is sparse.",
    where="a paper of ours, eq. 1",
    numbers={"zeros": claims.Number("zeros in the code", "share of zeros", low=0.25)},
)


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 6, 20, generator=torch.Generator().manual_seed(2))


def add_largest(monkeypatch):
    """What a newcomer writes into crate_interp/probes/sparsity_probe.py, and nothing else."""
    measure = sparsity_probe._measure

    def with_largest(block, acts, tokens):
        largest = acts["mlp.hook_post"].amax(dim=-1).mean(dim=-1)
        return measure(block, acts, tokens) | {"largest": largest}

    monkeypatch.setitem(sparsity_probe._STATISTICS, "largest", LARGEST)
    monkeypatch.setattr(sparsity_probe, "_measure", with_largest)


def add_claim(monkeypatch, name, claim):
    """What a newcomer writes into crate_interp/audits/claims.toml: the rest follows on import."""
    monkeypatch.setitem(claims.CLAIMS, name, claim)
    for number, record in claim.numbers.items():
        monkeypatch.setitem(claims.NUMBERS, number, record)
        monkeypatch.setitem(claims.CLAIM_OF, number, name)


def test_a_new_statistic_needs_its_record_alone(images, tmp_path, monkeypatch):
    add_largest(monkeypatch)
    model, name = make(), "sparsity.largest"
    few = dict(probes="sparsity", progress=False, controls=0)
    result, twin = ci.sweep(model, images, **few), ci.sweep(make(seed=7), images, **few)
    page = report_page(result, [twin], tmp_path).read_text(encoding="utf-8")
    for words in (LARGEST.title, LARGEST.direction, LARGEST.unit, name):
        assert words in page
    figure = ci.viz.layers(result, name)
    assert figure.axes[0].get_title() == LARGEST.title
    assert "higher is spikier" in figure.axes[0].get_ylabel().replace("\n", " ")
    header, rows = summary(result, [])  # what the commands print
    assert "largest" in header and all(row[header.index("largest")] for row in rows[:-1])
    assert f"largest: {name}, units of the code. {LARGEST.how}" in legend(result)
    assert "largest" in (tmp_path / "summary.txt").read_text()
    assert [LARGEST.title, LARGEST.unit] in [row[:2] for row in numbers(result, [])[1]]
    line = next(line for line in generated().statistics().splitlines() if name in line)
    assert f"{LARGEST.title}. {LARGEST.how}" in line and "0 or more" in line


@pytest.mark.slow
def test_a_new_claim_needs_its_record_alone(images, tmp_path, monkeypatch):
    add_claim(monkeypatch, "mostly_zero", MOSTLY_ZERO)
    result = ci.audit(make(n_layers=2), images, untrained=1, grid=False, progress=False)
    rows = result.claims().query("claim == 'mostly_zero'")
    assert len(rows) == 2 and set(rows["verdict"]) <= {"kept", "broken", "undecided"}
    page = ci.viz.audit_page(result, tmp_path).read_text(encoding="utf-8")
    for words in (MOSTLY_ZERO.title, MOSTLY_ZERO.says, MOSTLY_ZERO.where, "at least 0.25"):
        assert words in page
    assert page.count('popovertarget="mostly_zero-0"') == 2  # its sign, and the button that closes
    assert "mostly zeros" in result.text()  # what the command prints
    assert "mostly zeros (mostly_zero): The code" in (tmp_path / "audit.txt").read_text()
    row = next(row for row in generated().claims().splitlines() if "mostly_zero" in row)
    assert MOSTLY_ZERO.says in row and "zeros" in row


MEASURES = (Path(ci.__file__).parent / "measures" / "README.md").read_text(encoding="utf-8")


def plain(text):
    return " ".join(text.split()).replace("`", "")


def test_every_measure_has_a_line_that_its_docstring_says():
    lines = [line for line in MEASURES.splitlines() if line.startswith("| `")]
    cells = [[plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert sorted(row[0] for row in cells) == sorted(ci.measures.__all__)
    for name, formula, span, unit, lacks in cells:
        doc = plain(getattr(ci.measures, name).__doc__)
        assert formula.replace("\\|", "|") in doc and span in doc, name
        assert (unit == "-" or unit in doc) and len(lacks) > 10, name
