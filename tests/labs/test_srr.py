"""Sparse rate reduction: the zoo and its weights, the regulariser, the toy of update rules."""

import layerwise
import pandas as pd
import pytest
import srr_regularizer
import srr_toy
import torch
import train_zoo
import zoo
from srr_regularizer import MAIN, gains, of_variant, spread

import crate_interp.measures as measures
from crate_interp.measures import attention_step, subspace_attention
from crate_interp.measures.rates import head_codes


@pytest.fixture(scope="module")
def trainings():
    return pd.read_csv(zoo.TRAININGS).set_index("name")


@pytest.fixture
def model():
    return zoo.start(zoo.Recipe("zoo", "crate", 2, 1e-3, 64, 5))


def images(count=3):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_every_start_is_drawn_again_from_its_seed(trainings):
    recipes = [*zoo.zoo(), *zoo.grid()]
    assert [recipe.name for recipe in recipes] == trainings.index.tolist()
    for recipe in recipes:
        assert train_zoo.digest(zoo.start(recipe)) == trainings.loc[recipe.name, "start"]


def test_the_weights_are_small_and_whole():
    files = [zoo.WEIGHTS / f"{recipe.name}.safetensors" for recipe in [*zoo.zoo(), *zoo.grid()]]
    assert {path.name for path in zoo.WEIGHTS.glob("*.safetensors")} == {f.name for f in files}
    assert sum(path.stat().st_size for path in files) < 2_000_000


def test_the_shipped_weights_score_as_their_table_says(trainings):
    _, _, images, labels = zoo.digits()
    for recipe in (zoo.zoo()[7], zoo.grid()[11]):
        found = zoo.scores(zoo.trained(recipe), images, labels)
        row = trainings.loc[recipe.name]
        assert found == pytest.approx((row["test_ce"], row["test_accuracy"]), rel=1e-4)


def test_frames(model):
    z, norm = torch.randn(3, 5, 7), torch.nn.LayerNorm(7)
    assert layerwise.framed(z, norm, "stream") is z
    assert torch.equal(layerwise.framed(z, norm, "read"), norm(z))
    unit = layerwise.framed(z, norm, "unit")
    assert torch.allclose(unit, layerwise.framed(11 * z, norm, "unit"), atol=1e-5)
    assert torch.allclose(unit.square().sum(dim=(1, 2)), torch.full((3,), 35.0))
    assert (layerwise.framed(0 * z, norm, "unit") == 0).all()


def test_the_measure_of_the_stream_is_that_of_the_library(model):
    blocks = list(model.blocks)
    z = model(images(), stop_at_layer=0)
    with torch.no_grad():
        expected = measures.layer_objectives(blocks, [b.attn.U for b in blocks], z, 0.1, 0.1)
    found = layerwise.layer_measures(model, images(), "stream")
    assert torch.allclose(found, expected.mean(dim=1), rtol=1e-5)


def test_count_and_share_differ_by_what_is_counted(model):
    z = layerwise.streams(model, images())[1:]
    nonzero = torch.stack([(x != 0).float().sum(dim=(1, 2)).mean() for x in z])
    for frame in layerwise.FRAMES:
        count, share = (
            layerwise.layer_measures(model, images(), frame, share=share) for share in (False, True)
        )
        assert torch.allclose(count - share, 0.1 * nonzero * (1 - 1 / (17 * 32)), atol=1e-3)


@pytest.mark.parametrize(("variant", "cosine"), [("c", 1), ("n", -1)])
def test_tied_maps_have_their_cosine(variant, cosine):
    model = zoo.start(zoo.Recipe("zoo", variant, 2, 1e-3, 64, 5))
    assert torch.allclose(layerwise.output_cosines(model), torch.full((2, 4), float(cosine)))


def test_the_kept_readings_are_those_of_the_weights():
    kept = pd.read_csv(zoo.READINGS)
    assert len(kept) == len(zoo.zoo()) * len(zoo.READ_AT) * zoo.LAYERS
    _, _, images, _ = zoo.digits()
    recipe = zoo.zoo()[9]
    for model, step in ((zoo.start(recipe), 0), (zoo.trained(recipe), zoo.STEPS)):
        own = kept[(kept["variant"] == recipe.variant) & (kept["seed"] == recipe.seed)]
        own = own[own["step"] == step].drop(columns=["variant", "seed", "step"])
        found = pd.DataFrame(layerwise.reading(model, images[: zoo.READ_ON]))
        pd.testing.assert_frame_equal(
            found, own.reset_index(drop=True), check_dtype=False, rtol=1e-4, atol=1e-5
        )


def table(values):
    """Accuracies by seed: (without, with) each; the measure falls by its seed."""
    rows = []
    for seed, pair in enumerate(values):
        for weight, value in zip((0.0, MAIN[0]), pair, strict=True):
            row = {"variant": "n", "seed": seed, "weight": weight, "penalty": "l0"}
            rows.append(row | {"accuracy": value, "measure": -seed if weight else 0.0})
    return pd.DataFrame(rows)


def test_differences_are_paired_by_seed():
    found = table([(90.0, 91.0), (80.0, 81.1), (85.0, 85.9)])
    assert gains(found, "n", MAIN, "accuracy") == pytest.approx([1.0, 1.1, 0.9])
    shuffled = gains(found.sample(frac=1, random_state=0), "n", MAIN, "accuracy")
    assert sorted(shuffled) == pytest.approx([0.9, 1.0, 1.1])
    assert spread(found, "n") == pytest.approx(20 / 3)
    better = of_variant(found, "n", 7)
    assert better["answer"] == "supported" and better["ours"] == pytest.approx(1.0)
    worse = of_variant(table([(90.0, 89.0), (80.0, 78.9), (85.0, 84.1)]), "n", 7)
    assert worse["answer"] == "not supported"


def test_weight_0_is_the_training_without_it():
    recipe = zoo.Recipe("zoo", "crate", zoo.LAYERS, zoo.LR, 11, 3)
    looks = lambda *_: False  # noqa: E731
    plain = zoo.fit(recipe, 3, lambda step: 1e-3, looks)

    def term(model):
        return srr_regularizer.ci.SRRRegularizer(model, 0.0)

    same = zoo.fit(recipe, 3, lambda step: 1e-3, looks, term)
    for one, other in zip(plain.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)


EPS = 0.7


def tokens(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


def test_crate_t_writes_by_the_matrix_that_is_not_transposed():
    """Head by head and column by column, as eq. 10 has it, for 3 heads of 5 in 15 dimensions."""
    z, u = tokens(7, 15), torch.linalg.qr(tokens(15, 15, 1))[0].reshape(15, 3, 5).movedim(1, 0)
    a = 5 / (7 * EPS**2)
    wide = torch.cat(list(u), dim=1)  # [d_model, head * d_head]
    stacked = torch.cat([subspace_attention(z @ one) for one in u], dim=1).T
    wanted = z.T + 0.3 * a**2 * wide.T @ stacked
    torch.testing.assert_close(srr_toy.transposed_step(z, u, EPS, 0.3), wanted.T)


def test_variants_of_the_identity_are_one_and_increments_as_long():
    z = tokens(7, 15)
    eye = torch.eye(15, dtype=torch.float64).reshape(15, 3, 5).movedim(1, 0)
    c, t = attention_step(z, eye, EPS, 0.3), srr_toy.transposed_step(z, eye, EPS, 0.3)
    torch.testing.assert_close(c, t)
    torch.testing.assert_close(attention_step(z, eye, EPS, -0.3), 2 * z - c)
    u = torch.linalg.qr(tokens(15, 15, 1))[0].reshape(15, 3, 5).movedim(1, 0)
    c, t = attention_step(z, u, EPS, 0.3), srr_toy.transposed_step(z, u, EPS, 0.3)
    a = 5 / (7 * EPS**2)
    identity = 0.3 * a**2 * subspace_attention(head_codes(z, u)).transpose(0, 1).flatten(1)
    lengths = [torch.linalg.norm(step) for step in (c - z, t - z, identity)]
    torch.testing.assert_close(lengths[0], lengths[1])
    torch.testing.assert_close(lengths[0], lengths[2])
    assert torch.linalg.norm(c - t) > 0.1 * lengths[0]


def test_the_regimes_are_what_they_say():
    for regime, low, high in (("all x below 1 at first", 0, 0), ("most x above 1", 0.9, 1)):
        shares = [row[4] for row in srr_toy.passed("(c) first-order term", regime, 0)
                  if row[0] == "share above 1"]  # fmt: skip
        assert low <= min(shares) and max(shares) <= high
