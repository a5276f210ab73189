"""ci.circuits.concentration against loops, closed forms, and what it refuses."""

import itertools

import numpy as np
import pytest
import torch

import crate_interp as ci
from conftest import leftover_hooks, make, make_lm
from crate_interp.circuits.code_swaps import rotation, swaps

N, LAYERS, QUIET = 5, 2, dict(batch_size=3, progress=False)
FEW = dict(k=[2, 5], rotations=2, untrained=0, **QUIET)
IMAGES = torch.randn(N, 3, 6, 20, generator=torch.Generator().manual_seed(5)).double()
TOKENS = torch.randint(0, 47, (N, 13), generator=torch.Generator().manual_seed(1))


def classifier(family="crate", **over):
    model = make(family, n_layers=LAYERS, **over).double()
    with torch.no_grad():
        model.unembed.bias -= model(IMAGES).mean(dim=0)
    return model


@pytest.fixture(scope="module")
def model():
    return classifier()


@pytest.fixture(scope="module")
def result(model):
    return ci.circuits.concentration(model, IMAGES, **FEW | dict(untrained=2))


def one(logits):
    return (logits if logits.ndim == 2 else logits[:, -1])[0]


def slow(model, inputs, name, layer, basis, k):
    """(moved, whole) of each pair: whole runs of one sample, and nodes swapped one by one."""
    answers = [int(one(model(x[None])).argmax()) for x in inputs]
    rows = []
    for place, a in enumerate(answers):
        later = [(place + step) % len(inputs) for step in range(1, len(inputs))]
        donor = next(other for other in later if answers[other] != a)
        b = answers[donor]
        acts = []

        def keep(x, hook, acts=acts):
            acts.append(x.detach().requires_grad_())
            return acts[-1]

        gaps = []
        for sample in (place, donor):
            logits = one(model.run_with_hooks(inputs[sample][None], fwd_hooks=[(name, keep)]))
            gaps.append(logits[a] - logits[b])
        (gradient,) = torch.autograd.grad(gaps[0], acts[0])
        own, other, gradient = acts[0][0].detach(), acts[1][0].detach(), gradient[0]
        nodes = []
        for t in range(len(own)):
            for j in range(own.shape[1]):
                size = float((other - own)[t] @ basis[:, j])
                nodes.append((float(gradient[t] @ basis[:, j]) * size, t, j, size))
        value = own.clone()[None]
        for _, t, j, size in sorted(nodes)[:k]:
            value[0, t] += size * basis[:, j]
        hooks = [(name, lambda x, hook, value=value: value)]
        swapped = one(model.run_with_hooks(inputs[place][None], fwd_hooks=hooks))
        rows.append(torch.stack([gaps[0] - swapped[a] + swapped[b], gaps[0] - gaps[1]]).detach())
    return torch.stack(rows).T.numpy()


def agrees(model, inputs, point, found):
    width = int(found.table("points")["width"].iloc[0])
    for name, basis in (("native", torch.eye(width)), ("rotated-1", rotation(width, 1))):
        full = f"blocks.1.{'hook_resid_post' if point == 'stream' else 'mlp.hook_post'}"
        moved, whole = slow(model, inputs, full, 1, basis.double(), 5)
        rows = found.table("swaps").query(f"layer == 1 and basis == {name!r} and k == 5")
        np.testing.assert_allclose(rows["moved"], moved, atol=1e-9)
        pairs = found.table("pairs")
        np.testing.assert_allclose(pairs["gap"] - pairs["donor_gap"], whole, atol=1e-9)
        assert (whole > 0).all()
        if name == "native":
            share = found.table().query("layer == 1 and basis == 'native' and k == 5")["share"]
            np.testing.assert_allclose(share, moved.sum() / whole.sum())


def test_images_agree_with_loops(model, result):
    agrees(model, IMAGES, "code", result)
    assert leftover_hooks(model) == []


@pytest.mark.slow
@pytest.mark.parametrize("point", ["code", "stream"])
@pytest.mark.parametrize("family", ["crate-alpha", "crate-lm", "gpt-baseline", "nanochat-crate"])
def test_families_agree_with_loops(family, point):
    lm = family != "crate-alpha"
    model = make_lm(family, n_layers=LAYERS).double() if lm else classifier(family)
    inputs = TOKENS if lm else IMAGES
    agrees(model, inputs, point, ci.circuits.concentration(model, inputs, point=point, **FEW))


@pytest.mark.parametrize("family", ["crate", "crate-lm"])
def test_all_nodes_of_a_stream_move_the_whole_gap(family):
    model = classifier() if family == "crate" else make_lm(family, n_layers=LAYERS).double()
    inputs = IMAGES if family == "crate" else TOKENS
    found = ci.circuits.concentration(model, inputs, **FEW | dict(k=[10_000]))
    for column in ("share", "carried"):
        np.testing.assert_allclose(found.table()[column], 1, atol=1e-9)
    np.testing.assert_allclose(found.table("contrasts")["difference"], 0, atol=1e-9)


def test_a_known_basis_concentrates_and_a_rotated_one_does_not():
    """Three of 4 * 23 nodes differ, all in favour of the donor: three native axes are enough."""
    generator = torch.Generator().manual_seed(3)
    own, other = torch.randn(2, 5, 4, 23, generator=generator, dtype=torch.float64)
    donor, down = own.clone(), torch.zeros_like(own)
    for token, atom in ((0, 3), (2, 20), (3, 3)):
        donor[:, token, atom] = other[:, token, atom]
        down[:, token, atom] = (donor - own)[:, token, atom].sign()
    whole = (down * (donor - own)).sum(dim=(1, 2))
    moved = {}
    for name, axes in (("native", None), ("rotated", rotation(23, 0))):
        first, three = swaps(own, donor, down, axes, [1, 3])
        moved[name] = (down * (three - own)).sum(dim=(1, 2)) / whole
        assert ((first != own).sum() == len(own)) == (axes is None)
    torch.testing.assert_close(moved["native"], torch.ones(5, dtype=torch.float64))
    assert (moved["rotated"] < 0.5).all()


def test_a_linear_read_out_has_a_closed_form():
    """With a huge eps the last norm is linear: a share is a sum of the largest products."""
    model = classifier(ln_final_eps=1e12)
    with torch.no_grad():
        model.ln_final.weight.fill_(1e6)
        model.unembed.bias -= model(IMAGES).mean(dim=0)
    found = ci.circuits.concentration(model, IMAGES, **FEW)
    _, cache = model.run_with_cache(IMAGES)
    z, pairs = cache["blocks.1.hook_resid_post"][:, 0].detach(), found.table("pairs")
    read = model.W_U.detach() - model.W_U.detach().mean(dim=0)
    change = z - z[torch.tensor(pairs["donor"].to_numpy())]
    answers, others = (torch.tensor(pairs[name]) for name in ("answer", "donor_answer"))
    weights = (read[:, answers] - read[:, others]).T
    centred = cache["blocks.1.hook_resid_post"].detach().flatten(0, 1)
    principal = torch.linalg.svd(centred - centred.mean(dim=0), full_matrices=False)[2].T
    drawn = [rotation(z.shape[1], seed) for seed in range(2)]
    whole, shares = (weights * change).sum(), found.table().query("layer == 1")
    bases = {"native": [torch.eye(31).double()], "pca": [principal], "rotated": drawn}
    for (name, axes), k in itertools.product(bases.items(), (2, 5)):
        products = torch.stack([(weights @ one) * (change @ one) for one in axes])
        moved = products.sort(descending=True)[0][..., :k].clamp(min=0).sum() / len(axes)
        share = shares.query(f"basis == {name!r} and k == {k}")["share"]
        assert float(share.iloc[0]) == pytest.approx(float(moved / whole), rel=1e-6)


def test_the_page_shows_the_finding_and_every_number(result, tmp_path):
    page = ci.viz.concentration_page(result, tmp_path)
    text = " ".join(page.read_text().split())
    assert "Swapping 2 of 403 code entries moves" in text
    for name in ("shares", "contrasts"):
        for value in result.table(name).to_numpy(dtype=object)[-1]:
            cell = f"{value:.4g}" if isinstance(value, float) else value
            assert f"<td>{cell}</td>" in text
    assert "http:" not in text.replace("http://www.w3.org", "") and "<svg" in text
    assert (tmp_path / "concentration.png").stat().st_size > 10_000
    assert ci.circuits.Concentration.load(tmp_path).headline() == result.headline()
