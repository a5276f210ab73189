"""The README's code runs, its commands exist, and its numbers are what the commands print."""

import re
from pathlib import Path

import pytest

import crate_interp as ci
from crate_interp.audits.claims import CLAIMS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 10
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # in order, as a reader would
    assert {path.name for path in tmp_path.iterdir()} == {
        "rate.png",
        "attention.png",
        "accuracy.png",
        "steps.png",
        "heads.html",
        "circuit.json",
        "runs",
    }
    assert tuple(names["cache"]["pattern", 3].shape) == (8, 4, 50, 50)
    assert "rate_mid" in capsys.readouterr().out


def test_the_first_screen():
    lines = README.splitlines()
    assert lines[0] == "# crate_interp" and len(lines[2:4]) == 2
    first = README[: README.index("```python")]
    assert first.count("![") == 1 and len(first.splitlines()) < 12
    assert (
        len(re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1].strip().splitlines())
        <= 14
    )


def test_commands_and_pictures_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("report", "test"):
        assert f"make {target}" in README and re.search(
            rf"^{target}:", makefile, flags=re.MULTILINE
        )
    for picture in re.findall(r"\]\(([^)]*\.png)\)", README):
        assert (ROOT / picture).stat().st_size > 10_000


def test_the_training_script_is_the_card():
    import crate_interp as ci
    from crate_interp.checkpoints.registry import MODELS

    text = (ROOT / "demos" / "train_tiny_fashion.py").read_text()
    assert (
        f"SAVED_STEPS = {tuple(MODELS[0]['steps'])}" in text
        and ci.load("crate-tiny-fashion").cfg.model_name in text
    )
    for step in MODELS[0]["steps"]:
        assert str(step) in README


@pytest.mark.slow
def test_the_audit_in_the_readme_is_what_the_command_prints():
    """The image model's table, cell by cell; that of the language model takes a minute."""
    result = ci.audit(ci.load("crate-tiny-fashion"), "embedded:fashion", progress=False)
    table = result.table()
    sign = {"kept": "+", "broken": "-", "undecided": "?"}
    section = README.split("## Does each layer do its job?")[1].split(
        "`crate-interp audit crate-tiny-lm"
    )[0]
    rows = {
        line.split("|")[1].strip(): line.split("|")[2:-1]
        for line in section.splitlines()
        if line.startswith("| ")
    }
    for claim, facts in CLAIMS.items():
        found = table[table["claim"] == claim].sort_values("layer")
        cells = [cell.strip().split(" ") for cell in rows[facts.title][:-1]]
        assert [word for _, word in cells] == [sign[word] for word in found["verdict"]], claim
        for (value, _), wanted in zip(cells, found["value"], strict=True):
            assert float(value) == pytest.approx(wanted, rel=0.06, abs=2e-4), claim  # two digits


@pytest.mark.slow
def test_the_segmentation_in_the_readme_is_what_the_command_prints():
    """The row of the trained CRATE and its chance levels; the ViT of the other row is not kept."""
    result = ci.segment(
        ci.load("crate-tiny-cutouts"), "embedded:cutouts", untrained=3, progress=False
    )
    row, section = (
        result.overall(),
        README.split("## Do attention maps segment?")[1].split("\n## ")[0],
    )
    cells = [
        cell.strip()
        for cell in next(
            line for line in section.splitlines() if line.startswith("| CRATE |")
        ).split("|")
    ]
    value, low, high = (float(number) for number in re.findall(r"[\d.]+", cells[6]))
    assert (value, low, high) == pytest.approx((row["value"], row["low"], row["high"]), abs=2e-3)
    assert float(cells[7]) == pytest.approx(row["other_image"], abs=2e-3)
    section = section.replace("\n", " ")
    levels = re.search(
        r"has ([\d.]+), all foreground ([\d.]+), three networks of random weights ([\d.]+), "
        r".* random order ([\d.]+)\. So",
        section,
    )
    assert levels
    wanted = (row["centre"], row["all_foreground"], row["untrained"], row["random"])
    assert [float(number) for number in levels.groups()] == pytest.approx(wanted, abs=2e-3)
    layers = result.layers().query("layer == 3 and way == 'best head for each image'").iloc[0]
    best, other = layers["value"], layers["other_image"]
    assert f"{best:.3f} in layer 3, where the same six maps have {other:.3f}" in section
    assert row["low"] > max(*wanted, row["other_image"])
    assert f"no more than {result.overall('top')['value']:.3f}" in section
