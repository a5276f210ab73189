"""No number of the library has moved: a part of the golden table, and that it has every option."""

import inspect
import re
import zlib

import pytest

import crate_interp as ci
from command import run
from golden import golden
from golden.cases import SMALL, every_case, every_way
from golden.digests import moved
from golden.idioms import COMMANDS
from selection import few_of

ELSEWHERE = {
    "model", "data", "progress", "out",  # everywhere
    "resume", "shard", "engine", "batch_size", "chunk_size",  # the ways to run a case
    "device", "cache_dir", "local_files_only", "token", "file", "ax", "title", "dpi",
}  # fmt: skip
LONG = ("audit", "surgery", "report", "graph crate-tiny", "atom_names", "--device")


def public():
    rooms = [("", ci), *((f"{n}.", getattr(ci, n)) for n in ("circuits", "saes", "surgeries"))]
    rooms += [("maps.", ci.maps), ("bridge.", ci.bridge)]
    for prefix, room in rooms:
        for name in room.__all__:
            thing = getattr(room, name)
            again = prefix and getattr(ci, name, None) is thing
            again = again or getattr(ci.measures, name, None) is thing  # have tests of their own
            if inspect.isfunction(thing) and not again and name != "register":
                yield prefix + name, thing


def names_of(function):
    """The parameters of a function that are chosen by name, with those of its run."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            yield name
        elif parameter.kind is parameter.VAR_KEYWORD and name == "run":
            yield from parameter.annotation.__args__[0].__annotations__


def test_every_verb_and_option_is_in_the_table():
    text = "".join(path.read_text() for path in golden.TABLES.parent.glob("*.py"))
    cases = list(every_case())
    run_options = {name for case in cases for name in case.options}
    missing = []
    for verb, function in public():
        words = (f'"{verb}"', f".{verb.rpartition('.')[2]}(", f"\n{verb} ")
        if not any(word in text for word in words):
            missing.append(verb)
        options = {name for case in cases if case.verb == verb for name in case.options}
        for name in names_of(function):
            streamed = name in run_options and verb not in ("load", "bridge.load")
            used = name in options or streamed or re.search(rf"\b{name}=|\"{name}\":", text)
            if not used and name not in ELSEWHERE:
                missing.append(f"{verb}({name})")
    assert not missing, missing


def test_every_option_of_the_command_line_is_in_the_table():
    everywhere = {"--help", "--version", "--json", "--install-completion", "--show-completion"}
    for verb in re.findall(r"^  (\w+) {2,}", run("--help").stdout.partition("Commands")[2], re.M):
        options = set(re.findall(r"--[a-z][a-z-]+", run(verb, "--help").stdout))
        options -= {name.replace("--no-", "--") for name in options if name.startswith("--no-")}
        assert f"\n{verb} " in COMMANDS, verb
        assert {name for name in options - everywhere if name not in COMMANDS} == set(), verb


def part(names):
    """A ninth of the names, without those that take long."""
    short = [name for name in names if not any(word in name for word in LONG)]
    return [name for name in short if zlib.crc32(name.encode()) % 9 == 0]


@pytest.mark.parametrize("third", range(3))
def test_a_part_of_the_table_has_not_moved(third):
    table = golden.tables()
    names = part(case.name for case in every_case())[third::3]
    assert len(names) > 10
    moved = {name: golden.differences(name, "", table) for name in names}
    assert not {name: found for name, found in moved.items() if found}


@pytest.mark.parametrize("verb", few_of(SMALL, ("sweep", "ablate_heads", "atlas")))
@pytest.mark.parametrize("way", ["resumed", "shards", "sizes"])
def test_other_ways_give_the_same_numbers(verb, way):
    table = golden.tables()
    for case, other in every_way():
        if other == way and case.verb == verb:
            assert not golden.differences(case.name, way, table), case.name


def test_a_number_that_moved_is_found():
    before = golden.measured("probe crate")
    after = {name: list(row) for name, row in before.items()}
    for row in after.values():
        if len(row) > 2:
            row[0], row[3] = "other", row[3] + 3e-6
    found = moved(before, after, "numbers")
    assert set(found.values()) == {"moved by 3.0e-06 of its largest magnitude"}
    assert moved(before, after, "sizes") == {} == moved(before, before, "bits")
