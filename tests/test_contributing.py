"""CONTRIBUTING names the rooms of the library, and no text names a file or a name that is gone."""

import re
from pathlib import Path

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
    """Whether a dotted name is a module, or a word in the text of its module."""
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
