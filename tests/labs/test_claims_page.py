"""The page of all claims: every lab is on it, and has a page and a picture of its own."""

from pathlib import Path

import claims_page
import elsewhere
import lab
import pytest
from all import names

PAGES = Path(claims_page.__file__).parent.parent / "docs" / "pages"


def test_every_lab_is_listed_once_and_has_a_page():
    listed = [name for labs in elsewhere.LABS.values() for name in labs]
    assert sorted(listed) == names()
    for name in listed:
        text = (PAGES / "labs" / f"{name}.md").read_text()
        assert f"({name}.png)" in text and f"demos/labs/{name}.py" in text, name
        assert (PAGES / "labs" / f"{name}.png").stat().st_size < 60_000, name
        assert f"](labs/{name}.md)" in (PAGES / "claims.md").read_text(), name


def test_a_page_is_made_of_results(tmp_path, monkeypatch):
    row = lab.claim(
        "a | b", "eq. 7", 0.5, interval=(0.25, 0.75), baseline=0.1, baseline_is="chance", n=3,
        published="1", size="small", answer="depends", why="",
    )  # fmt: skip
    other = lab.claim("c", "eq. 8", 2.0, size="small", answer="supported", why="")
    for name, rows in (("one", [row]), ("two", [other])):
        lab.result(name, "quick", "Found.", rows, []).save(tmp_path / name)
    monkeypatch.setattr(elsewhere, "LABS", {elsewhere.SRR: ("one", "two")})
    measured = elsewhere.Elsewhere("d", "Figure 1", "`command`", "3", "not supported (tiny)")
    monkeypatch.setattr(elsewhere, "MEASURED", {elsewhere.CRATE: (measured,)})
    text = claims_page.page(tmp_path)
    assert "Of 3 claims 1 are supported" in text and "1 are not, 1 depend" in text
    assert "| a \\| b | eq. 7 | 1 | 0.5 (0.25 to 0.75) | 0.1, chance | depends | [one]" in text
    assert "| c | eq. 8 |  | 2 |  | supported | [two](labs/two.md) |" in text
    assert "Cannot be run here" in text
    with pytest.raises(ValueError, match="does not hold a saved LabResult"):
        monkeypatch.setattr(elsewhere, "LABS", {elsewhere.SRR: ("three",)})
        claims_page.page(tmp_path)
