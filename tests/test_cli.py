"""The command line on embedded models and on files: a table of what is typed and what is said."""

import argparse
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import crate_interp as ci
from command import fails, one_line, process, run
from conftest import HEADS, make
from crate_interp.cli.command_line import QUIET, example, spoken
from crate_interp.cli.commands import COMMANDS
from published import GIVEN, published
from reference import published_layout

NAMES = {"m": "crate-tiny-fashion", "e": "--data embedded:fashion --out out"}
NAMES["d"] = f"{NAMES['e']} --limit 4 --quiet"
LM = Path(__file__).parent.parent / "demos" / "weights" / "crate-tiny-lm"
N_HEADS = f"--config n_heads={HEADS}"
SIZED = f"{N_HEADS} --config image_size=[6,20]"
MAE = " ".join(f"--config '{name}={value}'" for name, value in GIVEN["crate-mae"].items())

# command line -> what it prints; several lines of a command stand for what they share
DONE = {
    "models": ["crate-tiny-fashion", "step-2560", "drive.google.com", "CRATE-alpha/torch/crate_al"],
    f"convert w.pth --out new {SIZED}": ["parameters in", "no mean and std: ", "no labels: "],
    "inspect crate-tiny-fashion": ["layout: folder saved by crate_interp", "eta = 0.1  (config)"],
    f"inspect square.pth {N_HEADS} --config eta=.2": [
        "layout: crate-alpha", f"n_heads = {HEADS}  (argument)", "eta = 0.2  (argument)",
        "lambd = 0.1  (assumed: published default)", 'sparse_step = "odl"  (published default)',
        "image_size = [4, 10]  (a guess: the number of patches is a square)",
    ],
    f"inspect mae.pth {MAE}": ["norm_pix_loss = true  (file)"],
    f"inspect averaged.pth {SIZED}": ["left out: n_averaged"],
    "report --help": ["--config", "--probes", "Separate several with commas", "[default: 32]"],
    "audit --help": ["--grid", "--no-grid", "--chunk-size", "The seed of the nulls."],
    "sweep {m} {d} --probes sparsity --controls 0 --format csv": ["probe,statistic"],
    "sweep {m} {d} --probes sparsity --controls 0 --format markdown": ["| probe | stat"],
    "explore {m} {e} --sample 3 --circuit c.json": ["sample 3 of embedded:fashion"],
    "explore crate-tiny-lm --text 'A girl drew a house'": ["crate-tiny-lm: A girl drew a house. "],
    "explore {m} {e} --size 56": ["sample 0 of embedded:fashion"],
}  # fmt: skip
SLOW = {
    "audit {m} {d} --untrained 1": ["objective falls", "out/audit.html", "? can't tell"],
    "concentration {m} {d} --untrained 0 --rotations 2 --k 4 --k 2": [
        "swapping 2 of 6,400", "out/concentration.html", "native",
    ],
    "ablate {m} {d} --how zero --head L0H0 --head l4h1": ["guessing: 2.3", "L0H0", "L4H1", "of 24"],
    "compare {m} {m}@step-10 {d} --untrained 1 --probes sparsity": [
        "crate-tiny-fashion@step-10", "sparsity.zero_fraction", "hold", "out/compare.html",
    ],
    "compare swept swept --out other": ["swept (a) against swept (b)"],
    "compare swept,swept swept,swept --out other": ["swept and 1 more", "every difference is 0"],
}  # fmt: skip
# command line -> the one line on stderr
WRONG = {
    "report": "missing: SOURCE, --data. Example: crate-interp report crate-tiny",
    "convert --quiet --out x": "missing: SOURCE. Example: crate-interp convert",
    f"convert w.pth --out swept {SIZED}": "exists already: give a new folder",
    f"convert w.pth --out w.pth {SIZED}": "exists already",
    "convert w.pth --out other": "n_heads cannot be inferred",
    f"inspect odd.pth {SIZED}": "keys not used (1): transformer.odd",
    "explore {m} --text hello --out other": "crate-tiny-fashion reads images: --image",
    "graph {m} --out other": "give --text TEXT, --image FILE, or --data with --sample NUMBER.",
    "report {m} {d} --config source=x": "no field 'source'",
    "report {m} {d} --config family=crate": "write --family crate.",
    "report {m} {d} --config mean=grey": "mean='grey': give a list",
    "report {m} {d} --config labels=a,b": 'such as ["cat", "dog"], or None',
    "report {m} {d} --config interpolate_pos=perhaps": "interpolate_pos='perhaps': give True or",
    "report {m} {d} --config n_heads": "--config 'n_heads': write NAME=VALUE",
    "report {m} {d} --batch-size 0": "--batch-size 0: give a whole number of at least 1",
    "report {m} {d} --limit 0": "--limit 0: give a whole number",
    "report {m} {d} --threads 0": "--threads 0: give a whole number of at least 1",
    "report {m} {d} --dtype float8": "--dtype 'float8' is none of float32",
    "report {m} {d} --probes ''": "there is no probe ''",
    "report {m} {d} --probes sparcity": "there is no probe 'sparcity'. Did you mean sparsity",
    "report {m} {d} --probes entropy": "It is a statistic of attention: give this probe",
    "report {m} {d} --data embedded:fashin": "'fashin' is none of fashion, pictures, ",
    "report {m} {d} --data imagefoler:photos": "Did you mean imagefolder?",
    "report {m} {d} --out /dev/null/o": "cannot write into",
    "report crate-tiny-fashio {d}": "Did you mean crate-tiny-fashion",
    "report w.pth {d}": "so it is one of 1, 5, 7, 35.",
    "sweep crate-tiny-fashio {d}": "`crate-interp models` lists",
    "sweep {m} {d} --engine rey": "--engine 'rey' is none of",
    "sweep {m} {d} --format tex": "--format 'tex' is none of csv, markdown",
    "audit {m} {d} --eps -1": "--eps -1.0: give a finite number above 0",
    "concentration {m} {d} --k 0": "--k 0",
    "ablate {m} {d} --how mode": "--how 'mode' is none of mean, zero",
    "ablate {m} {d} --head L0H0 --head L6H0": "--head L6H0: the heads of this model are L0H0 to",
    "explore {m} {e} --sample -1": "--sample -1: the data has samples 0 to",
    "explore {m} {e} --size 29": "multiples of",
    "explore {m} {e} --size 480": "more than a page can show",
    "explore {m} {e} --circuit w.pth": "holds no circuit",
    "compare ' , ' x --out other": "names no network",
    "compare {m} {m} --out other": "models are compared on data",
    "compare swept swept --data embedded:fashion --out other": "are for models, but a and b",
    "compare {m} {m} --data embedded:fashion --limit 4 --out swept": "which would be lost",
}  # fmt: skip
GREY = "--config channels=1 --config image_size=28"  # a square would be a guess
PHOTOS = "sweep grey.pth --out out --config n_heads=4 --data imagefolder:photos --controls 0"
WRONG |= {
    PHOTOS: "Give --config channels=1",
    f"{PHOTOS} {GREY} --quiet": 'Give --config "mean=[...]" and --config "std=[...]"',
}
DONE[f"{PHOTOS} {GREY} --config mean=[0.5] --config std=[0.25]"] = ["The tables: out"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Checkpoints, pictures, a circuit and a saved sweep in a folder."""
    place = tmp_path_factory.mktemp("files")
    weights = published_layout(make("crate-alpha"))
    sizes = dict(image_size=(28, 28), patch_size=(4, 4), channels=1, d_model=48, d_head=12)
    square = make("crate-alpha", image_size=(4, 10), patch_size=(2, 5))
    args = argparse.Namespace(norm_pix_loss=True)
    for name, saved in {
        "w": weights, "averaged": weights | {"n_averaged": torch.tensor(3)},
        "odd": weights | {"transformer.odd": torch.ones(3)}, "square": published_layout(square),
        "mae": {"model": published("crate-mae", d=30), "args": args},
        "grey": published_layout(make(n_heads=4, **sizes)),
    }.items():  # fmt: skip
        torch.save(saved, place / f"{name}.pth")
    (place / "photos").mkdir()
    Image.new("L", (28, 28)).save(place / "photos" / "1.png")
    ci.circuits.Circuit([ci.circuits.Edge("L1H2", "logits", 1.0)]).save(place / "c.json")
    few = dict(limit=4, controls=0, probes="sparsity", progress=False)
    ci.sweep(ci.load(NAMES["m"]), "embedded:fashion", **few).save(place / "swept")
    return place


@pytest.fixture(autouse=True)
def here(files, monkeypatch):
    monkeypatch.chdir(files)


def words_of(line):
    for name, words in NAMES.items():
        line = line.replace(f"{{{name}}}", words)
    return shlex.split(line)


SLOW_LINES = [pytest.param(line, marks=pytest.mark.slow) for line in SLOW]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("line", [*DONE, *SLOW_LINES])
def test_what_a_command_prints(line, tmp_path, monkeypatch):
    for path in os.listdir():
        (tmp_path / path).symlink_to(os.path.abspath(path))
    monkeypatch.chdir(tmp_path)
    done = run(*words_of(line))
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    for words in (DONE | SLOW)[line]:
        assert " ".join(words.split()) in printed, done.stdout


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("line", WRONG)
def test_an_error_is_one_line_in_the_words_of_the_command_line(line):
    fails(WRONG[line], *words_of(line))


@pytest.mark.usefixtures("unchecked")
def test_a_new_process(tmp_path):
    assert process("--version").stdout.strip() == f"crate-interp {ci.__version__}"
    (tmp_path / "broken.pth").write_bytes(b"PK\x03\x04 half a file")
    broken = ("report", tmp_path / "broken.pth", "--data", "embedded:fashion")
    one_line("is not a readable checkpoint", process(*broken))
    with pytest.raises(ci.CheckpointError):  # and its traceback
        run("--debug", *broken)


def test_misspelt_verbs_and_options_get_the_nearest():
    assert "Did you mean 'sweep'" in run("swep").stderr
    assert "--limit" in run("sweep", "--limt", 3).stderr
    for name in COMMANDS:
        assert example(name) in " ".join(run(name, "--help").stdout.split()), name


def test_what_convert_writes_is_the_same_model(tmp_path):
    model, new = make("crate-alpha"), tmp_path / "new"
    assert run("convert", "w.pth", "--out", new, *SIZED.split()).returncode == 0
    loaded = ci.load(new)
    assert loaded.cfg == replace(model.cfg, model_name="new")
    assert "# new" in (new / "README.md").read_text()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert run("convert", f"{LM}@step-640", "--out", tmp_path / "lm").returncode == 0
    assert run("convert", f"{LM}@step-7", "--out", tmp_path / "no").returncode == 2
    lm, step = ci.load(tmp_path / "lm"), ci.load(LM, revision="step-640")
    assert torch.equal(lm("In the beginning"), step("In the beginning")) and lm.cfg == step.cfg


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


def test_quiet_shows_no_progress(tmp_path):
    command = ("sweep", NAMES["m"], "--data", "embedded:fashion", "--limit", 4)
    command += ("--probes", "sparsity", "--controls", 0, "--dtype", "float64")
    loud = run(*command, "--out", tmp_path / "a")
    quiet = run(*command, "--out", tmp_path / "b", "--quiet")
    assert "image/s" in loud.stderr and quiet.stderr == "" and "The tables" in quiet.stdout
    assert QUIET not in os.environ
    assert ci.SweepResult.load(tmp_path / "b").meta["dtype"] == "float64"
