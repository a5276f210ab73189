"""Texts that fill no window: each is a sample, with the numbers that it has alone."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import crate_interp as ci
from conftest import make_lm
from test_data_forms import Own, same
from texts import Words

QUIET = {"batch_size": 3, "progress": False}
RAGGED = ["3 1 4", "1 5", "9 2 6 5", "3 5 8 9", "7"]
EQUAL = ["3 1 4", "1 5 9", "2 6 5"]
FAMILIES = ["crate-lm", "nanochat-crate"]  # without and with a separator before each text


def reader(family="crate-lm"):
    lm = make_lm(family, n_ctx=37)
    lm.tokenizer = Words()
    return lm


def numbers(table):
    return table.drop(columns=["sample", "label"], errors="ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_text_has_the_numbers_of_its_cache(family):
    lm = reader(family)
    for text in ("3 1 4 1 5", "2 7"):
        swept = ci.sweep(lm, [text], controls=0, **QUIET)
        probed = ci.probe(lm.run_with_cache(text)[1])
        assert numbers(swept.samples()).equals(numbers(probed.samples()))
        assert np.array_equal(swept.heads()["mean"], probed.heads()["mean"], equal_nan=True)


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES[1:])]
)
@pytest.mark.parametrize("texts", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_each_short_text_of_a_list_is_a_sample(family, texts, tmp_path):
    lm = reader(family)
    whole = ci.sweep(lm, texts, **QUIET).samples()
    for number, text in enumerate(texts):
        alone = ci.sweep(lm, [text], **QUIET).samples()
        own = numbers(whole[whole["sample"] == number]).reset_index(drop=True)
        assert np.allclose(own.iloc[:, 1:], numbers(alone).iloc[:, 1:], rtol=2e-5, equal_nan=True)
    padded = ci.probe(lm.run_with_cache(texts, padding_side="right")[1]).samples()
    columns = padded.columns.intersection(whole.columns).drop(["sample", "label"], errors="ignore")
    order = ["sample", "layer"]
    ours, theirs = (table.sort_values(order)[columns] for table in (whole, padded))
    assert np.allclose(ours, theirs, rtol=2e-4, atol=1e-6, equal_nan=True)
    chunked = ci.sweep(lm, texts, out=tmp_path, chunk_size=2, **QUIET)
    assert np.allclose(numbers(chunked.samples()).iloc[:, 1:], numbers(whole).iloc[:, 1:],
                       rtol=2e-5, equal_nan=True)  # fmt: skip


def test_every_form_of_short_texts_is_the_same_data(tmp_path):
    lm = reader()
    wanted = ci.sweep(lm, RAGGED, controls=0, **QUIET)
    (tmp_path / "one.txt").write_text(RAGGED[2])
    forms = (tuple(RAGGED), Own(RAGGED), DataLoader(Own(RAGGED), batch_size=2))
    for form in forms:
        same(ci.sweep(lm, form, controls=0, **QUIET), wanted)
    one = ci.sweep(lm, tmp_path / "one.txt", controls=0, **QUIET)
    same(one, ci.sweep(lm, [RAGGED[2]], controls=0, **QUIET))
    fewer = ci.sweep(lm, RAGGED, limit=3, controls=0, **QUIET)
    assert len(fewer.samples()["sample"].unique()) == 3


@pytest.mark.parametrize("how", ["mean", "zero"])
def test_heads_are_ablated_in_short_texts_as_by_hand(how, tmp_path):
    """The mean at a position is over the texts that have it."""
    lm, texts = reader(), RAGGED[:4]
    result = ci.ablate_heads(lm, texts, how=how, out=tmp_path, chunk_size=3, **QUIET)
    rows = [lm.to_tokens(text) for text in texts]
    head, point = 2, "blocks.1.attn.hook_z"
    z = [lm.run_with_cache(row)[1][point][0, :, head].double() for row in rows]
    longest = max(map(len, z))
    mean = torch.zeros(longest, z[0].shape[1], dtype=torch.float64)
    if how == "mean":
        for place in range(longest):
            mean[place] = torch.stack([one[place] for one in z if len(one) > place]).mean(0)

    def edit(value, hook):
        value = value.clone()
        value[:, :, head] = mean[: value.shape[1]].float()
        return value

    own = result.table("samples").query("layer == 1 and head == @head")
    for (_, row), tokens in zip(own.sort_values("sample").iterrows(), rows, strict=True):
        loss = lm.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(point, edit)])
        assert row["ablated"] == pytest.approx(loss.item(), rel=1e-5)
        base = result.table("base").set_index("sample")["base"][row["sample"]]
        assert base == pytest.approx(lm(tokens, return_type="loss").item(), rel=1e-5)
