"""The embedded model and images: what the table says of them, and that the model has learned."""

import hashlib
import re
from pathlib import Path

import pytest
import torch

import crate_interp as ci
from crate_interp.checkpoints.hub import ASSETS, MODELS
from crate_interp.config import check_names
from crate_interp.config.families import FAMILIES

WEIGHTS = Path(__file__).parent.parent / "demos" / "weights"
EMBEDDED = [row for row in MODELS if row["embedded"]]


@pytest.mark.parametrize("row", EMBEDDED, ids=lambda row: row["name"])
def test_the_table_is_true(row):
    path = ASSETS / row["file"]
    content = path.read_bytes()
    assert hashlib.sha256(content).hexdigest() == row["sha256"] and len(content) == row["bytes"]
    model = ci.load(row["name"])
    assert sum(value.numel() for value in model.parameters()) == row["params"]
    assert model.cfg.family == row["family"] and model.cfg.model_name == row["name"]
    shipped = WEIGHTS / row["name"]  # steps that the package leaves to the repository
    beside = sorted((shipped / "steps").glob("*")) if (shipped / "steps").exists() else []
    for path_of_step in beside:
        assert ci.load(shipped, revision=path_of_step.stem).cfg == model.cfg
    assert bool(beside) == bool(row["note"]) != bool(row["steps"])
    for step in row["steps"]:
        assert ci.load(row["name"], revision=f"step-{step}").cfg == model.cfg
    assert len(list((path.parent / "steps").glob("*"))) == len(row["steps"])
    assert len(row["steps"]) + len(beside) >= (1 if row["family"] == "gpt-baseline" else 4)
    card = (path.parent / "README.md").read_text()
    said = {
        "crate": ("MIT", "Accuracy:", "Chance"),
        "crate-lm": ("public domain", "WordNet", "nats per byte", "trigram"),
    }
    repeats = ("held out: 9, 14, 19", "untrained", "Chance is 1 in 32")
    which = repeats if "induction" in row["name"] else said[row["family"]]
    for word in ("Data:", "seed", *which):
        assert word in card
    if row["name"] == "crate-tiny-pictures":
        assert all(word in card for word in ("no mask was seen", "CC0", "Apache-2.0", "CC BY 4.0"))
    else:
        assert "Wall time:" in card


def test_the_table_of_models():
    table = ci.list_models()
    wanted = "name family repo file revision sha256 bytes licence params embedded".split()
    assert list(table.columns)[: len(wanted)] == wanted and table["name"].is_unique
    for row in MODELS:
        assert row["family"] in (None, "sae", *FAMILIES) and isinstance(row["licence"], str)
        assert row["sha256"] is None or re.fullmatch("[0-9a-f]{64}", row["sha256"])
        assert row["revision"] is None or re.fullmatch("[0-9a-f]{40}", row["revision"])
        assert row["file"] or row["link"] or row["note"]  # where it is, or what is known of it
        check_names(row["config"])


def test_all_assets_are_small():
    """The wheel holds them, and is to stay under 12 MB; tests/wheel.sh weighs the wheel itself."""
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < 11_800_000


def accuracy(model):
    data = ci.data.embedded("fashion")
    with torch.no_grad():
        guess = model(model.preprocess(data[:]["image"])).argmax(dim=-1)
    return (guess == torch.tensor(data[:]["label"])).float().mean().item()


@pytest.mark.slow
def test_it_has_learned():
    # 256 test images: one in ten by chance, and the standard error of a share of 0.9 is 0.02
    assert accuracy(ci.load("crate-tiny-fashion")) > 0.84
    assert accuracy(ci.load("crate-tiny-fashion", revision="step-0")) < 0.25
    steps = [
        accuracy(ci.load("crate-tiny-fashion", revision=f"step-{step}")) for step in (10, 160, 2560)
    ]
    assert steps == sorted(steps)


def test_labels():
    model = ci.load("crate-tiny-fashion")
    assert model.cfg.labels == tuple(ci.data.embedded("fashion").features["label"].names)
    assert model.to_single_token("Ankle boot") == 9


@pytest.mark.slow
def test_the_model_of_pictures_has_learned():
    """128 composites of a vendor that training did not see; chance is 1/7.

    The standard error of a share of 0.5 is 0.044.
    """
    data = ci.data.embedded("pictures")
    shares = []
    for revision in ("step-0", "step-2000", None):
        folder = "crate-tiny-pictures" if revision is None else WEIGHTS / "crate-tiny-pictures"
        model = ci.load(folder, revision=revision)
        with torch.no_grad():
            guess = model(model.preprocess(data[:]["image"])).argmax(dim=-1)
        shares.append((guess == torch.tensor(data[:]["label"])).float().mean().item())
    assert shares[0] < 0.25 < 0.3 < shares[1] and shares[2] > 0.45
    assert model.cfg.labels == tuple(data.features["label"].names) and len(data) == 128
    masks = model.preprocess_masks(data[:]["mask"])
    assert set(masks.unique().tolist()) == {0, 255} and (masks > 0).flatten(1).any(dim=1).all()


def test_the_language_model_has_learned():
    """On a passage of a held-out book it is better than at every earlier step.

    It is better than uniform guessing, ln 1024 = 6.93, too.
    """
    passage = (
        "In the beginning was the Word, and the Word was with God, and the Word was God. "
        "The same was in the beginning with God."
    )
    losses = []
    for step in ("step-0", "step-160", "step-2560", None):
        folder = "crate-tiny-lm" if step is None else WEIGHTS / "crate-tiny-lm"
        lm = ci.load(folder, revision=step)
        with torch.no_grad():
            losses.append(lm(passage, "loss").item())
    assert losses == sorted(losses, reverse=True) and losses[0] > 6.5 and losses[-1] < 4.0
    tokens = lm.to_tokens(passage)
    assert tokens[0, 0] == 0 and lm.to_string(tokens) == ["<|bos|>" + passage]
    assert lm.generate("In the beginning", 8).startswith("In the beginning")
    assert lm.cfg.prepend_bos and lm.cfg.family == "crate-lm" and lm.cfg.d_vocab == 1024


def test_the_repeats_are_continued_by_the_models_that_are_made_for_them():
    """All tokens but those of the first string, and the first of the second, can be known."""
    tokens = torch.tensor(ci.data.embedded("repeats")["input_ids"])
    assert tokens.shape == (128, 49) and (tokens[:, 0] == 32).all()
    periods = torch.tensor([9, 14, 19]).repeat(43)[:128]
    for row, period in zip(tokens, periods.tolist(), strict=True):
        assert torch.equal(row[1 + period :], row[1 : 49 - period])
    samples = ci.data.open_text("embedded:repeats", list)
    assert torch.equal(samples.read(0, 128), tokens)
    for name in ("crate-tiny-induction", "gpt-tiny-induction"):
        with torch.no_grad():
            right = ci.load(name)(tokens)[:, :-1].argmax(-1) == tokens[:, 1:]
        known = torch.arange(1, 49) > periods[:, None] + 1
        assert right[known].float().mean() > 0.95
        assert right[~known].float().mean() < 0.2
    result = ci.sweep(
        ci.load("crate-tiny-induction"), "embedded:repeats", limit=3, controls=0, progress=False
    )
    assert result.meta["n_samples"] == 3


def test_columns_of_tokens_have_one_length():
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]]})
    assert ci.data.open_text(rows, list).read(0, 2).tolist() == [[1, 2, 3], [4, 5, 6]]
    ragged = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4]]})
    with pytest.raises(ValueError, match="have 1 to 3 tokens: give rows of one length"):
        ci.data.open_text(ragged, list)
