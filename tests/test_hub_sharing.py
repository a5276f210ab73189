"""Sharing models over the Hub, and the files beside their weights, against a stand-in."""

import json

import pytest
import torch
from huggingface_hub import constants

import crate_interp as ci
from conftest import FIXTURES
from crate_interp.models.text.tokenizer import to_json
from test_hub import fails


def push(model, name, hub):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            constants, "ENDPOINT", hub.urls["hub"]
        )  # the client's upload side reads it here
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
    sae = (FIXTURES / "crate_lm_sae" / "0.pt").read_bytes()
    hub.repo("some/sae").commit(
        {"7.pt": sae, "7_cfg.json": (FIXTURES / "crate_lm_sae" / "0_cfg.json").read_bytes()}
    )
    assert (
        ci.load("some/sae", file="7.pt", cache_dir=tmp_path).cfg.hook_name
        == "blocks.0.mlp.hook_post"
    )
    hub.repo("some/bare").commit({"7.pt": sae})
    fails("nothing says which hook point", "some/bare", file="7.pt", cache_dir=tmp_path)


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
    core.normalizer, core.pre_tokenizer = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
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
