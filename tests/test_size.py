"""The library stays small, and public signatures say what they take."""

import ast
from pathlib import Path

import crate_hooks
import crate_interp as ci
from count_lines import by_room

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
CODE, TESTS, DEMOS = 30_772, 43_920, 15_460


def lines(folder):
    """The lines of the Python files in a folder of the checkout."""
    files = (ROOT / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_code_tests_and_demos_are_within_their_limits():
    rooms = by_room(Path(ci.__file__).parent.parent)
    assert sum(room["code"] for room in rooms.values()) <= CODE, rooms
    assert lines("tests") <= TESTS
    assert lines("demos") <= DEMOS
