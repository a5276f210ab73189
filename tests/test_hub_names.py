"""Names on the Hub: what does not fit the grammar is refused before anything is asked."""

import re
import socket
import threading
import time
from contextlib import contextmanager

import datasets
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import example, given
from hypothesis import strategies as st

import crate_interp as ci
from conftest import make
from crate_interp.checkpoints.hub import fetch
from crate_interp.core import hub_names, waiting
from crate_interp.data import named_data
from selection import few

GOOD = ("owner/name:test", "a/b:train[:10%]", "o-w.n_er/N:train[5:-5]+test", "x/y:a.b", "1/2:_")
# names that were tried on the real Hub's libraries, and their siblings
BAD = (
    "../..:train", "a/..:train", "../b:train", "a/b:..", "a/b:te\nst", "a/b:test\n", "a/b\n:test",
    "a/b", "a/b:", "/b:test", "a/:test", "a/b/c:test", "a:test", ".a/b:test", "-a/b:test",
    "a/b.:test", "a/b--c:test", "a/b..c:test", "a/b.git:test", "a b/c:test", "a/b:te st", "a/b:-x",
    "a/b@main:test", "a/b:c:test", "a/b:test[", "a/b:test[1]", "a/b:test[:x]", "a/b:+test",
    "https://huggingface.co/a/b:test", "~/b:test", "a\\b:test", "a/b:test\0", "\u00e9/b:test",
    "a/b:\uff54est", f"{'a' * 97}/b:test", f"a/{'b' * 97}:test", f"a/b:{'c' * 97}", "a/b:a+" * 99,
    "a/\ud800:test", "a/b:test[:9999999999999]", "%2e%2e/%2e%2e:train", "a/b?x=y:test",
    "a/b#c:test",
)  # fmt: skip
NAMES = st.text(st.sampled_from("ab9./-_:[]+%@ \n\\\0\u00e9"), max_size=14) | st.text(max_size=30)
MANY = st.one_of(
    NAMES, st.tuples(NAMES, NAMES, NAMES).map("{0[0]}/{0[1]}:{0[2]}".format), st.sampled_from(GOOD)
)
CHARACTERS = re.compile(r"[A-Za-z0-9._-]{1,96}/[A-Za-z0-9._-]{1,96}:[A-Za-z0-9._\[\]:%+-]+")


@pytest.fixture
def asked(monkeypatch):
    """What reached the libraries that ask the Hub."""
    reached = []

    def load_dataset(repo, split):
        reached.append(f"{repo}:{split}")
        return datasets.Dataset.from_dict({"text": ["one"]})

    def offer(wanted, token, needed):
        reached.append((wanted.repo, wanted.file, wanted.version))
        raise ci.CheckpointError("asked")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch, "_asked", offer)
    return reached


@pytest.mark.parametrize("name", GOOD)
def test_good_names_of_data(name, asked):
    assert named_data.from_hub(name)["text"][:] == ["one"] and asked == [name]


@pytest.mark.parametrize("name", BAD)
def test_bad_names_of_data(name, asked):
    with pytest.raises(ValueError, match="write hf:owner/name:split, such as") as caught:
        ci.sweep(make(), f"hf:{name}", progress=False)
    assert not asked and str(caught.value).isprintable()


@given(MANY)
@example("../..:train")
def test_any_name_of_data_fits_or_is_refused(name):
    found = hub_names.data_set(name)
    if found is not None:
        repo, split = found
        assert f"{repo}:{split}" == name and CHARACTERS.fullmatch(name) and ".." not in name
        validate_repo_id(repo)
        for part in split.split("+"):
            assert not part.startswith(("-", ".", "["))


@given(MANY | st.sampled_from(["gpt2", "openai-community/gpt2", "a/b-.c"]))
def test_repos_are_those_of_the_hub(name):
    """The Hub's own library agrees, but for names that begin or end oddly within a word."""
    try:
        validate_repo_id(name)
        theirs = True
    except (HFValidationError, UnicodeError):
        theirs = False
    if hub_names.is_repo(name):
        assert theirs
    elif theirs:
        raise AssertionError(name)


REPOS = (
    "a b/c", "a/..", ".a/b", "-a/b", "a/b--c", "a/b\n", "\n/b", "a/b?x", "a/b#c",
    "a/\u00e9", f"a/{'b' * 97}", "a/b.git", "hf:a/b", "~/b", "a/b\0", "a/b@v1",
)  # fmt: skip
FILES = (
    "../x",
    "/etc/passwd",
    "a\\b",
    "x\0",
    "a\nb",
    "\x1b[31m.pth",
    "a//b",
    "f" * 256,
    "",
    "x\u202e.pth",
)
REVISIONS = (
    "../x", "", "x\0", "a b", "a\nb", "-f", ".x", "a/../b", "a//b", "x~1", "x^", "a:b", "x@{1}",
    "/x", "x" * 97, "\u00e9", "a\\b", "x/", "x.", "?",
)  # fmt: skip


@pytest.mark.parametrize("name", REPOS)
def test_bad_names_of_repos(name, asked, tmp_path):
    match = "is not the name of a repo: write owner/name|is no file, no folder, no known model"
    for options in ({}, {"file": "w.pth"}):
        with pytest.raises(ci.CheckpointError, match=match):
            ci.load(name, cache_dir=tmp_path / "cache", **options)
    assert not asked and not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", FILES)
def test_bad_names_of_files(file, asked, tmp_path):
    with pytest.raises(ci.CheckpointError, match="is not a path inside a repo") as caught:
        ci.load("some/one", file=file, cache_dir=tmp_path / "cache")
    assert not asked and not list(tmp_path.iterdir()) and str(caught.value).isprintable()


@pytest.mark.parametrize("revision", REVISIONS)
def test_bad_names_of_revisions(revision, asked, tmp_path):
    with pytest.raises(ci.CheckpointError, match="is not a branch, tag or commit") as caught:
        ci.load("some/one", file="w.pth", revision=revision, cache_dir=tmp_path / "cache")
    assert not asked and not list(tmp_path.iterdir()) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "revision", ["main", "v1.0", "refs/pr/1", "step-100", "a--b", "f" * 40, "1.0+cu"]
)
@pytest.mark.parametrize("file", ["w.pth", ".hidden/my weights (1).pth", "\u6a21\u578b/w.pth"])
def test_good_names_are_asked_for(revision, file, asked, tmp_path):
    with pytest.raises(ci.CheckpointError, match="asked"):
        ci.load("some/one", file=file, revision=revision, cache_dir=tmp_path)
    assert asked == [("some/one", file, revision)]


@pytest.mark.parametrize("address", ["hf://some/one", "https://huggingface.co/some/one/tree/main"])
def test_addresses_get_the_name_to_type(address, asked):
    with pytest.raises(ci.CheckpointError, match="Give 'some/one', with file='...'"):
        ci.load(address)


def silent(taken):
    threading.Event().wait(30)


def one_byte_now_and_then(taken):
    for sign in b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 10_000:
        taken.send(bytes([sign]))
        time.sleep(0.05)


def redirecting(taken):
    while taken.recv(65536):
        taken.send(b"HTTP/1.1 307 Go\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n")
        time.sleep(0.05)


def endless_headers(taken):
    taken.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        taken.send(b"X-Header: again\r\n")
        time.sleep(0.05)


def endless_body(taken):
    taken.recv(65536)
    taken.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while True:
        taken.send(b" ")
        time.sleep(0.05)


@contextmanager
def serving(behaviour):
    def serve(listening):
        while True:
            try:
                taken, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(taken,), daemon=True).start()

    def answer(taken):
        try:
            behaviour(taken)
        except OSError:
            pass
        taken.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


SERVERS = (silent, one_byte_now_and_then, redirecting, endless_headers, endless_body)


@pytest.mark.parametrize("behaviour", few(SERVERS))
def test_a_server_that_does_not_answer_is_given_up(behaviour, monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "SILENCE", 0.5)
    with serving(behaviour) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
        match = "the server sent nothing, or hardly anything, for 0.5 seconds"
        with pytest.raises(ValueError, match=match):
            ci.sweep(make(), "hf:some/one:test", progress=False)
        with pytest.raises(ci.CheckpointError, match=match):
            ci.load("some/one", file="w.pth", cache_dir=tmp_path)


def test_work_that_makes_progress_is_not_given_up(monkeypatch):
    monkeypatch.setattr(waiting, "SILENCE", 0.05)
    steps = iter(range(10**6))
    assert waiting.watched(lambda watch: time.sleep(0.3) or 7, lambda: next(steps)) == 7
    with pytest.raises(TimeoutError):
        waiting.watched(lambda watch: time.sleep(0.3), lambda: 1)
