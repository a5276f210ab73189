"""What goes wrong around a command: one line for each fault, a code to tell them apart, no loss."""

import errno
import io
import os
import signal
import sys
import warnings

import pytest
import torch

import crate_interp as ci
from command import run
from conftest import PLAIN, make
from crate_interp.cli import main
from crate_interp.core.safe_text import is_plain
from crate_interp.reports import run as reports
from folders import largest_file

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


# --- Ctrl-C and errors that nobody expected ---


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


# --- disks ---


@pytest.mark.parametrize("size", [0, 3000, 40_000])
def test_a_full_disk_is_one_line(size, tmp_path):
    """40,000 bytes are enough for the tables and too few for the page: the tables stay."""
    out = tmp_path / "o"
    with largest_file(size):
        done = run(*REPORT, "--out", out)
        says("", 2, done)
        if size:
            converted = run("convert", "crate-tiny-fashion", "--out", tmp_path / "new")
            says("too large", converted.returncode, converted)
            assert converted.returncode == 2 and not (tmp_path / "new").exists()
    assert "too large" in done.stderr and "make room, or give another folder; " in done.stderr
    if size == 40_000:
        assert f"what was finished is in {out}" in done.stderr
        assert len(ci.SweepResult.load(out).samples()) == 4 * 6
    else:
        assert "nothing was finished" in done.stderr
        with pytest.raises(ValueError, match="does not hold a saved SweepResult"):
            ci.SweepResult.load(out)


@pytest.mark.parametrize("call", ["replace", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_every_call_of_the_system_may_fail(call, code, tmp_path, monkeypatch):
    monkeypatch.setattr(os, call, raising(OSError(code, os.strerror(code))))
    says(os.strerror(code), 2, run("convert", "crate-tiny-fashion", "--out", tmp_path / "new"))
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


# --- terminals and arguments ---


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
    with pytest.raises(SystemExit, match="2"):
        main()
    assert raw.getvalue().decode("ascii").splitlines()[-3:] == [
        "1 \\xb1 2 \\u2013 \\u72ac",
        "crate-interp: warning: a key \\x1b]0;owned\\x07 of a file",
        "crate-interp: \\u72ac\\x1b[31m",
    ]


def test_no_argument_is_a_traceback():
    for odd in ("\udcff", "a\0b", "\x1b[31m", "x" * 5000):
        data = ("--data", f"imagefolder:{odd}", "--out", "/dev/null/o")
        says("", 2, run("report", f"{odd}.pth", *data))
        says("", 2, run("convert", f"{odd}.pth", "--out", "/dev/null/o"))
        says("", 2, run("report", "crate-tiny-fashion", "--data", odd, "--out", "/dev/null/o"))


# --- models that wrap a model ---


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_compiled_model_is_refused_with_the_model_in_it(tmp_path):
    model, images = make(**PLAIN), torch.rand(4, 3, 6, 20)
    compiled = torch.compile(model, backend="eager")
    parallel = torch.nn.DataParallel(compiled)
    heads, quiet = [(0, 0)], dict(progress=False)

    def metric(logits):
        return logits[:, 0].mean()

    for wrapped, place in ((compiled, "model._orig_mod"), (parallel, "model.module._orig_mod")):
        for measure in (
            lambda one: ci.sweep(one, images, **quiet),
            lambda one: ci.report(one, images, tmp_path / "o"),
            lambda one: ci.audit(one, images, **quiet),
            lambda one: ci.segment(one, images, **quiet),
            lambda one: ci.atoms(one, images, **quiet),
            lambda one: ci.atlas(one, images, **quiet),
            lambda one: ci.surgery(one, images, **quiet),
            lambda one: ci.linear_probe(one, images, **quiet),
            lambda one: ci.circuits.composition(one),
            lambda one: ci.circuits.evaluate(one, heads, images, metric, **quiet),
            lambda one: ci.circuits.path_patch(one, images[:1], images[1:2], metric),
            lambda one: ci.circuits.attribution_patch(one, images[:1], images[1:2], metric),
        ):
            with pytest.raises(
                ValueError, match=f"wraps a hooked model: give the hooked model, {place}."
            ):
                measure(wrapped)
        with pytest.raises(ci.CheckpointError, match=f"wraps a hooked model: use the .*{place}."):
            ci.load(wrapped)
    inside = compiled._orig_mod
    assert len(ci.sweep(inside, images, probes=["sparsity"], **quiet).samples()) == 4 * 3
    with pytest.raises(ValueError, match="cannot measure Linear: give a hooked model"):
        ci.sweep(torch.nn.Linear(2, 2), images)
