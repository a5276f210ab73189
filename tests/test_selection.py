"""Which tests a run has, which may skip, and what the tests check of every call."""

import ast
import inspect
import re
from pathlib import Path

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor

import selection
from crate_interp.measures.sparsity import l1_and_hoyer
from shape_checks import checked

NAME = Path(__file__).name

IDS = [f"tests/test_demos.py::test_it_runs[{number:02}]" for number in range(997)]


@pytest.fixture(autouse=True)
def default(monkeypatch):
    for name in ("CRATE_SLOW", "CRATE_PROFILE", "CRATE_BROWSER"):
        monkeypatch.delenv(name, raising=False)


def test_every_slow_test_is_in_one_sixteenth(monkeypatch):
    runs = []
    for sixteenth in selection.SIXTEENTHS:
        monkeypatch.setenv("CRATE_SLOW", sixteenth)
        runs.append({nodeid for nodeid in IDS if selection.is_run(nodeid, slow=True)})
        assert all(selection.is_run(nodeid, slow=False) for nodeid in IDS)
        assert abs(len(runs[-1]) - 997 / 16) < 5 * (997 * 15 / 256) ** 0.5  # binomial
    assert sum(map(len, runs)) == 997 and set().union(*runs) == set(IDS)


def names_of_tests(path):
    """The tests of a file, and those of them that look at pages in a browser."""
    functions = [node for node in ast.parse(path.read_text()).body if type(node) is ast.FunctionDef]
    arguments = {node.name: {argument.arg for argument in node.args.args} for node in functions}
    shown = {"driven"}
    for _ in functions:  # a fixture that takes the browser hands it on
        shown |= {name for name, taken in arguments.items() if taken & shown}
    shown |= {node.name for node in functions if "require()" in ast.unparse(node)}
    tests = {name for name in arguments if name.startswith("test_")}
    return tests, tests & shown


def test_the_list_of_skips_has_every_test_of_a_page_and_no_test_that_is_gone():
    here = Path(selection.__file__).parent
    listed = set(re.findall(r"`(test_\w+)`", (here / "SKIPS.md").read_text()))
    found = [names_of_tests(path) for path in here.rglob("test_*.py") if path.name != NAME]
    assert listed <= set().union(*(tests for tests, _ in found))
    in_browser = set().union(*(shown for _, shown in found))
    assert in_browser <= listed and len(in_browser) > 15


@checked(typechecker=beartype)
def product(
    left: Float[Tensor, "row inner"], right: Float[Tensor, "inner col"], turned: "bool" = False
) -> Float[Tensor, "row col"]:
    """The result has other axes than its annotation says if it is turned."""
    return (left @ right).T if turned else left @ right


@pytest.mark.parametrize(
    "call",
    [
        lambda: product(torch.ones(2, 3), torch.ones(5, 3)),  # one name, two sizes
        lambda: product(torch.ones(2, 3), torch.ones(3, 5), turned=True),
        lambda: l1_and_hoyer(torch.ones(2, 3).int()),  # the package is checked
    ],
)
def test_calls_are_refused(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()
    assert product(torch.ones(2, 3), torch.ones(3, 5)).shape == (2, 5)
    assert inspect.unwrap(l1_and_hoyer) is not l1_and_hoyer
