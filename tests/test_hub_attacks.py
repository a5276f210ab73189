"""Servers that lie to the Hub loader: refused before anything is written, and given up in time.

Every test looks at the whole folder that the test may write to, before and after.
"""

import hashlib
import itertools
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import crate_interp as ci
from conftest import FIXTURES
from crate_interp.checkpoints.hub import cache, download, metadata
from crate_interp.checkpoints.hub import fetch as loader
from crate_interp.core import waiting
from test_hub import FILE, REPO, fails, left, table  # noqa: F401

WEIGHTS = (FIXTURES / "crate_alpha" / "crate_alpha_B16.pth").read_bytes()
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
COMMIT = "0123456789" * 4
HEX = set("0123456789abcdef")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two attempts


@pytest.fixture
def repo(hub):
    hub.repo("some/one").commit({"w.pth": WEIGHTS, "config.json": b"{}"})
    return hub.repos["some/one"]


def tree(folder):
    """Returns everything below a folder, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused(match, tmp_path, **options):
    """The load fails, and the folders are as they were; locks and empty folders may be new."""
    victim = tmp_path / "victim"
    victim.mkdir(exist_ok=True)
    (victim / "precious").write_text("mine")
    before = tree(tmp_path)
    options = {"file": "w.pth", "n_heads": 4, **options}
    said = fails(match, "some/one", cache_dir=tmp_path / "cache", **options)
    assert tree(tmp_path) == before
    return said


def lies(tmp_path):
    """Values that lead somewhere, or nowhere, in place of hexadecimal digits."""
    outside = str(tmp_path / "victim" / "new")
    return [
        f'"{outside}"', outside, f'W/"{outside}"', '"../../.."', '"../../../victim/precious"',
        "..", ".", '""', '"', "W/", "%2e%2e%2f%2e%2e%2fvictim", '"..\\..\\victim"',
        "C:\\Windows", "~/x", "a" * 39, "a" * 41, "a" * 63, "a" * 65, "a" * 60_000, "g" * 40,
        "A" * 40, f"{'a' * 40}/../../x", f"../{'a' * 40}", f"{'a' * 40} ", "\u00e9" * 40,
        f"{'a' * 40}, {'b' * 40}", "0x" + "a" * 38, "\x1b[31m", f"{'a' * 40}\0", "\0",
    ]  # fmt: skip


def test_digests_that_are_paths(repo, hub, tmp_path):
    for header, value in itertools.product(("ETag", "X-Linked-ETag"), lies(tmp_path)):
        hub.faults[:] = []
        hub.fault("w.pth", method="HEAD", told={"ETag": value, "X-Linked-Etag": "", header: value})
        if set(value.strip()) <= HEX and len(value.strip()) in (40, 64):
            continue  # white space at the end of a header is no part of it
        refused("ETag .* wanted 40 or 64|cannot reach the Hub|is not a Hub", tmp_path)
    assert not hub.sent()


def test_commits_that_are_paths(repo, hub, tmp_path):
    for value, status in itertools.product(lies(tmp_path), (None, 404)):
        if set(value.strip()) <= HEX and len(value.strip()) == 40:
            continue
        hub.faults[:] = []
        told = {"X-Repo-Commit": value}
        if status is None:
            hub.fault("w.pth", method="HEAD", told=told)
            refused("commit .* expected 40|cannot reach the Hub", tmp_path)
        else:  # the client notes files that are missing, by the commit
            told["X-Error-Code"] = "EntryNotFound"
            hub.fault("w.pth", method="HEAD", status=404, headers=told)
            refused("has no file|cannot reach the Hub", tmp_path)
    hub.faults[:] = []
    hub.fault("w.pth", method="HEAD", told={"X-Repo-Commit": COMMIT[::-1]})
    repo.commits[COMMIT] = {"w.pth": WEIGHTS}
    refused(f"the commit '{COMMIT[::-1]}'; expected {COMMIT}", tmp_path, revision=COMMIT)
    assert not hub.sent()


def test_sizes_and_addresses(repo, hub, tmp_path):
    for size in ("-1", "", "ten", "1e3", "nan", "0x10", "9" * 5000):
        hub.faults[:] = []
        hub.fault("w.pth", method="HEAD", told={"X-Linked-Size": size})
        refused("the size|cannot download", tmp_path)
    for place in (
        "file:///etc/passwd", "ftp://127.0.0.1/x", "data:text/plain,x", "gopher://x/", "http://",
        "http://127.0.0.1:99999/", "http://[::1/x", "javascript:1", "unix:/run/x", "//", "\\\\x\\y",
    ):  # fmt: skip
        hub.faults[:] = []
        hub.fault("w.pth", method="HEAD", told={"Location": place})
        refused("the address|has no file|cannot|is not a Hub|is gated", tmp_path)
    hub.faults[:] = []
    hub.fault("config.json", method="HEAD", told={"Content-Length": str(2**40)})
    refused("1099511627776 bytes; expected at most", tmp_path, file="config.json")
    assert not hub.sent()


def test_a_promise_that_the_table_contradicts(table, hub, tmp_path):  # noqa: F811
    hub.lying_sizes[FILE] = 10**7
    said = fails("has 10000000 bytes; expected", REPO, file=FILE, cache_dir=tmp_path)
    assert "Nothing was kept" in said and not left(tmp_path) and not hub.sent()


def test_a_second_answer_is_never_asked_for(repo, hub, tmp_path):
    """Honest once, and then not: what was checked is what is used."""
    hub.fault("w.pth", method="HEAD", told={"X-Linked-Size": str(len(WEIGHTS))}, times=1)
    hub.fault("w.pth", method="HEAD", told={"X-Linked-Etag": f'"{tmp_path}/victim"'})
    ci.load("some/one", file="w.pth", n_heads=4, cache_dir=tmp_path / "cache")
    asked = [path for _, method, path, _ in hub.requests if method == "HEAD" and "w.pth" in path]
    assert len(asked) == 1 and not (tmp_path / "victim").exists()


headers = st.text(
    st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=80
) | st.from_regex(r'(W/)?"?[0-9a-f/.]{38,66}"?', fullmatch=True)


@given(etag=headers, commit=headers, size=headers | st.integers(-5, 5).map(str))
@example(etag=f'W/"{"a" * 64}"', commit="b" * 40, size="3")
def test_any_answer_is_hexadecimal_or_refused(etag, commit, size):
    from huggingface_hub.file_download import _int_or_none, _normalize_etag

    told = SimpleNamespace(
        etag=_normalize_etag(etag), commit_hash=commit, size=_int_or_none(size), location="x"
    )
    try:
        metadata._check(told, "http://127.0.0.1/x", "http://127.0.0.1/x", "main", "some/one/w.pth")
    except ci.CheckpointError as error:
        assert "\n" not in str(error) and "nothing was kept" in str(error)
    else:
        assert set(told.etag or "/") <= HEX and len(told.etag) in (40, 64)
        assert set(commit) <= HEX and len(commit) == 40 and told.size >= 0


def test_more_than_was_promised(hub, tmp_path):
    content = b"0123456789"
    hub.repo("some/one").commit({"w.pth": content})

    def endless():
        yield from itertools.repeat(bytes(2**16))

    for told in ({}, {"Content-Encoding": "gzip"}):
        hub.faults[:] = []
        hub.fault("w.pth", method="GET", body=endless, told=told)
        said = fails(
            "more than the 10 bytes it had promised|compressed bytes",
            "some/one",
            file="w.pth",
            cache_dir=tmp_path,
        )
        assert "nothing was kept" in said and not left(tmp_path)
    assert hub.poured < 2**24  # what the buffers of two sockets hold: nobody reads on


def test_lengths_and_parts_that_do_not_fit(repo, hub, tmp_path):
    for told, match in (
        ({"Content-Length": "741000000"}, "'741000000' bytes; expected the"),
        ({"Content-Range": "bytes 7-9/10"}, None),
    ):
        hub.faults[:] = []
        hub.fault("/lfs/", method="GET", told=told, times=1)
        if match:
            fails(match, "some/one", file="w.pth", n_heads=4, cache_dir=tmp_path)
            assert not left(tmp_path)
    hub.faults[:] = []
    hub.fault("/lfs/", method="GET", truncate=20_000, times=1)
    hub.fault("/lfs/", method="GET", told={"Content-Range": "bytes 7-9/10"}, times=1)
    fails("the part 'bytes 7-9/10'; expected the part from byte 20000", "some/one", file="w.pth",
          n_heads=4, cache_dir=tmp_path)  # fmt: skip
    assert not left(tmp_path)


def test_a_server_that_cannot_go_on_begins_anew(repo, hub, tmp_path):
    hub.fault("/lfs/", method="GET", truncate=20_000, times=1)
    hub.fault("/lfs/", method="GET", body=lambda: [WEIGHTS], times=1)  # 200, and not 206
    model = ci.load("some/one", file="w.pth", n_heads=4, cache_dir=tmp_path)
    assert model.cfg.d_model == 32 and len(hub.sent()) == 2


def test_a_server_that_breaks_off_for_ever(repo, hub, tmp_path):
    hub.fault("/lfs/", method="GET", truncate=20_000)
    fails("cannot download .* Nothing was kept", "some/one", file="w.pth", cache_dir=tmp_path)
    assert not left(tmp_path) and len(hub.sent()) < 20


def test_other_bytes_than_the_digest_says(repo, hub, tmp_path):
    hub.fault("/lfs/", method="GET", body=lambda: [WEIGHTS[:-1] + b"x"])
    fails(
        f"came with the digest .* expected {DIGEST}", "some/one", file="w.pth", cache_dir=tmp_path
    )
    assert not left(tmp_path)


def drip(pieces, pause, hung_up=None):
    try:
        for piece in pieces:
            yield piece
            threading.Event().wait(pause)
    finally:
        if hung_up:
            hung_up.set()


def test_a_server_that_says_hardly_anything(repo, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "SILENCE", 0.1)
    hung_up = threading.Event()
    for fault in (
        dict(match="/lfs/", method="GET", body=lambda: drip(itertools.repeat(b"x"), 0.01, hung_up)),
        dict(match="/lfs/", method="GET", body=lambda: drip([b"x", b"y"], 1)),
    ):
        hub.faults[:] = []
        hub.fault(**fault)
        fails("hardly anything, for 0.1 seconds. Nothing was kept", "some/one", file="w.pth",
              cache_dir=tmp_path)  # fmt: skip
        assert not left(tmp_path)
    assert hung_up.wait(10)  # the thread that was given up ends by itself


def test_a_server_that_never_ends_its_headers(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "SILENCE", 0.1)
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            taken, _ = listening.accept()
            try:
                for sign in b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 200:
                    taken.send(bytes([sign]))
                    threading.Event().wait(0.01)
            except OSError:
                pass
            taken.close()

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        fails("hardly anything, for 0.1 seconds", "some/one", file="w.pth", cache_dir=tmp_path)
    assert not left(tmp_path)


def test_a_server_that_says_when_to_come_back(repo, hub, tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    later = {"Retry-After": str(10**9), "ratelimit": '"api";r=0;t=1000000'}
    hub.fault("w.pth", method="HEAD", status=429, headers=later)
    fails("asks to slow down", "some/one", file="w.pth", cache_dir=tmp_path)
    hub.faults[:] = []
    hub.fault("/lfs/", method="GET", status=429, headers=later)
    fails("asks to slow down", "some/one", file="w.pth", cache_dir=tmp_path)
    assert max(slept) <= 8 and sum(slept) < 60


def test_redirects(repo, hub, tmp_path):
    """Neither for ever, nor with a body, nor to what is no web; the token stays at home."""
    repo.token = "hf_secret"
    here = f"{hub.urls['cdn']}/lfs/{DIGEST}"
    hub.fault("/lfs/", method="GET", status=302, headers={"Location": here})
    fails("more than 5 redirects", "some/one", file="w.pth", token="hf_secret", cache_dir=tmp_path)
    for place, match in (("file:///etc/passwd", "the address"), ("gopher://x/y", "the address")):
        hub.faults[:] = []
        hub.fault("/lfs/", method="GET", status=302, headers={"Location": place})
        fails(match, "some/one", file="w.pth", token="hf_secret", cache_dir=tmp_path)
    assert not left(tmp_path)
    hub.faults[:] = []
    hub.fault("/lfs/", method="GET", status=302, headers={"Location": here}, times=2)
    hub.repos["some/one"].token = "hf_secret"
    ci.load("some/one", file="w.pth", n_heads=4, token="hf_secret", cache_dir=tmp_path)
    tokens = {told.get("Authorization") for origin, _, _, told in hub.requests if origin == "cdn"}
    assert tokens == {None}


def test_xet_is_never_used(repo, hub, tmp_path, monkeypatch):
    """Its addresses come from the server; what it fetches is neither counted nor timed."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    told = {
        "X-Xet-Hash": "a" * 64,
        "X-Xet-Refresh-Route": f"{hub.urls['cdn']}/steal",
        "Link": f'<{hub.urls["cdn"]}/steal>; rel="xet-auth"',
    }
    hub.fault("w.pth", method="HEAD", told=told)
    ci.load("some/one", file="w.pth", n_heads=4, cache_dir=tmp_path)
    assert not [path for _, _, path, _ in hub.requests if "steal" in path]


def test_warnings_of_a_server_obey_no_terminal(repo, hub, tmp_path, caplog):
    log = logging.getLogger("huggingface_hub.utils._http")
    before = list(log.filters)  # a thread that was given up may still have its own
    escape = "\x1b]0;mine\x07\x1b[31mred"
    hub.fault("w.pth", method="HEAD", told={"X-HF-Warning": f"topic; {escape}"})
    ci.load("some/one", file="w.pth", n_heads=4, cache_dir=tmp_path)
    assert "red" in caplog.text and "\x1b" not in caplog.text and "\x07" not in caplog.text
    assert log.filters == before


def test_revisions_that_are_paths(repo, hub, tmp_path):
    for revision in ("../x", "/etc", "a/../../b", "", ".", "a\\b", "x\0"):
        refused("is not a branch, tag or commit", tmp_path, revision=revision)
    assert not hub.requests
    repo.refs["refs/pr/1"] = repo.refs["main"]
    hub.repos["some/one"].refs["refs%2Fpr%2F1"] = repo.refs["main"]  # as it stands in an address
    ci.load("some/one", file="w.pth", revision="refs/pr/1", n_heads=4, cache_dir=tmp_path)
    ref = tmp_path / "models--some--one" / "refs" / "refs" / "pr" / "1"
    assert ref.read_text() == repo.refs["main"]


def test_only_old_leftovers_of_ours_are_removed(repo, hub, tmp_path):
    blobs = tmp_path / "models--some--one" / "blobs"
    blobs.mkdir(parents=True)
    ours = f"{'a' * 40}.{'b' * 32}.crate-interp.incomplete"
    young = f"{'c' * 40}.{'b' * 32}.crate-interp.incomplete"
    theirs = f"{'a' * 40}.0123abcd.incomplete"
    for name in (ours, young, theirs, "d" * 64, "notes.txt"):
        (blobs / name).write_text("x")
        if name != young:
            os.utime(blobs / name, (time.time() - 8 * 24 * 3600,) * 2)
    ci.load("some/one", file="w.pth", n_heads=4, cache_dir=tmp_path)
    assert {path.name for path in blobs.iterdir()} == {young, theirs, "d" * 64, "notes.txt", DIGEST}


def test_the_cache_is_that_of_the_client(repo, hub, tmp_path):
    """What it finds in our cache, and we in its."""
    import huggingface_hub

    ours = loader.fetch("some/one", "w.pth", cache_dir=tmp_path / "a")
    options = dict(endpoint=hub.urls["hub"], cache_dir=str(tmp_path / "b"))
    theirs = huggingface_hub.hf_hub_download("some/one", "w.pth", **options)
    parts = ours.relative_to(tmp_path / "a")
    assert str(parts) == os.path.relpath(theirs, tmp_path / "b")
    assert ours.resolve().relative_to(tmp_path / "a").parts[-2:] == ("blobs", DIGEST)
    found = huggingface_hub.hf_hub_download(
        "some/one", "w.pth", cache_dir=str(tmp_path / "a"), local_files_only=True
    )
    assert found == str(ours)
    before = len(hub.sent())
    again = loader.fetch("some/one", "w.pth", cache_dir=tmp_path / "b", local_files_only=True)
    assert str(again) == theirs and len(hub.sent()) == before
    assert os.stat(ours).st_mode & 0o777 == os.stat(theirs).st_mode & 0o777


def test_without_links_the_file_itself_moves(repo, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError("no links here")

    monkeypatch.setattr(cache.os, "symlink", refuse)
    path = loader.fetch("some/one", "w.pth", cache_dir=tmp_path)
    assert not path.is_symlink() and path.read_bytes() == WEIGHTS and len(left(tmp_path)) == 2


def test_eight_workers_fetch_a_file_once(repo, hub, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = set(
            pool.map(lambda _: loader.fetch("some/one", "w.pth", cache_dir=tmp_path), range(8))
        )
    assert len(paths) == 1 and len(hub.sent()) == 1


def test_a_watch_gives_up_and_gives_back():
    assert download.watched(lambda _: 3) == 3
    with pytest.raises(ZeroDivisionError):
        download.watched(lambda _: 1 / 0)
