"""A batch of texts gives for each text the number of that text alone, or says what to do."""

import copy
import pickle

import pandas as pd
import pytest
import torch

import crate_interp as ci
from conftest import make, make_lm, refuses
from crate_interp.circuits import head_scores, logit_attribution, logit_lens, repeat_targets
from neighbours import LMS
from selection import few

TEXTS = ["The garden was full of light", "An old cat", "Once upon a time there lived"]
LENGTHS = (11, 5, 7)
TOKENS = torch.randint(0, 47, (3, 11), generator=torch.Generator().manual_seed(0))


def padded(side):
    """Returns tokens, their mask, and each text alone."""
    tokens, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    rows = [TOKENS[i, :length] for i, length in enumerate(LENGTHS)]
    for i, row in enumerate(rows):
        place = slice(len(row)) if side == "right" else slice(11 - len(row), None)
        tokens[i, place], mask[i, place] = row, 1
    return tokens, mask, rows


@pytest.fixture(params=["left", "right"])
def side(request):
    return request.param


@pytest.fixture(params=few(LMS, 2))
def lm(request):
    return make_lm(request.param)


def caches(lm, side, **more):
    """Returns the cache of the padded batch, and the caches of the texts alone."""
    tokens, mask, rows = padded(side)
    batch = lm.run_with_cache(tokens, attention_mask=mask, **more)[1]
    return batch, [lm.run_with_cache(row[None], **more)[1] for row in rows]


def test_every_point_of_a_text_is_that_of_the_text_alone(lm, side):
    batch, alone = caches(lm, side)
    assert batch.is_padded and not alone[0].is_padded
    for i, own in enumerate(alone):
        found = batch.alone(i)
        assert not found.is_padded and found.cache_dict.keys() == own.cache_dict.keys()
        for name, value in own.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_probes(lm, side):
    batch, alone = caches(lm, side)
    found = ci.probe(batch).table("samples")
    for i, own in enumerate(alone):
        wanted = ci.probe(own).table("samples").drop(columns="sample").reset_index(drop=True)
        mine = found[found["sample"] == i].drop(columns="sample").reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, wanted, check_exact=False, rtol=2e-4, atol=1e-5)


def test_logit_lenses(lm, side):
    batch, alone = caches(lm, side)
    for i, own in enumerate(alone):
        for position in (-1, 2):
            found = logit_lens(batch, sample=i, position=position).table()
            wanted = logit_lens(own, position=position).table()
            assert list(found["answer"]) == list(wanted["answer"])
            assert abs(found["probability"] - wanted["probability"]).max() < 1e-5
    refuses(r"cache.alone\(i\)", lambda: batch.logit_lens())
    refuses("the sample has positions 0 to 4", lambda: logit_lens(batch, sample=1, position=5))


@pytest.mark.parametrize("family", ["gpt-baseline", "nanochat-crate"])
def test_logit_and_atom_attribution(family, side):
    batch, alone = caches(make_lm(family), side)
    for position in (-1, -3, 4):
        found = logit_attribution(batch, 3, position=position).table("values")
        for i, own in enumerate(alone):
            wanted = logit_attribution(own, 3, position=position).table("values")
            mine = found[found["sample"] == i]["value"].to_numpy()
            assert abs(mine - wanted["value"].to_numpy()).max() < 1e-5
    refuses("the shortest text has 5 tokens", lambda: logit_attribution(batch, 3, position=5))


def test_head_scores(lm, side):
    batch, alone = caches(lm, side)
    tokens, mask, rows = padded(side)
    targets = {"all": torch.ones(3, 11, 11, dtype=torch.bool)}
    found = head_scores(batch, targets)
    scores = torch.stack(
        [
            torch.tensor(head_scores(own, {"all": torch.ones(1, n, n, dtype=torch.bool)})["even"])
            for own, n in zip(alone, LENGTHS, strict=True)
        ]
    )
    assert abs(scores.mean(dim=0) - torch.tensor(found["even"])).max() < 1e-6
    diagonal = {"itself": torch.eye(11, dtype=torch.bool).expand(3, 11, 11)}
    found = torch.tensor(head_scores(batch, diagonal)["score"])
    each = [
        torch.tensor(head_scores(own, {"itself": torch.eye(n, dtype=torch.bool)[None]})["score"])
        for own, n in zip(alone, LENGTHS, strict=True)
    ]
    assert abs(torch.stack(each).mean(dim=0) - found).max() < 1e-5
    assert repeat_targets(tokens)


def test_stacks_at_some_positions_refuse_padding(side):
    lm = make_lm("gpt-baseline")
    batch, alone = caches(lm, side)
    for stack in (
        lambda cache, **cut: cache.accumulated_resid(**cut),
        lambda cache, **cut: cache.decompose_resid(**cut),
        lambda cache, **cut: cache.stack_head_results(**cut),
        lambda cache, **cut: cache.stack_neuron_results(-1, **cut),
        lambda cache, **cut: cache.get_full_resid_decomposition(**cut),
        lambda cache, **cut: cache.apply_ln_to_stack(cache.accumulated_resid(), **cut),
        lambda cache, **cut: cache.logit_attrs(cache.accumulated_resid(), 5, **cut),
    ):
        with pytest.raises(ValueError, match="at some positions would read padding as tokens"):
            stack(batch, pos_slice=-1)
        wanted = stack(alone[1], pos_slice=-1)
        torch.testing.assert_close(
            stack(batch.alone(1), pos_slice=-1), wanted, rtol=1e-4, atol=1e-5
        )


def test_patching_refuses_padding(side):
    lm = make_lm()
    batch, _ = caches(lm, side)
    with pytest.raises(ValueError, match="patching would read padding as tokens"):
        ci.circuits.patching.get_act_patch_resid_pre(lm, TOKENS, batch, lambda out: out.sum())


def test_texts_that_the_model_pads_itself(side):
    lm = ci.load("crate-tiny-lm")
    batch = lm.run_with_cache(TEXTS, padding_side=side)[1]
    assert batch.is_padded
    found = ci.probe(batch, "sparsity").table("samples")
    for i, text in enumerate(TEXTS):
        own = ci.probe(lm.run_with_cache(text)[1], "sparsity").table("samples")
        mine = found[found["sample"] == i]
        for column in own.select_dtypes(float):
            assert abs(mine[column].to_numpy() - own[column].to_numpy()).max() < 1e-4


def test_the_mask_stays_with_the_cache(side):
    lm = make_lm()
    batch, _ = caches(lm, side)
    _, mask, _ = padded(side)
    assert torch.equal(batch.mask, mask.bool())
    for same in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        assert torch.equal(same.mask, mask.bool())
    cut = batch.apply_slice_to_batch_dim([0, 2])
    assert torch.equal(cut.mask, mask.bool()[[0, 2]])
    sliced, _ = caches(lm, side, pos_slice=[0, 3, 4])
    assert torch.equal(sliced.mask, mask.bool()[:, [0, 3, 4]])
    if side == "left":
        refuses("lacks positions of padded texts", lambda: sliced.alone(1))
    one = lm.run_with_cache(TOKENS[:1], attention_mask=mask[1:2], remove_batch_dim=True)[1]
    assert torch.equal(one.mask, mask[1].bool())
    full = lm.run_with_cache(TOKENS, attention_mask=torch.ones_like(TOKENS))[1]
    assert not full.is_padded and lm.run_with_cache(TOKENS)[1].mask is None


def test_a_cache_of_weights_that_were_edited_is_refused(images):
    model = make()
    cache = model.run_with_cache(images)[1]
    ci.probe(cache, "sparsity")
    with torch.no_grad():  # in place; other kinds of edits: test_weight_cache.py
        model.blocks[0].mlp.D[3] = 0
    for read in (
        lambda: ci.probe(cache, "sparsity"),
        lambda: cache.logit_lens(),
        lambda: ci.viz.explore(cache, images),
    ):
        refuses("weights have changed since this cache was made", read)
    ci.probe(model.run_with_cache(images)[1], "sparsity")
