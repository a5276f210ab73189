"""What goes wrong around a command: one line for each fault, a code to tell them apart, no loss."""

import io
import signal
import sys
import warnings

import pytest

import crate_interp as ci
from command import run
from crate_interp.cli import main
from crate_interp.core.safe_text import is_plain
from crate_interp.reports import run as reports

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
