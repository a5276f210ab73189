"""The command line: what is typed and what is said, faults, and what a run says of its time."""

import argparse
import io
import os
import shlex
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import crate_interp as ci
from command import fails, one_line, process, run
from conftest import HEADS, make, refuses
from crate_interp import reports
from crate_interp.cli import main
from crate_interp.cli.command_line import QUIET, example
from crate_interp.cli.commands import COMMANDS
from crate_interp.core.safe_text import is_plain
from crate_interp.questions import asking
from published import GIVEN, published
from reference import published_layout
from selection import few

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
    "audit --help": ["--grid", "--no-grid", "--chunk-size", "The seed of the random baselines."],
    "sweep {m} {d} --probes sparsity --controls 0 --format csv": ["probe,statistic"],
    "sweep {m} {d} --probes sparsity --controls 0 --format markdown": ["| probe | stat"],
    "explore {m} {e} --sample 3 --circuit c.json": ["sample 3 of embedded:fashion"],
    "explore crate-tiny-lm --text 'A girl drew a house'": ["crate-tiny-lm: A girl drew a house. "],
    "why {m} {e} --head L1H0 --query CLS --sample 3": ["L1H0: CLS ", "The page: "],
    "explore {m} {e} --size 56": ["sample 0 of embedded:fashion"],
    "compare swept swept --out other": ["swept (a) against swept (b)"],
    "compare swept,swept swept,swept --out other": ["swept and 1 more", "every difference is 0"],
}  # fmt: skip
# command line -> the one line on stderr
WRONG = {
    "report": "missing: SOURCE, --data. Example: crate-interp report crate-tiny",
    "convert --quiet --out x": "missing: SOURCE. Example: crate-interp convert",
    f"convert w.pth --out swept {SIZED}": "exists already: give a new folder",
    f"inspect odd.pth {SIZED}": "keys not used (1): transformer.odd",
    "explore {m} --text hello --out other": "crate-tiny-fashion reads images: --image",
    "why {m} {e} --head L1H0 --query one": "--query one: give a number from 0, or CLS of an image",
    "graph {m} --out other": "give --text TEXT, --image FILE, or --data with --sample NUMBER.",
    "report {m} {d} --config n_heads": "--config 'n_heads': write NAME=VALUE",
    "report {m} {d} --batch-size 0": "--batch-size 0: give a whole number of at least 1",
    "report {m} {d} --probes sparcity": "there is no probe 'sparcity'. Did you mean sparsity",
    "report {m} {d} --probes entropy": "It is a statistic of attention: give this probe",
    "report {m} {d} --data embedded:fashin": "'fashin' is none of fashion, pictures, ",
    "report {m} {d} --out /dev/null/o": "cannot write into",
    "report w.pth {d}": "so it is one of 1, 5, 7, 35; 12 patches make no square grid.",
    "sweep crate-tiny-fashio {d}": "`crate-interp models` lists",
    "ablate {m} {d} --head L0H0 --head L6H0": "--head L6H0: the heads of this model are L0H0 to",
    "explore {m} {e} --circuit w.pth": "holds no circuit",
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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("line", DONE)
def test_what_a_command_prints(line, tmp_path, monkeypatch):
    for path in os.listdir():
        (tmp_path / path).symlink_to(os.path.abspath(path))
    monkeypatch.chdir(tmp_path)
    done = run(*words_of(line))
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    for words in DONE[line]:
        assert " ".join(words.split()) in printed, done.stdout
    typed = shlex.join(["crate-interp", *words_of(line)]).replace("'", "&#39;")
    for page in tmp_path.glob("runs/explore-*/explore.html"):
        assert typed in page.read_text(encoding="utf-8")


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


def test_quiet_shows_no_progress(tmp_path):
    command = ("sweep", NAMES["m"], "--data", "embedded:fashion", "--limit", 4)
    command += ("--probes", "sparsity", "--controls", 0, "--dtype", "float64")
    loud = run(*command, "--out", tmp_path / "a")
    quiet = run(*command, "--out", tmp_path / "b", "--quiet")
    assert "image/s" in loud.stderr and quiet.stderr == "" and "The tables" in quiet.stdout
    assert QUIET not in os.environ
    assert ci.SweepResult.load(tmp_path / "b").meta["dtype"] == "float64"


ON_DATA = ("crate-tiny-fashion", "--data", "embedded:fashion", "--limit", 4)
REPORT = ("report", *ON_DATA, "--probes", "sparsity", "--untrained", 0)


def says(match, code, done):
    """The command ended with this code; its own words are one plain line at the end of stderr."""
    lines = [line for line in done.stderr.splitlines() if "crate-interp:" in line]
    assert done.returncode == code and len(lines) == 1, done.stderr
    said = "crate-interp:" + lines[0].split("crate-interp:")[1]
    assert match in said and is_plain(said, 1600) and "Traceback" not in done.stderr


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def test_an_interrupt_is_one_line_that_says_where_the_work_is(tmp_path, monkeypatch, interrupts):
    """A real one, after the sweep has been saved."""

    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(reports, "report_page", interrupted)
    out = tmp_path / "o"
    says(f"interrupted; what was finished is in {out}", 130, run(*REPORT, "--out", out))
    assert len(ci.SweepResult.load(out).samples()) > 0
    monkeypatch.setattr(reports, "sweep", interrupted)
    nothing = run(*REPORT, "--out", tmp_path / "new")
    says("interrupted; nothing was finished", 130, nothing)
    assert not (tmp_path / "new").exists()
    says("interrupted", 130, run("--debug", *REPORT, "--out", tmp_path / "new"))


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "unexpected MemoryError (--debug"),
        (RecursionError("too deep"), "unexpected RecursionError: too deep (--debug"),
        (RuntimeError("a\x1b[31m\nb"), "unexpected RuntimeError: a\\x1b[31m b (--debug"),
        (Panic("Rust"), "unexpected Panic: Rust (--debug"),
        (AssertionError(), "unexpected AssertionError (--debug"),
    ],
)
def test_an_unexpected_error_is_one_line_and_3(error, words, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "sweep", raising(error))
    says(words, 3, run(*REPORT, "--out", tmp_path / "o"))
    with pytest.raises(type(error)):
        run("--debug", *REPORT, "--out", tmp_path / "o")


def test_any_text_is_printed_on_an_ascii_terminal(tmp_path, monkeypatch):
    """And a warning or an error cannot write to the terminal's controls."""
    raw = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, "ascii", write_through=True))

    def report(*_, **__):
        sys.stdout.write("1 ± 2 – 犬\n")
        warnings.simplefilter("always")
        warnings.warn("a key \x1b]0;owned\x07\nof a file", stacklevel=1)
        raise ValueError("犬\x1b[31m")

    monkeypatch.setattr(reports, "sweep", report)
    words = [*map(str, REPORT), "--quiet", "--out", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", ["crate-interp", *words])
    refuses("2", lambda: main(), SystemExit)
    assert raw.getvalue().decode("ascii").splitlines()[-3:] == [
        "1 \\xb1 2 \\u2013 \\u72ac",
        "crate-interp: warning: a key \\x1b]0;owned\\x07 of a file",
        "crate-interp: \\u72ac\\x1b[31m",
    ]


@pytest.fixture
def pictures():
    return make("crate", n_layers=2), torch.randn(7, 3, 6, 20)


def test_long_work_says_after_its_first_chunk_what_is_left(pictures, tmp_path, monkeypatch, capsys):
    now, (model, data) = [0.0], pictures
    monkeypatch.setattr(asking.time, "perf_counter", lambda: now[0])
    model.blocks[0].hook_resid_pre.add_hook(lambda value, hook: now.__setitem__(0, now[0] + 30))
    options = dict(probes=["sparsity"], controls=0, chunk_size=2, batch_size=2)
    for out in (None, tmp_path):
        ci.sweep(model, data, out=out, **options)
        lines = [line for line in capsys.readouterr().err.splitlines() if "more chunks" in line]
        assert len(lines) == 1 and "sweep: 3 more chunks, about 75 s." in lines[0]  # 30 s for 2
        assert ("the same command continues it" in lines[0]) == (out is not None)
    ci.sweep(model, data[:4], **options)  # 30 s are left
    assert "more chunks" not in capsys.readouterr().err


STAGES = {"ablate": 2, "concentration": 7, "atlas": 2, "audit": 11, "segment": 7}  # others: one
DRY = ("report", "sweep", "ablate", "segment")
SLOW = ("compare", "atoms", "atlas", "audit", "concentration")


@pytest.mark.parametrize(
    "verb", few((*DRY, "compare", "atoms", "atlas", "audit", "concentration"), len(DRY))
)
def test_a_dry_run_measures_a_chunk_of_each_stage_and_writes_nothing(verb, tmp_path):
    out, model = tmp_path / "out", "crate-tiny-pictures"
    words = [verb, model, *([model] if verb == "compare" else [])]
    words += ["--data", "embedded:pictures", "--limit", "9", "--out", out, "--dry-run"]
    chunked = verb not in ("report", "compare")  # they sweep, a chunk at a time
    done = run(*words, "--quiet", *(["--chunk-size", "4"] if chunked else []))
    assert done.returncode == 0 and "%|" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if "a million would take" in line]
    assert len(lines) == STAGES.get(verb, 1), done.stderr
    size = "4 images took" if chunked else "9 images took"
    assert all(size in line and "so all 9 take about" in line for line in lines)
    assert done.stderr.count("in all") == 1 and not done.stdout and not out.exists()
