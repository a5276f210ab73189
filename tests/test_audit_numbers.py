"""The audit: its numbers by another way, and its words."""

import numpy as np
import pytest
import torch

import crate_interp as ci
import reference
from conftest import make, make_lm
from crate_interp.audits.claims import CLAIMS, NUMBERS
from crate_interp.audits.layer import of_attention
from crate_interp.audits.result import verdict
from crate_interp.models.step import Lasso
from ideal import IMAGES, D, ideal


@pytest.fixture(scope="module", params=["crate", "crate-alpha"])
def audited(request):
    model = make(request.param)
    images = torch.randn(3, 3, 6, 20, generator=torch.Generator().manual_seed(1))
    result = ci.audit(model, images, eps=0.7, lasso_tokens=13, batch_size=2, progress=False)
    return model, model.run_with_cache(images)[1], result


def number(result, name, layer):
    table = result.table("numbers")
    return table[table["layer"] == layer].sort_values("sample")[name].to_numpy()


def test_numbers_of_attention(audited):
    model, cache, result = audited
    u = model.blocks[1].attn.U.detach().double().numpy()
    before, after = (cache[name, 1].double().numpy() for name in ("resid_pre", "resid_mid"))
    for index in range(3):
        z, change = before[index], after[index] - before[index]
        rates = [reference.subspace_coding_rate(x, u, 0.7).sum() for x in (z, after[index])]
        exact = reference.subspace_coding_rate_gradient(z, u, 0.7)
        series = reference.neumann_gradient(z, u, 0.7)
        alpha = 7 / (13 * 0.49)
        largest = np.linalg.norm(sum(uk @ uk.T for uk in u), 2)
        wanted = {
            "rate_before": rates[0],
            "rate_after": rates[1],
            "compresses": (rates[1] - rates[0]) / rates[0],
            "gradient": -(change * exact).sum() / np.linalg.norm(change) / np.linalg.norm(exact),
            "step": -(change * exact).sum() / (exact**2).sum() * 9 / 4 * alpha * largest,
            "neumann": np.mean([(alpha * np.linalg.svd(z @ uk)[1] ** 2 > 1).mean() for uk in u]),
            "neumann_direction": -(change * series).sum()
            / np.linalg.norm(change)
            / np.linalg.norm(series),
            "update_over_gradient": np.linalg.norm(change) / np.linalg.norm(exact),
            "update_over_neumann": np.linalg.norm(change) / np.linalg.norm(series),
        }
        for name, value in wanted.items():
            assert number(result, name, 1)[index] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def test_numbers_of_the_sparse_step(audited):
    model, cache, result = audited
    block, cfg = model.blocks[1], model.cfg
    d = block.mlp.D.detach().double().numpy()
    y = cache["blocks.1.ln2.hook_normalized"].double().numpy()
    mid, code = cache["resid_mid", 1].double().numpy(), cache["post", 1].double().numpy()
    warm = cfg.family == "crate"

    def step(x, lambd):
        z = x if warm else np.zeros((len(x), d.shape[1]))
        for _ in range(1 if warm else 2):
            z = np.maximum(z - cfg.eta * (z @ d.T - x) @ d - cfg.eta * lambd, 0)
        return z

    def total(z, index):
        return float(sum(reference.lasso_objective(z, y[index], d, cfg.lambd)))

    for index in range(3):
        start = np.maximum(y[index], 0) if warm else np.zeros_like(code[index])
        best = reference.lasso_solution(y[index], d, cfg.lambd)
        zeros, free, bare = (
            (z == 0).mean() for z in (code[index], step(y[index], 0.0), step(mid[index], cfg.lambd))
        )
        values = [total(z, index) for z in (start, code[index], best)]
        wanted = {
            "descends": (values[1] - values[0]) / values[0],
            "share": (values[0] - values[1]) / (values[0] - values[2]),
            "zeros": zeros,
            "zeros_without_threshold": free,
            "zeros_without_norm": bare,
            "threshold": (zeros - free) / zeros,
        }
        if warm:  # of a wide dictionary the solution is not unique
            longer = max(np.linalg.norm(code[index]), np.linalg.norm(best))
            wanted["converged"] = np.linalg.norm(code[index] - best) / longer
            rate = reference.coding_rate(code[index], 0.7)
            wanted["rate_kept"] = (reference.coding_rate(code[index] @ d.T, 0.7) - rate) / rate
        for name, value in wanted.items():
            assert number(result, name, 1)[index] == pytest.approx(value, rel=2e-3, abs=2e-4), name
    assert result.table("numbers")["unsolved"].max() < 1e-2


@pytest.mark.parametrize("name", ["crate-lm", "crate-lm vanilla", "nanochat-crate"])
def test_the_step_that_is_audited_is_the_layers(name):
    lm = make_lm(name)
    with torch.no_grad():
        for block in lm.blocks:
            if hasattr(block.mlp, "threshold"):
                block.mlp.threshold.abs_()
    _, cache = lm.run_with_cache(
        torch.randint(0, 47, (2, 13), generator=torch.Generator().manual_seed(0))
    )
    for layer, block in enumerate(lm.blocks):
        lasso = block.mlp.lasso()
        again = lasso.run(cache[f"blocks.{layer}.ln2.hook_normalized"], lasso.lambd)
        torch.testing.assert_close(again, cache["post", layer], rtol=1e-4, atol=1e-5)


def test_what_does_not_apply_says_why():
    tokens = torch.randint(0, 47, (3, 13), generator=torch.Generator().manual_seed(0))
    table = ci.audit(make_lm("gpt-baseline"), tokens, progress=False).table()
    assert set(table["verdict"]) == {"not applicable"}
    assert set(table["reason"]) == {
        "queries, keys and values are three codes: the layer has no subspaces U",
        "the layer has an MLP, no dictionary",
        "there is no dictionary",
    }
    chat = make_lm("nanochat-crate")
    with torch.no_grad():
        chat.blocks[0].mlp.threshold[0] = -1.0
        for block in list(chat.blocks)[1:]:
            block.mlp.threshold.abs_()
    table = (
        ci.audit(chat, tokens, progress=False, untrained=0).table().set_index(["layer", "claim"])
    )
    assert (
        "negative" in table.loc[(0, "descends"), "reason"]
        and table.loc[(1, "descends"), "verdict"] != "not applicable"
    )


def test_the_untrained_stand_beside(audited):
    model, _, result = audited
    table = result.table()
    assert (table[table["verdict"] != "not applicable"]["untrained_verdict"] != "").all()
    assert (
        np.isfinite(
            table[table["verdict"] != "not applicable"][["value", "low", "high", "untrained"]]
        )
        .all()
        .all()
    )
    lines = result.text().splitlines()
    assert len(lines) == 4 and lines[0].split()[1:] == list(CLAIMS) and "(" in lines[1]
    assert repr(result).startswith("AuditResult: Of ") and set(result.layers().columns) == {
        "layer",
        *NUMBERS,
    }


def test_saved_and_loaded(audited, tmp_path):
    result = audited[2]
    again = ci.AuditResult.load(result.save(tmp_path))
    assert again.table().equals(result.table()) and again.meta == result.meta
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match="was not written by AuditResult.save"):
        ci.AuditResult.load(tmp_path)
    with pytest.raises(ValueError, match="holds no saved AuditResult"):
        ci.AuditResult.load(tmp_path / "nothing")


# ---- words


def test_verdicts():
    assert [verdict("gradient", *pair) for pair in ((0.5, 0.9), (0.1, 0.49), (0.4, 0.6))] == [
        "kept",
        "broken",
        "undecided",
    ]
    assert verdict("step", 0.1, 2.0) == "kept" and verdict("step", 2.1, 3.0) == "broken" == verdict(
        "step", -1.0, 0.0
    )
    assert verdict("neumann", 0.0, 0.0) == "kept" and verdict("compresses", 0.0, 0.0) == "broken"
    assert verdict("share", np.nan, np.nan) == "undecided"


def test_one_sample_decides_nothing_of_activations():
    table = ci.audit(ideal(), IMAGES[:1], untrained=0, progress=False).table().set_index("claim")
    assert (
        set(table["verdict"]) == {"undecided", "kept"}
        and (table.loc["complete", "verdict"] == "kept").all()
    )


@pytest.mark.usefixtures("unchecked")
def test_refusals():
    model = ideal()
    for match, call in (
        ("eps=0", lambda: ci.audit(model, IMAGES, eps=0.0)),
        ("lasso_tokens=0", lambda: ci.audit(model, IMAGES, lasso_tokens=0)),
        ("untrained=-1", lambda: ci.audit(model, IMAGES, untrained=-1)),
        ("cannot measure Linear", lambda: ci.audit(torch.nn.Linear(2, 2), IMAGES)),
        ("the data is empty", lambda: ci.audit(model, IMAGES[:0])),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with model.hooks([("blocks.1.hook_attn_out", lambda out, hook: out * torch.nan)]):
        with pytest.raises(ValueError, match=r"of layer 1 holds NaN or Inf in samples 0 to 3"):
            ci.audit(model, IMAGES, untrained=0, progress=False)


def test_a_layer_that_does_nothing():
    """No update and a stream of zeros: numbers of nothing are 0, not NaN."""
    block = ideal().blocks[0]
    zero = torch.zeros(2, 13, D)
    found = of_attention(block, {"hook_resid_pre": zero, "hook_resid_mid": zero}, 0.1)
    assert all(float(value.abs().max()) == 0 for value in found.values())
    assert isinstance(block.mlp.lasso(), Lasso)
