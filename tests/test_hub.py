"""The Hub, by the real huggingface_hub client and a stand-in on 127.0.0.1: loading and sharing."""

import copy
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import crate_interp as ci
from conftest import FIXTURES, fails
from crate_interp.checkpoints import hub as loader
from crate_interp.checkpoints.hub import ASSETS, MODELS
from crate_interp.config import check_names
from crate_interp.config.families import FAMILIES
from crate_interp.models.text.tokenizer import to_json
from selection import few
from test_families import recorded

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
ON_THE_HUB = [row for row in loader.MODELS if row["repo"] and row["file"]]


def standin(row):
    key = "crate-alpha jax" if row["name"].endswith("-jax") else row["family"]
    path, config = STANDINS[key]
    return FIXTURES / path, config


@pytest.fixture
def table(hub, monkeypatch):
    """The Hub rows of the shipped table with digests and sizes of stand-ins, and their repo."""
    rows = copy.deepcopy(list(loader.MODELS))
    for row in (row for row in rows if row["repo"] and row["file"]):
        path, config = standin(row)
        pre = {
            name: row["config"][name]
            for name in ("resize", "crop", "mean", "std")
            if name in row["config"]
        }
        row.update(
            sha256=loader.digest(path).removeprefix("sha256:"),
            bytes=path.stat().st_size,
            config=config | pre,
        )
        repo = hub.repos.get(row["repo"]) or hub.repo(row["repo"])
        beside = {
            name: (FIXTURES / BESIDE.get(name, "crate_lm_sae/0_cfg.json")).read_bytes()
            for name in row["beside"]
        }
        sha = repo.commit({row["file"]: path.read_bytes(), **beside})
        if row["revision"]:
            pinned = repo.commits.get(row["revision"], {})
            repo.commits[row["revision"]] = {**pinned, **repo.commits[sha]}
    monkeypatch.setattr(loader, "MODELS", tuple(rows))
    return rows


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits between attempts


@pytest.mark.parametrize("name", few((row["name"] for row in ON_THE_HUB), 5))
def test_every_entry_of_the_table(name, table, tmp_path):
    row = loader.find(name)
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
        cfg = by_name.cfg
        assert (cfg.resize, cfg.crop, cfg.mean) == (256, 224, (0.485, 0.456, 0.406))
    if row["family"] == "nanochat-crate":
        assert by_name.to_tokens("the theory")[0].tolist() == [276, 260, 261, 269, 121]


def test_a_wrong_digest_is_refused_each_time(table, hub, tmp_path):
    row = loader.find("crate-alpha-b16")
    files = hub.repos[REPO].commits[row["revision"]]
    good = files[FILE]
    files[FILE] = good[:-1] + bytes([good[-1] ^ 1])
    for _ in range(2):
        said = fails("has another sha256 than " + row["sha256"], REPO, file=FILE,
                     cache_dir=tmp_path)  # fmt: skip
    assert "Remove it and load it again" in said
    files[FILE] = good
    ci.load(REPO, file=FILE, cache_dir=tmp_path / "other")


def test_first_call_second_call_and_pinned_revision(table, hub, tmp_path):
    ci.load(REPO, file=FILE, cache_dir=tmp_path)
    assert len(hub.sent()) == 1  # from the second origin
    pinned = loader.find("crate-alpha-b16")["revision"]
    assert all(pinned in path for _, _, path, _ in hub.requests if "/resolve/" in path)
    before = len(hub.requests)
    ci.load("crate-alpha-b16", cache_dir=tmp_path)
    assert len(hub.requests) == before  # a commit is final: nothing is even asked
    ci.load(REPO, file=FILE, revision="main", cache_dir=tmp_path)
    assert len(hub.sent()) == 1  # main may move; the content has not


def test_a_private_or_gated_repo(table, hub, tmp_path):
    hub.repos[REPO].token = "hf_right"
    fails("has no repo .*, or it is private", REPO, file=FILE, cache_dir=tmp_path, token=False)
    hub.repos[REPO].gated = True
    for token in (False, "hf_wrong"):
        fails("is gated: accept its terms", REPO, file=FILE, cache_dir=tmp_path, token=token)


def test_what_is_missing(table, hub, tmp_path):
    hub.repo("some/one").commit({"weights.pth": b"x"})
    for match, repo, options in (
        ("the Hub has no repo 'no/body'", "no/body", dict(file="x.pth")),
        ("has no file 'x.pth'", REPO, dict(file="x.pth")),
        ("has no revision 'v9'", REPO, dict(file=FILE, revision="v9")),
        ("has no config.json: name one of its weight files", "some/one", {}),
        ("cannot download a b/c", "a b/c", dict(file="x")),
        *(("is not a path inside a repo", REPO, dict(file=f)) for f in ("../x", "/etc/x", "..\\b")),
    ):
        fails(match, repo, cache_dir=tmp_path, **options)
    assert not [path for path in tmp_path.rglob("*") if path.name == "x"]


def test_server_gone_and_offline(table, hub, tmp_path, monkeypatch):
    given = dict(file=FILE, revision="main")
    off = "is not in the cache, and the network is switched off"
    fails(off, REPO, cache_dir=tmp_path, local_files_only=True, **given)
    model = ci.load(REPO, cache_dir=tmp_path, **given)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    for more in ({}, {"local_files_only": True}):
        assert ci.load(REPO, cache_dir=tmp_path, **given, **more).cfg == model.cfg
    fails("cannot download", REPO, cache_dir=tmp_path / "other", **given)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fails(off, REPO, cache_dir=tmp_path / "other", **given)
    assert ci.load(REPO, cache_dir=tmp_path, **given).cfg == model.cfg


def push(model, name, hub):
    with pytest.MonkeyPatch.context() as patch:
        # the client's upload side reads it here
        patch.setattr(constants, "ENDPOINT", hub.urls["hub"])
        model.push_to_hub(name, token="hf_x")


def test_sharing_a_model(hub, tmp_path):
    model = ci.load(FIXTURES / "nanochat_crate_alpha" / "model.safetensors")
    push(model, "me/chat", hub)
    assert {"model.safetensors", "config.json", "README.md", "tokenizer.json"} <= set(
        next(reversed(hub.repos["me/chat"].commits.values()))
    )
    for back in (
        ci.load("me/chat", cache_dir=tmp_path),
        ci.HookedCrateLM.from_pretrained("me/chat", cache_dir=tmp_path),
    ):
        assert back.cfg == model.cfg and torch.equal(back.W_U, model.W_U)
        assert back.to_tokens("the theory").tolist() == model.to_tokens("the theory").tolist()
    with pytest.raises(ValueError, match="is a HookedCrateLM, not a HookedCrate: use"):
        ci.HookedCrate.from_pretrained("me/chat", cache_dir=tmp_path)
    sae = ci.load(FIXTURES / "crate_lm_sae" / "0.pt")
    push(sae, "me/sae", hub)
    assert ci.load("me/sae", cache_dir=tmp_path).cfg == sae.cfg


def test_a_published_layout_in_a_repo_nobody_listed(hub, tmp_path):
    files = {
        name: (FIXTURES / "nanochat_crate_alpha" / name).read_bytes()
        for name in ("model.safetensors", "config.json", "tokenizer.pkl")
    }
    hub.repo("some/chat").commit(files)
    model = ci.load("some/chat", cache_dir=tmp_path)
    assert model.cfg.family == "nanochat-crate" and model.to_tokens("the")[0, 0] == 276


def test_the_tokenizers_of_the_hub(hub, tmp_path):
    tokenizer = ci.load(FIXTURES / "nanochat_crate_alpha" / "model.safetensors").tokenizer
    content = json.loads(to_json(tokenizer))
    content["added_tokens"] = [content["added_tokens"][0] | {"content": "<|endoftext|>", "id": 276}]
    hub.repo("openai-community/gpt2").commit({"tokenizer.json": json.dumps(content).encode()})
    file = FIXTURES / "crate_lm_overcomplete" / "ckpt-crate-12l-overparam-600000.pt"
    model = ci.load(file, cache_dir=tmp_path)
    assert hub.requests == []  # the tokenizer is fetched when text comes
    assert model.to_tokens("12").tolist() == [[49, 50]]  # CRATE-LM was trained without a separator
    assert model.to_tokens("12", prepend_bos=True).tolist() == [[276, 49, 50]]
    hub.repos.clear()
    fails_later = ci.load(file, cache_dir=tmp_path / "other")
    with pytest.raises(ci.CheckpointError, match="has no repo 'openai-community/gpt2'"):
        fails_later.to_tokens("12")


def test_the_wordpieces_of_clip(hub, tmp_path):
    """As in the JAX training code: [CLS] and pieces cut at n_ctx, then zeros, no [SEP]."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    names = "[PAD] [UNK] [CLS] [SEP] a photo of cat ##s dog".split()
    vocab = {name: index for index, name in enumerate(names)}
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    core.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    hub.repo("google-bert/bert-base-uncased").commit({"tokenizer.json": core.to_str().encode()})
    file = FIXTURES / "crate_alpha_clipa" / "crate_alpha_CLIPA_L14.pth"
    clip = ci.load(file, n_heads=4, text_n_heads=3, cache_dir=tmp_path)
    assert clip.to_tokens(["A photo of Cats", "dog"]).tolist() == [
        [2, 4, 5, 6, 7, 8, 0, 0],
        [2, 9, 0, 0, 0, 0, 0, 0],
    ]
    assert clip.to_tokens("dog " * 20).tolist() == [[2, *[9] * 7]]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(
            clip(images, ["a photo", "dog"]), clip(images, clip.to_tokens(["a photo", "dog"]))
        )
    assert (clip(images, ["a photo", "dog"]).abs() <= 100.001).all()


WEIGHTS = Path(__file__).parent.parent / "demos" / "weights"
EMBEDDED = [row for row in MODELS if row["embedded"]]


@pytest.mark.parametrize("row", EMBEDDED, ids=lambda row: row["name"])
def test_the_table_is_true(row):
    path = ASSETS / row["file"]
    content = path.read_bytes()
    assert hashlib.sha256(content).hexdigest() == row["sha256"] and len(content) == row["bytes"]
    model = ci.load(row["name"])
    assert sum(value.numel() for value in model.parameters()) == row["params"]
    assert model.cfg.family == row["family"] and model.cfg.model_name == row["name"]
    shipped = WEIGHTS / row["name"]  # steps that the package leaves to the repository
    beside = sorted((shipped / "steps").glob("*")) if (shipped / "steps").exists() else []
    for path_of_step in beside:
        assert ci.load(shipped, revision=path_of_step.stem).cfg == model.cfg
    assert bool(beside) == bool(row["note"]) != bool(row["steps"])
    for step in row["steps"]:
        assert ci.load(row["name"], revision=f"step-{step}").cfg == model.cfg
    assert len(list((path.parent / "steps").glob("*"))) == len(row["steps"])
    assert len(row["steps"]) + len(beside) >= (1 if row["family"] == "gpt-baseline" else 4)
    card = (path.parent / "README.md").read_text()
    assert all(word in card for word in ("Data:", "seed"))


def test_the_table_of_models():
    table = ci.list_models()
    wanted = "name family repo file revision sha256 bytes licence params embedded".split()
    assert list(table.columns)[: len(wanted)] == wanted and table["name"].is_unique
    for row in MODELS:
        assert row["family"] in (None, "sae", *FAMILIES) and isinstance(row["licence"], str)
        assert row["sha256"] is None or re.fullmatch("[0-9a-f]{64}", row["sha256"])
        assert row["revision"] is None or re.fullmatch("[0-9a-f]{40}", row["revision"])
        assert row["file"] or row["link"] or row["note"]  # where it is, or what is known of it
        check_names(row["config"])


def test_the_repeats_are_continued_by_the_models_that_are_made_for_them():
    """All tokens but those of the first string, and the first of the second, can be known."""
    tokens = torch.tensor(ci.data.embedded("repeats")["input_ids"])
    assert tokens.shape == (128, 49) and (tokens[:, 0] == 32).all()
    periods = torch.tensor([9, 14, 19]).repeat(43)[:128]
    for row, period in zip(tokens, periods.tolist(), strict=True):
        assert torch.equal(row[1 + period :], row[1 : 49 - period])
    samples = ci.data.open_text("embedded:repeats", list)
    assert torch.equal(samples.read(0, 128), tokens)
    for name in ("crate-tiny-induction", "gpt-tiny-induction"):
        with torch.no_grad():
            right = ci.load(name)(tokens)[:, :-1].argmax(-1) == tokens[:, 1:]
        known = torch.arange(1, 49) > periods[:, None] + 1
        assert right[known].float().mean() > 0.95
        assert right[~known].float().mean() < 0.2
