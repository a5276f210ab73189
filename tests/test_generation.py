"""Generation: TransformerLens' arguments, against slow loops and runs of single texts."""

import pytest
import torch
from transformer_lens.utilities import sample_logits

import crate_interp as ci
from conftest import FIXTURES, make_lm, refuses
from crate_interp.models.layers.context import padded
from crate_interp.models.text.generation import Options

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("crate-lm vanilla", "gpt-baseline")]
FAMILIES = ["crate-lm", "nanochat-crate", *SLOW]
VOCAB, N_CTX = 47, 13
GREEDY = dict(do_sample=False, stop_at_eos=False, verbose=False)
DRAWN = dict(stop_at_eos=False, verbose=False)


@pytest.fixture(params=FAMILIES)
def lm(request):
    return make_lm(request.param)


@pytest.fixture(scope="module")
def chat():
    return ci.load(FIXTURES / "nanochat_crate_alpha")


def ids(batch=2, pos=5, seed=3):
    return torch.randint(VOCAB, (batch, pos), generator=torch.Generator().manual_seed(seed))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_greedy_generation(lm):
    """Appends the likeliest token, again and again, without a cache; from the last n_ctx tokens."""
    tokens = ids()
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


def test_sampled_generation(lm):
    tokens = ids()

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
        tokens = ids(seed=seed)
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
    refuses("stop_at_eos=True needs an end", lambda: lm.generate(tokens), AssertionError)
    refuses("stop_at_eos=True needs an end", lambda: lm.generate(tokens), ValueError)


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


def test_streams(chat, lm):
    tokens = ids()
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
