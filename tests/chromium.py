"""Pages in a headless Chromium: their document, their look, and what they ask the network for."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from selection import needs_browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-sync --disable-background-networking --disable-component-update "
    "--disable-default-apps --virtual-time-budget=6000 "
    "--disable-features=IsolateSandboxedIframes"  # virtual time waits for no other process
).split()


def found() -> str | None:
    """Returns the path of the program, or None if it is not installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def require() -> None:
    """Skips the test if there is no Chromium, and fails it if CRATE_BROWSER=required."""
    if found() is None:
        lacking("there is no Chromium: apt-get install chromium")


def lacking(what: str) -> None:
    """Skips the test for want of a browser, and fails it if CRATE_BROWSER=required."""
    if needs_browser():
        pytest.fail(f"{what} (CRATE_BROWSER=required)", pytrace=False)
    pytest.skip(what)


def opened(
    page: Path, size: tuple[int, int] = (1000, 900), picture: Path | None = None
) -> tuple[str, list[str]]:
    """Returns a page's document after its scripts have run, and the addresses that it asked for."""
    program = found()
    assert program is not None, "there is no Chromium"
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "net.json"
        flags = [
            *FLAGS,
            f"--user-data-dir={place}/data",
            f"--window-size={size[0]},{size[1]}",
            f"--log-net-log={log}",
        ]
        what = [f"--screenshot={picture}"] if picture else ["--dump-dom"]
        done = subprocess.run(
            [program, *flags, *what, page.resolve().as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        text = log.read_text().rstrip().rstrip(",")
        events = json.loads(text if text.endswith("}") else text + "]}")["events"]
    asked = (event.get("params", {}) for event in events)
    # the browser itself asks for updates, time and accounts: those have no origin
    urls = {
        one["url"]
        for one in asked
        if "url" in one and one.get("initiator", "not an origin") != "not an origin"
    }
    return done.stdout, sorted(url for url in urls if url.startswith(("http", "ws", "ftp")))
