"""The README's code runs, its commands exist, and numbers are what the commands print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import crate_interp as ci
from command import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def page(name):
    """A page of the documentation."""
    return (ROOT / "demos" / "docs" / "pages" / f"{name}.md").read_text()


def blocks(language):
    """The README's blocks of code in a language; "" of none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [code for name, code in found if name == language]


def test_the_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert [path.name for path in tmp_path.iterdir()] == ["explore.html"]
    assert capsys.readouterr().out in blocks("")


def test_commands_and_pictures_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("report", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    for picture in re.findall(r"\]\(([^)]*\.png)\)", README):
        assert (ROOT / picture).stat().st_size > 10_000
    for link in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", README):
        # these tests also run beside a wheel, without the checkout's own folders
        place = ROOT if link.startswith(("demos/", "hooks/")) else Path(ci.__file__).parent.parent
        assert (place / link).exists() or link.startswith(".github/"), link


def findings():
    """What the README says was found: the command, and the words that have its numbers."""
    section = README.partition("## What we found")[2].partition("\n## ")[0]
    rows = re.findall(r"^\* \*\*\[.*?\)\*\*(.*?)<br>\n {2}`([^`]*)`$", section, re.S | re.M)
    return [(command, found) for found, command in rows]


def recipe(command):
    """The words of a command: crate-interp and python of this environment; of make, its recipe."""
    words = command.split()
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        (line,) = re.findall(rf"^{words[1]}: .*\n\t\$\(BIN\)/(.*)$", makefile, re.MULTILINE)
        words = line.split()
    if words[0] == "crate-interp":
        return [sys.executable, "-m", "crate_interp", *words[1:]]
    place = [str(ROOT / word) if word.endswith(".py") else word for word in words[1:]]
    return [sys.executable, *place]


QUICK = "crate-interp ablate"  # the row that runs with the fast tests
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.]*\d)")


@pytest.mark.parametrize(
    ("command", "found"),
    [
        pytest.param(*row, marks=[] if row[0].startswith(QUICK) else pytest.mark.slow)
        for row in findings()
    ],
)
def test_a_command_prints_the_numbers_of_its_row(command, found, tmp_path, monkeypatch):
    words = recipe(command)
    words += ["--quiet"] * ("--data" in words)
    monkeypatch.chdir(tmp_path)
    if words[1:3] == ["-m", "crate_interp"]:  # in this process, which saves the start of another
        done = run(*words[3:])
    else:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = NUMBER.findall(done.stdout.replace("+", ""))
    for number in NUMBER.findall(found):
        assert number in printed, number
    if "--data" in words:  # without --out a command writes into runs/COMMAND-MODEL
        assert f"runs/{words[3]}-{words[4]}/" in done.stdout


@pytest.mark.slow
def test_the_table_of_the_audit_is_what_its_command_prints():
    """The rows of the image model, all 256 images; `make tables` prints those of the others too."""
    sys.path.append(str(ROOT / "demos"))
    import tables

    name = "crate-tiny-fashion"
    result = ci.audit(ci.load(name), tables.MODELS[name], progress=False)
    wanted = tables.markdown(tables.rows(name, result)).splitlines()[2:]
    assert wanted == [
        line for line in page("how/audit").splitlines() if line.startswith(f"| {name} |")
    ]


@pytest.mark.slow
def test_the_scores_of_pictures_are_those_of_the_page():
    """The first table of the page: the head, its chance levels, and maps without a network."""
    result = ci.segment(
        ci.load("crate-tiny-pictures"), "embedded:pictures", untrained=5, progress=False
    )
    row, section = result.overall(), page("how/segment").partition("## Along")[0]
    ends = f"({row['low']:.3f} to {row['high']:.3f})"
    assert f"{result.named()} | {row['value']:.3f} {ends} |" in section
    names = ("other_image", "centre", "all_foreground", "untrained", "random")
    for name in (*names, "mean_colour", "border_colour", "colour_clusters"):
        assert f"| {row[name]:.3f} |" in section, name
    said = " ".join(section.split())
    beyond = f"{row['excess']:.3f}, {row['excess_low']:.3f} to {row['excess_high']:.3f}"
    assert f"(difference {beyond})" in said
    assert f"no more than {result.overall('top')['value']:.3f}" in said
    ways = result.layers().query("way == 'best head for each image'")
    best = ways.loc[ways["value"].idxmax()]
    assert f"{best['value']:.3f} in layer {int(best['layer'])}" in said
    assert f"{best['other_image']:.3f} on" in said
    guess = max(row["centre"], row["all_foreground"])
    assert f"it is {row['value'] - guess:.3f}".replace("0.", ".") in said


@pytest.mark.slow
def test_the_scores_of_cutouts_are_those_of_the_page():
    """The row of the trained CRATE and its chance levels; the ViT of the other row is not kept."""
    sys.path.append(str(ROOT / "demos"))
    from train_tiny_cutouts import SHIPPED, composites

    result = ci.segment(ci.load(SHIPPED), composites(), untrained=5, progress=False)
    row, section = result.overall(), page("how/segment").partition("## Along")[2]
    line = next(line for line in section.splitlines() if line.startswith("| CRATE |"))
    cells = [cell.strip() for cell in line.split("|")]
    value, low, high = (float(number) for number in re.findall(r"[\d.]+", cells[6]))
    assert (value, low, high) == pytest.approx((row["value"], row["low"], row["high"]), abs=2e-3)
    assert float(cells[7]) == pytest.approx(row["other_image"], abs=2e-3)
    section = section.replace("\n", " ")
    levels = re.search(
        r"has ([\d.]+), all foreground ([\d.]+), five networks of random weights ([\d.]+), "
        r".* random order ([\d.]+)\. So",
        section,
    )
    assert levels
    wanted = (row["centre"], row["all_foreground"], row["untrained"], row["random"])
    assert [float(number) for number in levels.groups()] == pytest.approx(wanted, abs=2e-3)
    assert row["low"] > max(*wanted, row["other_image"])
    for name in ("border_colour", "colour_clusters", "mean_colour", "local_variance"):
        assert f"| {row[name]:.3f} |" in section
    ends = f"({row['excess_low']:.3f} to {row['excess_high']:.3f})"
    assert row["strongest"] == "border_colour" and f"{row['excess']:.3f} {ends}" in section


def of_the_pairs():
    """Each verdict on CRATE against ViT, from the numbers of each network that are shipped."""
    sys.path.append(str(ROOT / "demos"))
    import pair_verdicts
    import pandas as pd

    table = pd.read_csv(ROOT / "demos" / "weights" / "pairs-networks.csv", keep_default_na=False)
    return {row.property.name: row for row in pair_verdicts.judged(table)}


def test_the_finding_about_crate_and_vit_is_that_of_the_shipped_numbers():
    section = " ".join(page("how/compare").split("```py")[0].split())
    rows = of_the_pairs()
    read, even = rows["compression as read (U; values)"], rows["entropy of attention"]
    falls = [f"{-100 * gain.value:.1f}" for gain in read.gains]
    assert f"by {falls[0]} points in CRATE and by {falls[1]} in the ViT" in section
    low, high = (f"{-100 * end:.1f}" for end in (read.excess.high, read.excess.low))
    assert f"difference {low} to {high}" in section
    falls = [f"{-gain.value:.3f}".lstrip("0") for gain in even.gains]
    assert f"entropy of attention by {falls[0]} and {falls[1]} of that of even" in section
    assert read.verdict == even.verdict == "more to CRATE"
    assert rows["compression beyond shuffled updates"].verdict == "both"
    sparse = rows["sparsity of the code"]
    less, more = (f"{abs(gain.value):.3f}".lstrip("0") for gain in sparse.gains)
    assert sparse.gains[0].high < 0 < sparse.gains[1].low
    assert f"(Hoyer's measure by {less}) and raises it in the ViT (by {more})" in section
    neither = ("overlap of heads (U; values)", "overlap of heads (U; keys)",
               "segmentation, fixed head", "segmentation, best head an image")  # fmt: skip
    assert {rows[name].verdict for name in neither} == {"neither"}


@pytest.mark.slow
def test_the_shipped_numbers_of_the_pairs_are_what_the_command_measures():
    """Both kinds of one seed, trained and untrained; the command measures all five."""
    sys.path.append(str(ROOT / "demos"))
    import crate_against_vit
    import pair_measures
    import pandas as pd

    shipped = pd.read_csv(ROOT / "demos" / "weights" / "pairs-networks.csv", keep_default_na=False)
    sample = pair_measures.sample()
    found = crate_against_vit.long(*pair_measures.measure(sample, seeds=(0,), progress=False))
    keys = ["kind", "subspaces", "seed", "trained", "source"]
    both = found.merge(shipped, on=keys, suffixes=("", "_shipped"), validate="one_to_one")
    assert len(both) == len(found) == (shipped["seed"] == 0).sum()
    there = both["value_shipped"].astype(float)
    assert (both["value"] - there).abs().max() <= 1e-4 * there.abs().max()
    near = (both["value"] - there).abs() <= 1e-3 * there.abs() + 1e-6
    assert near.all(), both[~near]
