"""The library stays small: code lines by room, and lines of tests and demos."""

from pathlib import Path

import crate_interp as ci
from count_lines import by_room

ROOT = Path(__file__).parent.parent
CODE, TESTS, DEMOS = 34_700, 45_800, 15_460


def lines(folder):
    """The lines of the Python files in a folder of the checkout."""
    files = (ROOT / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_code_tests_and_demos_are_within_their_limits():
    rooms = by_room(Path(ci.__file__).parent.parent)
    assert sum(room["code"] for room in rooms.values()) <= CODE, rooms
    assert lines("tests") <= TESTS
    assert lines("demos") <= DEMOS
