"""The page of all claims: its rules, its stored results, and a page and a picture for every lab."""

import math
import re
from pathlib import Path

import claims_page
import elsewhere
import pytest
import rules
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


@pytest.mark.parametrize(
    ("test", "interval", "says"),
    [
        ("above", (0.2, 0.3), True),
        ("above", (-0.3, 0.1), False),  # at the bar is not above it
        ("above", (0.0, 0.3), None),
        ("below", (-0.3, 0.0), True),
        ("below", (0.1, 0.3), False),
        ("below", (0.0, 0.3), None),
        ("within", (-0.1, 0.1), True),
        ("within", (0.11, 0.3), False),
        ("within", (0.0, 0.3), None),
        ("above", (float("nan"), 0.3), None),
    ],
)
def test_an_interval_says_yes_no_or_neither(test, interval, says):
    assert rules.verdict(test, 0.1, interval) is says


YES, NO, BOTH = (1.0, 2.0), (-2.0, -1.0), (-1.0, 1.0)


@pytest.mark.parametrize(
    ("over", "cases", "answer"),
    [
        ("settings", (YES, YES), "supported"),
        ("settings", (YES, NO, BOTH), "depends"),
        ("settings", (YES, BOTH), "undecided"),
        ("settings", (NO, BOTH), "not supported"),
        ("settings", (NO, NO), "not supported"),
        ("all", (YES, NO), "not supported"),
        ("all", (NO, BOTH), "not supported"),
        ("all", (YES, BOTH), "undecided"),
        ("", (BOTH,), "undecided"),
        ("", (), "undecided"),
    ],
)
def test_undecided_is_apart_from_what_depends_on_a_setting(over, cases, answer):
    rule = rules.rules()["embedded.stream"]._replace(over=over, test="above", bar="0")
    named = {str(at): each for at, each in enumerate(cases)}
    assert rules.answer(rule, named) == answer
    assert rules.answer(rule, named, met=False) == "undecided"


def test_of_many_settings_more_must_say_yes_than_chance_allows():
    rule = rules.rules()["embedded.stream"]._replace(over="settings", test="above", bar="0")
    assert [rules.above_chance(n) for n in (2, 6, 18)] == [1, 2, 3]
    chance = sum(math.comb(18, k) * 0.025**k * 0.975 ** (18 - k) for k in (0, 1))
    assert 1 - chance > 0.05 > 1 - chance - math.comb(18, 2) * 0.025**2 * 0.975**16

    def answer(n, yes, case=YES):
        ends = [case] * yes + [NO] * (n - yes)
        return rules.answer(rule, {str(at): each for at, each in enumerate(ends)})

    assert answer(18, 2) == answer(6, 1) == "not supported"
    assert answer(18, 3) == answer(6, 2) == answer(3, 1) == "depends"
    assert answer(16, 2, (1.0, 1.0)) == "depends"  # a verdict, not an interval


def test_a_number_is_beyond_its_rivals_only_if_it_is_beyond_each():
    assert rules.beyond((3.0, 4.0), (0.0, 1.0), (1.0, 2.0)) == (1.0, 3.0)
    assert rules.beyond((0.0, 0.5), (-3.0, -2.0), (1.0, 2.0))[1] < 0
    assert rules.short_of((-2.0, -1.0), (0.0, 1.0), (1.0, 2.0)) == (-3.0, -1.0)
    assert rules.short_of((1.5, 3.0), (0.0, 1.0), (9.0, 9.0))[0] > 0


def test_stored_answers_follow_from_the_rules_at_the_form_and_the_n_of_the_rules():
    kept = claims_page.stored()
    listed = {name for labs in elsewhere.LABS.values() for name in labs}
    assert {row["lab"] for row in kept} == listed
    others = [one.row for each in elsewhere.measured().values() for one in each]
    assert {row["rule"] for row in [*kept, *others]} == set(rules.rules())
    for row in kept:
        rule = rules.rules()[row["rule"]]
        assert (row["form"], row["n"]) == (rule.form, rule.n), row["claim"]
        assert row["answer"] == claims_page.answered(row), row["claim"]
        low, high = rule.bounds()
        assert not (row["low"] < low or row["high"] > high), row["claim"]
        assert row["baseline"] == row["baseline"] and row["baseline_is"], row["claim"]


def test_the_page_is_made_of_what_is_stored():
    kept = claims_page.stored()
    text = (PAGES / "claims.md").read_text()
    assert text == claims_page.page(kept) and rules.digest() in text
    found = {one.row["rule"]: one for each in elsewhere.measured().values() for one in each}
    for _, (rule, number) in claims_page.MATTER:  # said as it was measured
        measured = f"{found[rule].ours} {found[rule].baseline} {found[rule].row['n']}"
        assert set(re.findall(r"[\d.]*\d", number)) <= set(re.findall(r"[\d.]*\d", measured)), rule
    for name in {row["lab"] for row in kept}:
        own = (PAGES / "labs" / f"{name}.md").read_text()
        rows = [row for row in kept if row["lab"] == name]
        assert own == claims_page.with_table(own, rows), name


def test_a_change_by_depth_must_be_beyond_that_of_untrained_networks(monkeypatch, tmp_path):
    columns = "network,statistic,n,first,last,low,high," + ",".join(
        f"untrained_{name}" for name in ("first", "last", "low", "high")
    )
    monkeypatch.setattr(elsewhere, "TABLE", tmp_path / "table.csv")

    def answer(low, high, untrained_low, untrained_high):
        line = f"one,rate,9,5,3,{low},{high},5,4,{untrained_low},{untrained_high}"
        elsewhere.TABLE.write_text(f"{columns}\n{line}\n")
        return elsewhere.by_depth("rate", "rate_falls", rules.highest).row["answer"]

    assert answer(-3, -2, -1, -0.5) == "supported"
    assert answer(-3, -2, -2.5, -1) == "undecided"
    assert answer(-3, -2, -5, -4) == answer(1, 2, 3, 4) == "not supported"
