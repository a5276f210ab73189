"""ci.saes.evaluate against closed forms and a second, slow implementation."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import crate_interp as ci
from conftest import make, make_lm
from crate_interp.models.sae import SAEConfig
from crate_interp.saes.result import ratio, recovered
from crate_interp.stats.bootstrap import studentised

POINT = "blocks.1.hook_resid_post"
N = 6
QUIET = dict(progress=False)


class Ablate:
    """Zeros, or another constant."""

    def __init__(self, value=0.0):
        self.value = value

    def encode(self, x):
        return torch.zeros_like(x)

    def decode(self, acts):
        return acts + torch.as_tensor(self.value).to(acts)


def identity(width, point=POINT):
    """W_enc = [I, -I], W_dec its transpose: what ReLU splits is put together again."""
    sae = ci.SparseAutoencoder(SAEConfig(hook_name=point, d_in=width, d_sae=2 * width))
    eye = torch.eye(width)
    sae.W_enc.data = torch.cat([eye, -eye], dim=1)
    sae.W_dec.data = sae.W_enc.data.T.clone()
    return sae.eval()


def random_sae(width=31, features=20, seed=0, **more):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cfg = SAEConfig(hook_name=POINT, d_in=width, d_sae=features, **more)
        sae = ci.SparseAutoencoder(cfg)
        sae.b_enc.data = torch.randn(features) - 1
        sae.b_enc.data[3] = -1e6  # a dead one
    return sae.eval()


@pytest.fixture(scope="module")
def vision():
    model = make("crate").double()
    data = torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(5)).double()
    return model, data


@pytest.fixture(scope="module")
def text():
    lm = make_lm().double()
    return lm, torch.randint(0, 47, (N, 11), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def labels():
    return [place % 11 for place in range(N)]


def by_hand(model, data, sae, point, kind, labels=None, mask=None):
    """The main table by loops over samples and tokens."""
    with torch.no_grad():
        clean = [model(one[None])[0] for one in data]
        x = [model.run_with_cache(one[None])[1][point][0] for one in data]
        x = [one.reshape(one.shape[0], -1) for one in x]
        kept = [range(len(x[0])) if mask is None else range(int(row.sum())) for row in (
            x if mask is None else mask)]  # fmt: skip
        tokens = torch.stack([x[i][t] for i in range(len(x)) for t in kept[i]])
        mean = tokens.mean(dim=0)
        acts = sae.encode(tokens)
        rebuilt = sae.decode(acts)

        def losses(put):
            found = []
            for i, one in enumerate(data):
                hook = lambda value, hook: put(value.flatten(2)).reshape(value.shape)  # noqa: E731
                logits = model.run_with_hooks(one[None], fwd_hooks=[(point, hook)])[0]
                if kind == "next token":
                    log = logits.log_softmax(-1)
                    terms = [-log[t, one[t + 1]] for t in kept[i][:-1]]
                    found.append(sum(terms) / len(terms))
                elif kind == "labels":
                    found.append(-logits.log_softmax(-1)[labels[i]])
                else:
                    p = clean[i].softmax(-1)
                    found.append((p * (p / logits.softmax(-1)).log()).sum())
            return torch.stack(found).mean().item()

        l_sae, l_zero = losses(lambda v: sae.decode(sae.encode(v))), losses(torch.zeros_like)
        l_mean, l_own = losses(lambda v: mean.expand_as(v)), losses(lambda v: v)
    return {
        "l0": (acts != 0).double().sum(-1).mean().item(),
        "variance_explained": 1
        - ((tokens - rebuilt) ** 2).sum().item() / ((tokens - mean) ** 2).sum().item(),
        "cosine": F.cosine_similarity(tokens, rebuilt, dim=-1).mean().item(),
        "dead": (acts == 0).all(dim=0).double().mean().item(),
        "loss": l_sae,
        "clean": l_own,
        "loss_change": l_sae - l_own,
        "recovered_zero": (l_zero - l_sae) / (l_zero - l_own),
        "recovered_mean": (l_mean - l_sae) / (l_mean - l_own),
    }


def row(result, coder="autoencoder", point=POINT):
    table = result.table().set_index(["point", "coder"])
    return table.loc[(point, coder)]


def close(result, wanted, point=POINT):
    found = row(result, point=point)
    for name, value in wanted.items():
        if not (name.startswith("recovered") and math.isnan(found[name])):
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-10), name


@pytest.mark.parametrize("kind", ["kl", pytest.param("labels", marks=pytest.mark.slow)])
def test_a_second_implementation_of_images(vision, labels, kind):
    model, data = vision
    sae = random_sae().double()
    given = labels if kind == "labels" else None
    result = ci.saes.evaluate(model, data, {POINT: sae}, labels=given, **QUIET)
    wanted = by_hand(model, data, sae, POINT, kind, labels)
    close(result, wanted)
    assert wanted["dead"] >= 1 / 20 and result.meta["settings"]["loss"] == kind
    if kind == "kl":
        assert not math.isnan(row(result)["recovered_mean"])
        assert row(result)["clean"] == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_a_second_implementation_of_text(text):
    lm, data = text
    sae = random_sae().double()
    result = ci.saes.evaluate(lm, data, {POINT: sae}, **QUIET)
    close(result, by_hand(lm, data, sae, POINT, "next token"))
    assert result.meta["settings"]["loss"] == "next token" and result.meta["unit"] == "windows"


def test_padding_counts_nowhere(text):
    lm, data = text
    sae = random_sae().double()
    lengths = [11, 2, 5, 7, 11, 3]
    mask = torch.tensor([[1] * n + [0] * (11 - n) for n in lengths])
    padded = torch.where(mask.bool(), data, 0)
    result = ci.saes.evaluate(lm, padded, {POINT: sae}, attention_mask=mask, **QUIET)
    close(result, by_hand(lm, padded, sae, POINT, "next token", mask=mask))
    other = torch.where(mask.bool(), data, 46)  # another padding, the same numbers
    again = ci.saes.evaluate(lm, other, {POINT: sae}, attention_mask=mask, **QUIET)
    for name, table in result.tables.items():
        np.testing.assert_allclose(
            table.select_dtypes("number"), again.table(name).select_dtypes("number"), rtol=1e-9,
            atol=1e-12,
        )  # fmt: skip
    assert result.table("samples")["tokens"].unique().tolist() == [11, 2, 5, 7, 3]


def test_the_identity_explains_and_recovers_everything(vision):
    model, data = vision
    result = ci.saes.evaluate(model, data, {POINT: identity(31).double()}, **QUIET)
    own = row(result)
    for name in ("variance_explained", "recovered_zero", "recovered_mean"):
        # equal in every sample: without spread there is no interval
        assert own[name] == 1 and np.isnan([own[f"{name}_low"], own[f"{name}_high"]]).all()
    x = model.run_with_cache(data)[1][POINT]
    assert own["loss_change"] == 0 and own["cosine"] == pytest.approx(1, rel=1e-12)
    assert own["l0"] == pytest.approx((x != 0).double().sum(dim=-1).mean().item())


def test_ablation_is_ablation(vision):
    model, data = vision
    result = ci.saes.evaluate(model, data, {POINT: Ablate()}, **QUIET)
    zero, own = row(result, "zero"), row(result)
    assert own["loss"] == zero["loss"] and own["recovered_zero"] == 0 == zero["recovered_zero"]
    assert own["variance_explained"] == zero["variance_explained"] < 0
    assert own["l0"] == 0 and own["dead"] == 1 and own["cosine"] == 0
    tokens = model.run_with_cache(data)[1][POINT].flatten(0, 1)
    constant = Ablate(tokens.mean(dim=0).detach())
    result = ci.saes.evaluate(model, data, {POINT: constant}, **QUIET)
    assert row(result)["loss"] == pytest.approx(row(result, "mean")["loss"], rel=1e-12)
    for coder in ("autoencoder", "mean"):
        assert row(result, coder)["variance_explained"] == pytest.approx(0, abs=1e-12)
        assert row(result, coder)["recovered_mean"] == pytest.approx(0, abs=1e-10)
    assert "shuffled weights" not in set(result.table()["coder"])  # it is no module


def test_intervals_of_ratios():
    random = np.random.default_rng(0)
    below = random.uniform(1, 2, 40)
    above = 0.7 * below + 0.1 * random.standard_normal(40)
    value, low, high = ratio(above, below)
    assert value == pytest.approx(above.sum() / below.sum()) and low < value < high
    # all sums below equal: the bootstrap-t of the mean itself
    wanted = studentised(above[:, None] / 1.5).interval()
    assert ratio(above, np.full(40, 1.5))[1:] == pytest.approx([end[0] for end in wanted])
    # the standard error of the delta method, from 4,000 ratios of new samples
    draws = random.standard_normal((2, 4000, 40))
    other = 1.5 + 0.3 * draws[0]
    truth = ((0.7 * other + 0.1 * draws[1]).sum(axis=1) / other.sum(axis=1)).std()
    assert (high - low) / 2 / 2.02 == pytest.approx(truth, rel=0.5)
    assert all(np.isnan(ratio(above, 0 * below)))


def test_nothing_is_recovered_where_ablation_costs_nothing():
    random = np.random.default_rng(0)
    clean, noise = random.random(40), random.standard_normal(40)
    assert np.isnan(recovered(clean - 1, clean, clean)).all()
    assert np.isnan(recovered(clean + noise - noise.mean() + 1e-3, clean, clean)).all()
    assert recovered(clean + 1 + 0.1 * noise, clean, clean)[0] == 1
