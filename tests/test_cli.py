"""The command line on embedded models and on files; three tests run it in their own process."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import crate_interp as ci
from command import fails, one_line, process, run
from conftest import HEADS, make
from crate_interp.cli.app import QUIET, example, spoken
from crate_interp.cli.commands import COMMANDS
from reference import published_layout

WEIGHTS = Path(__file__).parent.parent / "demos" / "weights"


def test_version_models_help():
    assert process("--version").stdout.strip() == f"crate-interp {ci.__version__}"
    out = run("models").stdout
    assert "crate-tiny-fashion" in out and "step-2560" in out
    assert "UCSC-VLAA/CRATE-alpha/torch/crate_alpha_B16.pth" in out and "drive.google.com" in out
    assert len(out.splitlines()) == 1 + len(ci.list_models())
    assert "--config" in run("report", "--help").stdout


def test_convert(tmp_path):
    model = make("crate-alpha")
    torch.save(published_layout(model), tmp_path / "w.pth")
    config = ["--config", f"n_heads={HEADS}", "--config", "image_size=[6, 20]"]
    done = run("convert", tmp_path / "w.pth", "--out", tmp_path / "new", *config)
    assert done.returncode == 0 and "parameters in" in done.stdout, done.stderr
    assert "no mean and std: pictures need --config" in done.stdout and "no labels: " in done.stdout
    loaded = ci.load(tmp_path / "new")
    assert (
        loaded.cfg == replace(model.cfg, model_name="new")
        and "# new" in (tmp_path / "new" / "README.md").read_text()
    )
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    weights = ("convert", tmp_path / "w.pth", "--out")
    fails("exists already: give the name of a new folder", *weights, tmp_path / "new", *config)
    fails("exists already", *weights, tmp_path / "w.pth", *config)
    fails("n_heads cannot be inferred", *weights, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "w.pth"]


def test_convert_a_language_model(tmp_path):
    """With its tokenizer, from a step along its training."""
    done = run("convert", f"{WEIGHTS / 'crate-tiny-lm'}@step-640", "--out", tmp_path / "lm")
    assert done.returncode == 0, done.stderr
    missing = run("convert", f"{WEIGHTS / 'crate-tiny-lm'}@step-7", "--out", tmp_path / "no")
    assert missing.returncode == 2
    lm, step = ci.load(tmp_path / "lm"), ci.load(WEIGHTS / "crate-tiny-lm", revision="step-640")
    assert torch.equal(lm("In the beginning"), step("In the beginning")) and lm.cfg == step.cfg


# first words of the error -> the options after `report crate-tiny-fashion --data embedded:fashion`
WRONG = {
    "no field 'source'": ["--config", "source=x"],
    "write --family crate.": ["--config", "family=crate"],
    "mean='grey': give a list": ["--config", "mean=grey"],
    'such as ["cat", "dog"], or None. The': ["--config", "labels=['a'"],
    'such as ["cat", "dog"], or None': ["--config", "labels=a,b"],
    "interpolate_pos='perhaps': give True or": ["--config", "interpolate_pos=perhaps"],
    "--config 'n_heads': write NAME=VALUE": ["--config", "n_heads"],
    "--batch-size 0: give a whole number of at least 1": ["--batch-size", 0],
    "--limit 0: give a whole number": ["--limit", 0],
    "--threads=0: give a whole number of at least 1": ["--threads", 0],
    "--dtype 'float8' is none of float32": ["--dtype", "float8"],
    "there is no probe ''": ["--probes", ""],
    "there is no probe 'sparcity'. Did you mean sparsity": ["--probes", "sparcity"],
    "It is a statistic of attention: give this probe": ["--probes", "entropy"],
    "no embedded data is called 'fashin'": ["--data", "embedded:fashin"],
    "Did you mean imagefolder?": ["--data", "imagefoler:photos"],
    "cannot write into": ["--out", "/dev/null/o"],
}


@pytest.mark.usefixtures("unchecked")
def test_errors_are_one_line_in_the_words_of_the_command_line(tmp_path):
    data = ("--data", "embedded:fashion", "--out", tmp_path / "o")
    for words, options in WRONG.items():
        fails(words, "report", "crate-tiny-fashion", *data, *options)
    fails("--engine 'rey' is none of", "sweep", "crate-tiny-fashion", *data, "--engine", "rey")
    fails("Did you mean crate-tiny-fashion", "report", "crate-tiny-fashio", *data)
    fails("`crate-interp models` lists", "sweep", "crate-tiny-fashio", *data)
    torch.save(published_layout(make()), tmp_path / "w.pth")
    fails(
        "so it is one of 1, 5, 7, 35. Give --config n_heads=5", "report", tmp_path / "w.pth", *data
    )
    (tmp_path / "broken.pth").write_bytes(b"PK\x03\x04 half a file")
    broken = ("report", tmp_path / "broken.pth", *data)
    one_line("is not a readable checkpoint", process(*broken))
    with pytest.raises(ci.CheckpointError):  # and its traceback
        run("--debug", *broken)


def test_all_that_is_missing_is_said_at_once(tmp_path):
    fails("SOURCE, --data are missing. Example: crate-interp report crate-tiny", "report")
    fails("--out is missing", "convert", "crate-tiny-fashion")
    fails("SOURCE is missing. Example: crate-interp convert", "convert", "--quiet", "--out", "x")
    for command in COMMANDS:
        assert example(command) in " ".join(run(command, "--help").stdout.split()), command


@pytest.mark.parametrize(
    "python, said",
    [
        ("Give it: ci.load(..., patch_size=(8, 4)).", "Give it: --config 'patch_size=[8, 4]'."),
        ("ci.load(..., n_ctx=4, family='crate') x", "--config n_ctx=4 --family crate x"),
        ("ci.load(..., rename='s/^a\\.//') for", "--rename 's/^a\\.//' for"),
        ("ci.load(..., weights='ema')", "--weights ema"),
        ("batch_size=0: give", "--batch-size 0: give"),
        ("f(limit=3) and my_limit=2", "f(limit=3) and my_limit=2"),
    ],
)
def test_spoken(python, said):
    assert spoken(python) == said


def test_quiet_shows_no_progress(tmp_path, monkeypatch):
    command = ("sweep", "crate-tiny-fashion", "--data", "embedded:fashion", "--limit", 4)
    command += ("--probes", "sparsity", "--controls", 0)
    loud = run(*command, "--out", tmp_path / "a")
    quiet = run(*command, "--out", tmp_path / "b", "--quiet")
    assert "image/s" in loud.stderr and quiet.stderr == "" and "The tables" in quiet.stdout
    assert QUIET not in os.environ
    float64 = run(*command, "--out", tmp_path / "c", "--dtype", "float64")
    assert ci.SweepResult.load(tmp_path / "c").meta["dtype"] == "float64", float64.stderr


def test_a_table_in_other_formats(tmp_path):
    command = ("sweep", "crate-tiny-fashion", "--data", "embedded:fashion", "--limit", 4)
    command += ("--probes", "sparsity", "--controls", 0, "--quiet", "--out", tmp_path / "o")
    begins = {"csv": "probe,statistic", "markdown": "| probe | stat"}
    for name, first in begins.items():
        done = run(*command, "--format", name)
        assert done.stdout.startswith(first) and "The tables" in done.stderr, done.stderr
    fails("--format 'tex' is none of csv, markdown", *command, "--format", "tex")


@pytest.mark.usefixtures("unchecked")
def test_what_a_new_user_meets_first(tmp_path):
    """A grey checkpoint, a folder of images without its scheme, and no word on normalisation."""
    sizes = dict(image_size=(28, 28), patch_size=(4, 4), channels=1, d_model=48, d_head=12)
    torch.save(published_layout(make(n_heads=4, **sizes)), tmp_path / "w.pth")
    (tmp_path / "photos").mkdir()
    Image.new("L", (28, 28)).save(tmp_path / "photos" / "1.png")
    asked = ("sweep", tmp_path / "w.pth", "--out", tmp_path / "o", "--config", "n_heads=4")
    here = (*asked, "--data", f"imagefolder:{tmp_path / 'photos'}")
    fails("Give --config channels=1, if images are grey and patches are 4 x 4", *here)
    grey = ("--config", "channels=1", "--config", "image_size=28")  # a square would be a guess
    fails('Give --config "mean=[...]" and --config "std=[...]"', *here, *grey, "--quiet")
    done = run(*here, *grey, "--config", "mean=[0.5]", "--config", "std=[0.25]", "--controls", 0)
    assert done.returncode == 0, done.stderr
