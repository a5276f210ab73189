"""Language models: text in and out, tokenizers, loss, generation, and refusals of bad input."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformer_lens.utilities import sample_logits
from transformers import PreTrainedTokenizerFast

import crate_interp as ci
from conftest import FIXTURES, LAYERS, LMS, make_lm, refuses
from crate_interp.models.layers.context import padded
from crate_interp.models.text.generation import Options
from crate_interp.models.text.text_and_tokens import TOKENIZER_STATE
from crate_interp.questions.untrained_twins import twin
from selection import few_of

VOCAB = 47


def ids(batch=2, pos=11, seed=3):
    return torch.randint(VOCAB, (batch, pos), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def chat():
    return ci.load(FIXTURES / "nanochat_crate_alpha")


@pytest.mark.parametrize("lm", [*LMS, "tost-lm"], indirect=True)
def test_a_token_sees_only_those_before(lm):
    tokens, other = ids(), ids()
    other[:, 6:] = (other[:, 6:] + 7) % VOCAB
    with torch.no_grad():
        a, b = lm(tokens), lm(other)
    torch.testing.assert_close(a[:, :6], b[:, :6], atol=1e-6, rtol=1e-5)
    assert (a[:, 6:] - b[:, 6:]).abs().max() > 1e-2


def test_rows_of_a_batch_do_not_mix(lm):
    tokens, exact = ids(), copy.deepcopy(lm).double()  # batches of other sizes round otherwise
    with torch.no_grad():
        torch.testing.assert_close(exact(tokens)[1:], exact(tokens[1:]), atol=1e-13, rtol=1e-12)


def test_loss(lm):
    tokens = ids()
    with torch.no_grad():
        logits, loss = lm(tokens, "both")
        each = lm(tokens, "loss", loss_per_token=True)
    slow = [
        -float(logits[row, pos].double().log_softmax(-1)[tokens[row, pos + 1]])
        for row in range(2)
        for pos in range(10)
    ]
    assert loss.item() == pytest.approx(np.mean(slow), rel=1e-5)
    assert lm(tokens, "loss").item() == pytest.approx(loss.item())
    np.testing.assert_allclose(each.flatten(), slow, rtol=1e-4)
    assert lm(tokens, None) is None and torch.equal(lm(tokens), logits)


def test_stop_and_start(lm):
    tokens = ids()
    with torch.no_grad():
        logits, cache = lm.run_with_cache(tokens)
        z = lm(tokens, stop_at_layer=2)
        assert torch.equal(z, cache["resid_pre", 2])
        assert torch.equal(lm(tokens, stop_at_layer=-1), z)
        assert torch.equal(lm(tokens, stop_at_layer=LAYERS), cache["resid_post", LAYERS - 1])
        torch.testing.assert_close(lm(z, start_at_layer=2), logits, atol=0, rtol=0)
        if lm.cfg.rotary:
            refuses("start_at_layer=1: later layers add the", lambda: lm(z, start_at_layer=1))
            lm.x0_lambdas.data[2:] = 0
        first = lm(tokens, stop_at_layer=1)
        torch.testing.assert_close(lm(first, start_at_layer=1), lm(tokens), atol=0, rtol=0)
        assert torch.equal(
            lm(first, start_at_layer=1, stop_at_layer=2), lm(tokens, stop_at_layer=2)
        )
    refuses("start_at_layer=9: the model has layers 0 to 2", lambda: lm(z, start_at_layer=9))


def test_text(chat):
    assert chat.to_tokens("the").tolist() == [[276, 260]]
    assert chat.to_tokens("the", prepend_bos=False).tolist() == [[260]]
    assert chat.to_string(chat.to_tokens("the thing", prepend_bos=False)) == ["the thing"]
    assert chat.to_string(torch.tensor([260, 261])) == "theory"[:3] + chat.to_string(261)
    assert chat.to_string([260]) == "the"
    assert chat.to_str_tokens("the", prepend_bos=False) == ["the"]
    assert chat.to_single_token("the") == 260
    assert chat.to_tokens(["the", "the"]).shape == (2, 2)
    with torch.no_grad():
        assert torch.equal(chat("the thing"), chat(chat.to_tokens("the thing")))
    assert chat.to_str_tokens(["the", "x"]) == [["<|bos|>", "the"], ["<|bos|>", "x"]]
    assert chat.to_single_str_token(260) == "the"
    refuses("is 3 tokens, .*: give a text that is one", lambda: chat.to_single_token("xyz"))
    refuses("the text is empty", lambda: chat.to_tokens("", prepend_bos=False))
    refuses("there is no token 999", lambda: chat.to_string([999]))


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_every_text_comes_back(chat, text):
    if text:
        assert chat.to_string(chat.to_tokens(text, prepend_bos=False, truncate=False)) == [text]
    with pytest.warns(UserWarning, match="text holds"):  # text never makes a special token
        ids = chat.to_tokens(text + "<|bos|>", prepend_bos=False, truncate=False)
    assert 276 not in ids


CHAT = FIXTURES / "nanochat_crate_alpha"


def test_a_tokenizer_is_there_from_the_start():
    lm = ci.load(CHAT)
    assert TOKENIZER_STATE[0] not in vars(lm)  # nothing was read for a run on token ids
    tokenizer = lm.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and lm.tokenizer is tokenizer
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|bos|>"
    assert tokenizer.bos_token_id == tokenizer.pad_token_id == 276
    assert tokenizer.padding_side == "right" and len(tokenizer) == lm.cfg.d_vocab
    assert isinstance(ci.load("crate-tiny-lm").tokenizer, PreTrainedTokenizerFast)


def test_it_is_used_as_hugging_face_uses_its_own(chat):
    tokenizer = chat.tokenizer
    read = tokenizer(["the", "the theory"], return_tensors="pt", padding=True)
    wanted = chat.to_tokens(["the", "the theory"], prepend_bos=False)
    assert torch.equal(read["input_ids"], wanted)
    assert read["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
    assert tokenizer.encode("the") == tokenizer("the")["input_ids"] == [260]
    assert tokenizer.decode([276, 260]) == "<|bos|>the"
    assert tokenizer.batch_decode(wanted, skip_special_tokens=True) == ["the", "the theory"]
    with torch.no_grad():
        out = chat(**tokenizer(["the", "the theory"], return_tensors="pt", padding=True))
        own = chat(["the", "the theory"], prepend_bos=False)
    assert torch.equal(out.logits, own)


def test_text_never_becomes_a_special_token(chat):
    name = "the <|bos|>"
    plain = chat.tokenizer(name)["input_ids"]
    with pytest.warns(UserWarning, match="text holds"):
        assert 276 not in plain and chat.to_tokens(name, prepend_bos=False)[0].tolist() == plain
    asked = chat.tokenizer(name, split_special_tokens=False)["input_ids"]  # Hugging Face's default
    assert asked[-1] == 276
    assert chat.tokenizer(name)["input_ids"] == plain == chat.tokenizer.encode(name)
    for other in (copy.deepcopy(chat), pickle.loads(pickle.dumps(chat)), twin(chat, 0)):
        assert other.tokenizer(name)["input_ids"] == plain


WAYS = {
    "to_tokens": lambda lm, texts: lm.to_tokens(texts),
    "forward": lambda lm, texts: lm(texts),
    "generate": lambda lm, texts: lm.generate(texts[0], max_new_tokens=1, verbose=False),
    "windows": lambda lm, texts: lm.windows(texts * 20),
    "sweep": lambda lm, texts: ci.sweep(
        lm, texts * 20, probes=["sparsity"], limit=2, controls=0, progress=False
    ),
    "graph": lambda lm, texts: ci.graph(lm, texts[0], most=4),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_with_the_name_of_a_special_token_warns_once(chat, way):
    for texts, count in ((["the <|bos|>", "the <|bos|>"], 1), (["the |bos|", "the |bos|"], 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            WAYS[way](chat, texts)
        assert [str(one.message).count("<|bos|>") for one in caught].count(1) == count
        assert len(caught) == count


def test_models_without_a_tokenizer(tmp_path):
    lm = make_lm()
    assert lm.tokenizer is None
    refuses("the model has no tokenizer: .* tokenizer='gpt2'", lambda: lm.to_tokens("a"))
    refuses("the model has no tokenizer", lambda: lm.to_tokens("a"), AssertionError)
    bare = ci.load(CHAT / "model.safetensors")
    bare.tokenizer = None
    assert bare.tokenizer is None
    refuses("the model has no tokenizer", lambda: bare("a"))
    file = tmp_path / "model.safetensors"
    file.write_bytes((CHAT / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((CHAT / "config.json").read_bytes())
    alone = ci.load(tmp_path)
    assert alone.tokenizer is None  # and yet text says what is missing
    refuses("there is no tokenizer.json and no tokenizer.pkl in", lambda: alone.to_tokens("a"))


def test_parts_of_a_character_are_named_by_their_bytes(chat):
    text = "é 日🙂"
    words = chat.to_str_tokens(text, prepend_bos=False)
    assert "".join(words) == "<C3><A9> <E6><97><A5><F0><9F><99><82>"
    ids = chat.to_tokens(text, prepend_bos=False)[0]
    assert [chat.to_single_str_token(token) for token in ids.tolist()] == words
    # TransformerLens' names, and the text itself
    marks = chat.to_string(ids[:, None])
    assert marks == chat.tokenizer.batch_decode(ids[:, None]) and marks.count("\ufffd") == 9
    assert chat.to_string(ids) == text


QUICK = ("crate-lm", "nanochat-crate")
some_quick = pytest.mark.parametrize("lm", few_of(LMS, QUICK), indirect=True)
N_CTX = 13
GREEDY = dict(do_sample=False, stop_at_eos=False, verbose=False)
DRAWN = dict(stop_at_eos=False, verbose=False)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@some_quick
def test_greedy_generation(lm):
    """Appends the likeliest token, again and again, without a cache; from the last n_ctx tokens."""
    tokens = ids(pos=5)
    slow = tokens
    with torch.no_grad():
        for _ in range(12):
            slow = torch.cat([slow, lm(slow[:, -N_CTX:])[:, -1:].argmax(-1)], dim=1)
    for cached in (True, False):
        made = lm.generate(tokens, 12, use_past_kv_cache=cached, **GREEDY)
        assert torch.equal(made, slow)
    assert torch.equal(lm.generate(tokens, 0, **GREEDY), tokens)
    assert torch.equal(lm.generate(tokens[0], 12, **GREEDY), slow[:1])
    assert torch.equal(lm.generate(tokens, 12, temperature=0.0, **DRAWN), slow)


@some_quick
def test_rows_of_unequal_length_are_the_single_rows(lm):
    """Also past n_ctx, where the padding has gone and the oldest tokens go."""
    lm = lm.double()
    rows = [ids(1, length, seed)[0].tolist() for seed, length in enumerate((6, 2, 4))]
    tokens, real = padded(rows, 5, "left")
    alone = [lm.generate(torch.tensor([prompt]), 12, **GREEDY)[0] for prompt in rows]
    for cached in (True, False):
        told = dict(use_past_kv_cache=cached, attention_mask=real.long(), **GREEDY)
        made = lm.generate(tokens, 12, **told)
        for row, prompt in enumerate(rows):
            assert torch.equal(made[row, 6 - len(prompt) :], alone[row])
    assert not torch.equal(made[1, 6:], lm.generate(tokens, 12, **GREEDY)[1, 6:])


@some_quick
def test_sampled_generation(lm):
    tokens = ids(pos=5)

    def draw(seed, **more):
        return lm.generate(tokens, 6, generator=seeded(seed), **DRAWN, **more)

    greedy = lm.generate(tokens, 6, **GREEDY)
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1, top_k=1), greedy) and torch.equal(draw(1, top_p=1e-9), greedy)
    assert torch.equal(draw(1, temperature=1e-4), greedy)
    assert torch.equal(draw(1, do_sample=False), greedy)
    one = tokens[:1].expand(1000, -1)
    with torch.no_grad():
        chances = (lm(tokens[:1])[0, -1] / 2).softmax(-1)
    drawn = lm.generate(one, 1, temperature=2.0, generator=seeded(0), **DRAWN)[:, -1]
    seen = torch.bincount(drawn, minlength=VOCAB) / 1000
    spread = (chances * (1 - chances) / 1000).sqrt()
    assert ((seen - chances).abs() < 5 * spread + 1e-3).all()


@pytest.mark.parametrize(
    "told",
    [
        {},
        dict(temperature=0.7),
        dict(top_k=3),
        dict(top_k=99),
        dict(top_p=0.6),
        dict(temperature=0.0),
    ],
)
def test_tokens_are_drawn_as_transformerlens_draws_them(told):
    logits, tokens = torch.randn(50, VOCAB, generator=seeded(0)) * 2, ids(50, 9)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        theirs = sample_logits(logits, tokens=tokens, **told)
    assert torch.equal(Options(generator=seeded(7), **told).choose(logits), theirs)


def test_rows_end_at_their_stop_token():
    lm = make_lm("gpt-baseline")
    for seed in range(20):  # the third token of row 0 is to be new there, and none of row 1
        tokens = ids(pos=5, seed=seed)
        free = lm.generate(tokens, 6, **GREEDY)[:, 5:]
        if free[0, 2] not in [*free[0, :2], *free[1]]:
            break
    end = int(free[0, 2])
    told = dict(do_sample=False, verbose=False)
    made = lm.generate(tokens, 6, eos_token_id=end, **told)[:, 5:]
    assert made[0].tolist() == [*free[0, :3].tolist(), end, end, end]
    assert torch.equal(made[1], free[1])
    several = lm.generate(tokens, 6, eos_token_id=[end, int(free[1, 0])], **told)[:, 5:]
    assert several.shape[1] == 3 and several[1].tolist() == [int(free[1, 0])] + [end] * 2
    refuses("the tokenizer has no end", lambda: lm.generate(tokens), AssertionError)
    refuses("the tokenizer has no end", lambda: lm.generate(tokens), ValueError)


def test_text_comes_back_as_it_went_in(chat):
    one = chat.generate("the", 3, **GREEDY)
    tokens = chat.generate("the", 3, return_type="tokens", **GREEDY)
    assert torch.equal(tokens, chat.generate(chat.to_tokens("the"), 3, **GREEDY))
    plain = chat.tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert one == plain and one.startswith("the")
    assert chat.generate("the", 0) == "the" and chat.generate("the", 0, prepend_bos=False) == "the"
    words = ["the", "the theory", "xyz"]
    alone = [chat.generate(word, 6, **GREEDY) for word in words]
    for cached in (True, False):
        assert chat.generate(words, 6, use_past_kv_cache=cached, **GREEDY) == alone
    assert chat.generate(words[:1], 6, **GREEDY) == alone[0]  # as TransformerLens does
    side = dict(padding_side="left", return_type="str", **GREEDY)
    assert chat.generate(chat.to_tokens(words, padding_side="left"), 6, **side) == alone


@some_quick
def test_streams(chat, lm):
    tokens = ids(pos=5)
    parts = list(lm.generate_stream(tokens, 9, 3, **GREEDY))
    assert [part.shape[1] for part in parts] == [6, 3, 3, 2]
    assert torch.equal(torch.cat(parts, dim=1), lm.generate(tokens, 9, **GREEDY))
    told = dict(generator=seeded(1), **DRAWN)
    drawn = torch.cat(list(lm.generate_stream(tokens, 7, 2, **told)), dim=1)
    assert torch.equal(drawn, lm.generate(tokens, 7, generator=seeded(1), **DRAWN))
    words = ["the", "the theory"]
    whole = chat.generate(words, 9, **GREEDY)
    pieces = list(chat.generate_stream(words, 9, 1, **GREEDY))
    assert ["".join(row) for row in zip(*pieces, strict=True)] == whole
    single = "".join(chat.generate_stream("the", 9, 1, **GREEDY))
    assert single == chat.generate("the", 9, **GREEDY)
    assert torch.equal(
        *(
            torch.cat(list(chat.generate_stream(chat.to_tokens("the"), 0, **GREEDY)), dim=1),
            chat.to_tokens("the"),
        )
    )
    refuses("max_tokens_per_yield=0", lambda: next(lm.generate_stream(tokens, 3, 0)))
    with lm.hooks([("hook_embed", lambda value, hook: value * 0)]):  # the grad mode comes back
        next(lm.generate_stream(tokens, 9, 1, **GREEDY))
        assert torch.is_grad_enabled()
