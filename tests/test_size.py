"""The library stays small: code, public parameters, walks, and the memory of loading."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import crate_hooks
import crate_interp as ci
from conftest import FIXTURES
from count_lines import by_room
from published import published

MOST = 60  # public parameters that may be Any


def parameters(body, where, dataclass=False):
    """(place, annotation) of every public parameter and dataclass field."""
    for node in body:
        name = getattr(node, "name", "")
        if isinstance(node, ast.ClassDef) and not name.startswith("_"):
            frozen = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
            yield from parameters(node.body, f"{where}:{name}", frozen)
        elif isinstance(node, ast.FunctionDef) and (name == "__init__" or name[:1] != "_"):
            given = node.args
            more = [one for one in (given.vararg, given.kwarg) if one]
            for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *more):
                if one.arg not in ("self", "cls"):
                    yield f"{where}:{name}({one.arg})", one.annotation
        elif dataclass and isinstance(node, ast.AnnAssign) and ast.unparse(node.target)[:1] != "_":
            if "ClassVar" not in ast.unparse(node.annotation):
                yield f"{where}:{ast.unparse(node.target)}", node.annotation


def test_few_public_parameters_are_any():
    every = [
        (place, annotation)
        for package in (ci, crate_hooks)
        for path in sorted(Path(package.__file__).parent.rglob("*.py"))
        for place, annotation in parameters(ast.parse(path.read_text()).body, path.name)
    ]
    assert len(every) > 900
    assert not [place for place, annotation in every if annotation is None]
    loose = [place for place, annotation in every if ast.unparse(annotation) == "Any"]
    assert len(loose) <= MOST, "\n".join(loose)


ROOT = Path(__file__).parent.parent
CODE, TESTS, DEMOS = 30_079, 32_504, 15_532
FILES, FUNCTIONS = 220, 2_568  # of the library


def lines(folder):
    """The lines of the Python files in a folder of the checkout."""
    files = (ROOT / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_code_tests_and_demos_are_within_their_limits():
    rooms = by_room(Path(ci.__file__).parent.parent)
    whole = sum(rooms.values(), Counter())
    assert whole["code"] <= CODE and whole["files"] <= FILES, rooms
    assert whole["functions"] <= FUNCTIONS, rooms
    assert lines("tests") <= TESTS
    assert lines("demos") <= DEMOS


MEMORY = """
import sys, torch
import crate_interp as ci
# not ru_maxrss, which begins at what the parent had when it forked
def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

ci.load(sys.argv[1])
before = peak()
model = ci.load(sys.argv[2], n_heads=8)
weights = sum(value.numel() * value.element_size() for value in model.parameters())
print((peak() - before) / weights, weights / 2**20)
"""
SMALL = FIXTURES / "crate_lm_overcomplete" / "ckpt-crate-12l-overparam-600000.pt"


@pytest.mark.slow
@pytest.mark.parametrize(("zipped", "most"), [(True, 2.1), (False, 3.1)])
def test_a_training_dict_with_optimiser_state(zipped, most, tmp_path):
    """12 bytes per weight, as the public CRATE-LM has them, and a tied embedding.

    The peak counts the pages of the file that torch maps: the weights and the model. A file of
    before torch 1.6 is read whole, the optimiser's state too.
    """
    weights = published("crate-lm", n_layers=8, d=512, h=8, p=64, m=4096)
    state = {
        key: {"exp_avg": torch.zeros_like(value) + 1, "exp_avg_sq": torch.zeros_like(value) + 2}
        for key, value in weights.items()
    }
    content = {"model": {f"_orig_mod.{key}": value for key, value in weights.items()}}
    path = tmp_path / "ckpt.pt"
    torch.save(content | {"optimizer": state}, path, _use_new_zipfile_serialization=zipped)
    command = [sys.executable, "-c", MEMORY, SMALL, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    share, size = map(float, done.stdout.split())
    assert share < most and size > 60, done.stdout


WALKS = {"load": (28, 108), "sweep": (67, 386), "audit": (78, 561)}  # files, functions


def test_a_walk_stays_short():
    script = Path(__file__).with_name("walks.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    walks = {name: tuple(map(int, rest)) for name, *rest in map(str.split, run.stdout.splitlines())}
    assert set(walks) == set(WALKS)
    for name, (files, functions) in walks.items():
        assert files <= WALKS[name][0] and functions <= WALKS[name][1], (name, files, functions)
