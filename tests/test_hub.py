"""The Hub loader: the real huggingface_hub client against a stand-in on 127.0.0.1.

loopback.py says what that shows.
"""

import copy
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

import crate_interp as ci
from conftest import FIXTURES
from crate_interp.checkpoints.hub import download, registry
from selection import few
from test_families import recorded

B16 = FIXTURES / "crate_alpha" / "crate_alpha_B16.pth"
REPO, FILE = "UCSC-VLAA/CRATE-alpha", "torch/crate_alpha_B16.pth"
# which fixture stands in for a file of the table, and what its tensors cannot tell
STANDINS = {
    "crate-alpha": ("crate_alpha/crate_alpha_B16.pth", dict(n_heads=4)),
    "crate-alpha jax": ("crate_alpha_jax/crate_alpha_B16_in1k.npz", dict(n_heads=4)),
    "clipa": ("crate_alpha_clipa/crate_alpha_CLIPA_L14.pth", dict(n_heads=4, text_n_heads=3)),
    "crate-lm": (
        "crate_lm_overcomplete/ckpt-crate-12l-overparam-600000.pt",
        dict(n_heads=4, tokenizer="gpt2"),
    ),
    "sae": ("crate_lm_sae/0.pt", {}),
    "nanochat-crate": ("nanochat_crate_alpha/model.safetensors", {}),
}
BESIDE = {
    "config.json": "nanochat_crate_alpha/config.json",
    "tokenizer.pkl": "nanochat_crate_alpha/tokenizer.pkl",
}


def standin(row):
    key = "crate-alpha jax" if row["name"].endswith("-jax") else row["family"]
    path, config = STANDINS[key]
    return FIXTURES / path, config


def on_the_hub():
    return [row for row in registry.MODELS if row["repo"] and row["file"]]


@pytest.fixture
def table(hub, monkeypatch):
    """The Hub rows of the shipped table with digests and sizes of stand-ins, and their repo."""
    rows = copy.deepcopy(list(registry.MODELS))
    for row in (row for row in rows if row["repo"] and row["file"]):
        path, config = standin(row)
        pre = {
            name: row["config"][name]
            for name in ("resize", "crop", "mean", "std")
            if name in row["config"]
        }
        row.update(sha256=registry.sha256(path), bytes=path.stat().st_size, config=config | pre)
        repo = hub.repos.get(row["repo"]) or hub.repo(row["repo"])
        beside = {
            name: (FIXTURES / BESIDE.get(name, "crate_lm_sae/0_cfg.json")).read_bytes()
            for name in row["beside"]
        }
        sha = repo.commit({row["file"]: path.read_bytes(), **beside})
        if row["revision"]:
            repo.commits[row["revision"]] = {
                **repo.commits.get(row["revision"], {}),
                **repo.commits[sha],
            }
    monkeypatch.setattr(registry, "MODELS", tuple(rows))
    return rows


def fails(match, *args, **kwargs):
    with pytest.raises(ci.CheckpointError, match=match) as caught:
        ci.load(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", few((row["name"] for row in on_the_hub()), 5))
def test_every_entry_of_the_table(name, table, tmp_path):
    row = registry.find(name)
    by_name = ci.load(name, cache_dir=tmp_path)
    by_file = ci.load(row["repo"], file=row["file"], cache_dir=tmp_path)
    local, _ = standin(row)
    from_disk = ci.load(local)  # its digest is in the table, which then says the rest
    for model in (by_file, from_disk):
        assert model.cfg == by_name.cfg
        for ours, theirs in zip(model.parameters(), by_name.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    if row["family"] == "crate-alpha":
        tensors = recorded(local.parent.name)
        images = (
            tensors["images"] if "images" in tensors else tensors["images_nhwc"].permute(0, 3, 1, 2)
        )
        with torch.no_grad():
            torch.testing.assert_close(by_name(images), tensors["logits"], atol=2e-5, rtol=1e-4)
        assert (
            by_name.cfg.resize == 256
            and by_name.cfg.crop == 224
            and by_name.cfg.mean == (0.485, 0.456, 0.406)
        )
    if row["family"] == "nanochat-crate":
        assert by_name.to_tokens("the theory")[0].tolist() == [276, 260, 261, 269, 121]


def test_the_shipped_table_refuses_stand_ins(hub, tmp_path):
    known = [row for row in on_the_hub() if row["bytes"] or row["sha256"]]
    assert len(known) >= 10
    for row in known:
        path, _ = standin(row)
        repo = hub.repos.get(row["repo"]) or hub.repo(row["repo"])
        repo.commits[row["revision"]] = {row["file"]: path.read_bytes()}
        fails(
            f"{row['name']}: .* (bytes|digest .*); expected {row['bytes'] or row['sha256']}",
            row["name"],
            cache_dir=tmp_path,
        )


def test_first_call_second_call_and_pinned_revision(table, hub, tmp_path):
    ci.load(REPO, file=FILE, cache_dir=tmp_path)
    assert len(hub.sent()) == 1  # from the second origin
    pinned = registry.find("crate-alpha-b16")["revision"]
    assert all(pinned in path for _, _, path, _ in hub.requests if "/resolve/" in path)
    before = len(hub.requests)
    ci.load("crate-alpha-b16", cache_dir=tmp_path)
    assert len(hub.requests) == before  # a commit is final: nothing is even asked
    ci.load(REPO, file=FILE, revision="main", cache_dir=tmp_path)
    assert [method for _, method, _, _ in hub.requests[before:]] == [
        "HEAD"
    ]  # main may move; the content has not


def test_a_redirect_to_another_origin_gets_no_token(table, hub, tmp_path):
    hub.repos[REPO].token = "hf_secret"
    ci.load(REPO, file=FILE, cache_dir=tmp_path, token="hf_secret")
    asked = {
        origin: [headers.get("Authorization") for o, _, _, headers in hub.requests if o == origin]
        for origin in ("hub", "cdn")
    }
    assert set(asked["hub"]) == {"Bearer hf_secret"} and set(asked["cdn"]) == {None}


def test_a_dropped_connection_is_taken_up_again(table, hub, tmp_path):
    hub.fault("/lfs/", origin="cdn", method="GET", truncate=20_000, times=1)
    ci.load(REPO, file=FILE, cache_dir=tmp_path)
    ranges = [headers.get("Range") for origin, _, _, headers in hub.requests if origin == "cdn"]
    assert ranges[0] is None and ranges[1] == "bytes=20000-" and len(ranges) == 2


def test_a_download_that_fails_leaves_nothing_and_the_next_succeeds(table, hub, tmp_path):
    hub.fault("/lfs/", origin="cdn", method="GET", status=500, times=1)
    fails(f"cannot download {REPO}/{FILE} at revision .*500", REPO, file=FILE, cache_dir=tmp_path)
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.suffix not in (".lock", ".TAG", "")
    ]
    assert not list(tmp_path.rglob("*.incomplete"))
    ci.load(REPO, file=FILE, cache_dir=tmp_path)


def test_401_403_and_gated(table, hub, tmp_path):
    hub.repos[REPO].token = "hf_right"
    fails(
        "has no repo 'UCSC-VLAA/CRATE-alpha', or it is private",
        REPO,
        file=FILE,
        cache_dir=tmp_path,
        token=False,
    )
    hub.repos[REPO].gated = True
    fails("is gated: accept its terms", REPO, file=FILE, cache_dir=tmp_path, token=False)
    fails("is gated: accept its terms", REPO, file=FILE, cache_dir=tmp_path, token="hf_wrong")
    hub.fault("resolve", status=403)
    fails("the token has no access to the file", REPO, file=FILE, cache_dir=tmp_path, token="hf_x")
    hub.faults[:] = []
    hub.fault("resolve", status=401)
    fails("the Hub does not accept the token", REPO, file=FILE, cache_dir=tmp_path, token="hf_x")


def test_404(table, hub, tmp_path):
    fails("the Hub has no repo 'no/body'", "no/body", file="x.pth", cache_dir=tmp_path)
    fails("has no file 'x.pth'", REPO, file="x.pth", cache_dir=tmp_path)
    fails("has no revision 'v9'", REPO, file=FILE, revision="v9", cache_dir=tmp_path)
    hub.repo("some/one").commit({"weights.pth": b"x"})
    fails(
        "has no config.json, so it was not made by push_to_hub: name a weight file",
        "some/one",
        cache_dir=tmp_path,
    )
    fails("is not the name of a repo|no owner/repo", "a b/c", file="x", cache_dir=tmp_path)
    for name in ("../x", "/etc/passwd", "a\\b", "x/../../y", ""):
        fails("is not a path inside a repo", REPO, file=name, cache_dir=tmp_path)


def test_429_and_500_without_a_cached_copy(table, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits between its attempts
    hub.fault("resolve", status=429)
    fails("the Hub asks to slow down", REPO, file=FILE, cache_dir=tmp_path)
    hub.faults[:] = []
    hub.fault("resolve", status=500)
    fails("cannot (download|reach the Hub for)", REPO, file=FILE, cache_dir=tmp_path)
    hub.faults[:] = []
    hub.fault("resolve", method="HEAD", status=500, times=1)
    ci.load(REPO, file=FILE, cache_dir=tmp_path)  # one that passes


def test_wrong_size_and_wrong_digest(table, hub, tmp_path):
    hub.lying_sizes[FILE] = 10**7
    fails("cannot download|has .* bytes", REPO, file=FILE, cache_dir=tmp_path / "a")
    hub.lying_sizes.clear()
    row = registry.find("crate-alpha-b16")
    files = hub.repos[REPO].commits[row["revision"]]
    good = files[FILE]
    files[FILE] = good[:-1]
    fails("expected " + str(row["bytes"]), REPO, file=FILE, cache_dir=tmp_path / "b")
    files[FILE] = good[:-1] + bytes([good[-1] ^ 1])
    said = fails(
        "has the digest .* expected " + row["sha256"], REPO, file=FILE, cache_dir=tmp_path / "c"
    )
    assert "load it again" in said
    files[FILE] = good
    ci.load(REPO, file=FILE, cache_dir=tmp_path / "d")


def test_server_gone_and_offline(table, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fails(
        "is not in the cache, and the network is switched off",
        REPO,
        file=FILE,
        cache_dir=tmp_path,
        local_files_only=True,
    )
    model = ci.load(REPO, file=FILE, revision="main", cache_dir=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    again = ci.load(REPO, file=FILE, revision="main", cache_dir=tmp_path)
    assert again.cfg == model.cfg
    assert (
        ci.load(REPO, file=FILE, revision="main", cache_dir=tmp_path, local_files_only=True).cfg
        == model.cfg
    )
    fails(
        "cannot reach the Hub|cannot download",
        REPO,
        file=FILE,
        revision="main",
        cache_dir=tmp_path / "other",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails("HF_HUB_OFFLINE=1", REPO, file=FILE, revision="main", cache_dir=tmp_path / "other")
    assert ci.load(REPO, file=FILE, revision="main", cache_dir=tmp_path).cfg == model.cfg


@pytest.mark.slow
def test_offline_in_a_process_of_its_own(tmp_path):
    """HF_HUB_OFFLINE is read when huggingface_hub is imported."""
    code = (
        "import crate_interp as ci\n"
        "try: ci.load('crate-alpha-b16', cache_dir='CACHE')\n"
        "except ci.CheckpointError as e: print(e)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code.replace("CACHE", str(tmp_path))],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the network is switched off" in out.stdout


def test_a_file_laid_out_by_hand_in_the_cache(tmp_path):
    """The cache layout of huggingface_hub, without any server."""
    folder = tmp_path / "models--me--model"
    sha = "0123456789" * 4
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(sha)
    (folder / "snapshots" / sha).mkdir(parents=True)
    (folder / "snapshots" / sha / "w.pth").write_bytes(B16.read_bytes())
    model = ci.load("me/model", file="w.pth", n_heads=4, cache_dir=tmp_path, local_files_only=True)
    assert model.cfg.d_model == 32


def left(folder):
    """Returns the files of a cache, but locks."""
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_full_disk(table, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "open", lambda *_: open("/dev/full", "wb"), raising=False)
    said = "the disk is full: .* give another place: cache_dir="
    fails(said, REPO, file=FILE, cache_dir=tmp_path)
    monkeypatch.undo()
    assert not left(tmp_path)


def test_a_disk_that_will_be_full(table, hub, tmp_path, monkeypatch):
    little = SimpleNamespace(free=10)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: little)
    said = "the disk is full: .* give another place: cache_dir="
    fails(said, REPO, file=FILE, cache_dir=tmp_path)
    assert not left(tmp_path) and not hub.sent()


def test_an_interrupt_leaves_no_half_file(table, hub, tmp_path, interrupts):
    def pieces():
        yield bytes(1000)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        threading.Event().wait(0.2)
        yield bytes(1000)

    hub.fault("/lfs/", origin="cdn", method="GET", body=pieces, times=1)
    with pytest.raises(KeyboardInterrupt):
        ci.load(REPO, file=FILE, cache_dir=tmp_path)
    assert not left(tmp_path)
    ci.load(REPO, file=FILE, cache_dir=tmp_path)


def test_large_files_show_progress(table, tmp_path, monkeypatch, capsys):
    from crate_interp.checkpoints import progress

    ci.load("crate-alpha-b16", cache_dir=tmp_path / "other")
    assert "reading" not in capsys.readouterr().err  # a small one does not
    monkeypatch.setattr(progress, "SHOWN_FROM", 0)
    for name, file in (
        ("crate-alpha-b16", FILE),
        ("crate-alpha-b16-jax", "crate_alpha_B16_in1k.npz"),
        ("crate-d12-base", "model.safetensors"),
    ):
        ci.load(name, cache_dir=tmp_path)
        shown = capsys.readouterr().err
        assert f"{file.split('/')[-1]}: 100%" in shown and "checking" not in shown
        ci.load(name, cache_dir=tmp_path)  # what lies in the cache is read for its digest
        shown = capsys.readouterr().err
        assert (
            f"checking {file.split('/')[-1]}: 100%" in shown
            and f"reading {file.split('/')[-1]}: 100%" in shown
        )
