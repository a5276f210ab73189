"""The zoo of CRATE's variants: its start, its shipped weights and readings, and the lab."""

import lab
import layerwise
import pandas as pd
import pytest
import srr_zoo
import torch
import train_zoo
import zoo

import crate_interp.measures as measures


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


@pytest.mark.slow
def test_the_quick_lab(tmp_path):
    found = srr_zoo.run("quick", lab.Steps(None))
    assert len(found.table()) == len(srr_zoo.PAIRS) + 2 * len(srr_zoo.MAIN) + 1
    assert lab.written(found, srr_zoo.draw, tmp_path).exists()
    one = found.numbers("cosine_0", setting=f"CRATE-N, step {zoo.STEPS}")
    assert one["value"].to_numpy() == pytest.approx(-1)
