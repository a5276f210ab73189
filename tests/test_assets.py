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
    assert all(word in card for word in ("Data:", "seed"))


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
