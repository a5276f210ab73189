"""Names of atoms: AUC against scikit-like counts, planted candidates, nulls, records."""

import importlib

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

import crate_interp as ci
from conftest import make
from crate_hooks import full_name
from crate_interp.circuits.graphs.atom_names import auc, cut_out
from crate_interp.circuits.graphs.concepts import of_patches, of_samples, of_tokens

IMAGES = torch.randn(34, 3, 6, 20, generator=torch.Generator().manual_seed(3))


@given(st.integers(0, 2**16))
def test_auc_counts_pairs(seed):
    """Of a present and an absent row, how often the present one is larger; ties count half."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 4, (29, 3), generator=generator).double()
    present = torch.randint(0, 2, (2, 29), generator=generator).bool()
    found = auc(torch.from_numpy(rankdata(values.numpy(), axis=0)), present)
    for concept in range(2):
        ones, zeros = values[present[concept]], values[~present[concept]]
        if min(len(ones), len(zeros)) < 4:
            assert (found[concept] == 0.5).all()
            continue
        above = (ones[:, None] > zeros).double() + 0.5 * (ones[:, None] == zeros).double()
        torch.testing.assert_close(found[concept], above.mean(dim=(0, 1)))


def planted(value, hook):
    """Atom 3 of each image tells the class: samples come as 0, 1, 0, 1, ... or as they are."""
    value = value.clone()
    rows = torch.arange(len(value)) // 2 % 2
    value[..., 3] = rows[:, None].to(value) + 0.01 * torch.rand(value.shape[:2])
    value[:, :, 4] = 0
    value[:, 0, 4] = 1  # and atom 4 tells CLS
    return value


def test_planted_candidates_are_found_and_noise_has_no_name():
    model = make("crate")
    labels = [n // 2 % 2 for n in range(32)]
    with model.hooks(fwd_hooks=[(full_name("mlp.hook_post", 1), planted)]):
        found = ci.circuits.atom_names(model, (IMAGES[:32], labels), batch_size=32, progress=False)
    table = found.table().set_index(["layer", "atom"])
    assert table.loc[(1, 3), "name"] == "class 1" and table.loc[(1, 3), "auc"] == 1
    assert table.loc[(1, 4), "name"] == "CLS" and table.loc[(1, 4), "auc"] == 1
    assert found.name_of(1, 3) == "class 1 (AUC 1.00)" and "atoms of" in found.headline()
    unnamed = table[table["name"] == ""]
    assert (unnamed["auc"] <= unnamed["null"]).all()
    examples = found.examples(1, 4)
    assert all("CLS of sample" in one["words"] and one["webp"] is None for one in examples)


def codes_of(table):
    """The tables of a layer whose codes `[sample, pos, atom]` are given, with ten classes."""
    module = importlib.import_module("crate_interp.circuits.graphs.atom_names")
    samples, pos = table.shape[:2]
    classes = of_samples([n * 7 % 10 for n in range(samples)], None)
    concepts = of_patches(make("crate"), samples, pos, None)
    generator = torch.Generator().manual_seed(0)
    found = module._of_layer(0, table.mean(dim=1), classes, table, concepts, generator)
    return found.set_index("atom")


def test_a_class_at_one_position_is_a_class_and_a_position_a_position():
    """Atoms 0 to 2: a class at one position; 3 to 5: positions alone, with noise; 6: both."""
    generator = torch.Generator().manual_seed(2)
    samples, pos = 128, 13
    label = torch.arange(samples) * 7 % 10
    table = torch.zeros(samples, pos, 7)
    for atom, place in ((0, 0), (1, 3), (2, 9)):
        table[:, place, atom] = (label == atom).float() + 0.01 * torch.rand(
            samples, generator=generator
        )
    for atom, places in ((3, [0]), (4, [1, 2, 6]), (5, [12])):
        table[..., atom] = 0.3 * torch.rand(samples, pos, generator=generator)
        table[:, places, atom] += 1
    table[:, :, 6] = 5.0 * (torch.arange(pos) == 0) + 0.5 * (label == 4)[:, None]
    table[..., 6] += torch.rand(samples, pos, generator=generator)
    found = codes_of(table)
    assert found["name"][[0, 1, 2, 6]].tolist() == [f"class {n}" for n in (0, 1, 2, 4)]
    assert found["kind"][[3, 4, 5]].tolist() == ["position"] * 3 and found["name"][3] == "CLS"


def test_what_follows_from_the_position_is_no_object():
    """Objects are always in the middle, and the atom is large there, object or not."""
    model, samples = make("crate"), 64
    rows, columns = model.cfg.grid
    generator = torch.Generator().manual_seed(2)
    middle = torch.zeros(rows * columns)
    middle[rows * columns // 2 :] = 1
    there = torch.rand(samples, generator=generator) < 0.5
    masks = (there[:, None] & middle.bool()).view(samples, rows, columns)
    masks = masks.repeat_interleave(6 // rows, 1).repeat_interleave(20 // columns, 2)
    concepts = of_patches(model, samples, 1 + rows * columns, masks.to(torch.uint8))
    place = torch.cat([torch.zeros(1), middle])
    table = (place + 0.3 * torch.rand(samples, len(place), generator=generator))[..., None]
    seen = table + 0.2 * torch.nn.functional.pad(there[:, None] * middle, (1, 0))[..., None]
    module = importlib.import_module("crate_interp.circuits.graphs.atom_names")
    found = module._of_layer(
        0, torch.cat([table, seen], dim=-1).mean(dim=1), of_samples(None, None),
        torch.cat([table, seen], dim=-1), concepts, torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert found["kind"].tolist() == ["position", "mask"]


def test_random_labels_name_few_atoms():
    model = make("crate")
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(34, 13, model.cfg.d_mlp, generator=generator)

    def unrelated(value, hook):
        return noise[: len(value), : value.shape[1]].to(value)

    hooks = [(full_name("mlp.hook_post", n), unrelated) for n in range(model.cfg.n_layers)]
    with model.hooks(fwd_hooks=hooks):
        found = ci.circuits.atom_names(model, IMAGES, batch_size=34, progress=False)
    share = (found.table()["name"] != "").mean()
    assert share < 0.25


def test_names_do_not_depend_on_the_batch(monkeypatch):
    """Tokens are compared up to a number that no batch moves, with the masks of their samples."""
    module = importlib.import_module("crate_interp.circuits.graphs.atom_names")
    monkeypatch.setattr(module, "_TOKENS", 13 * 17 - 5)
    masks = [np.pad(np.ones((3, 7), np.uint8), ((0, 3), (n % 2, 13 - n % 2))) for n in range(34)]
    data = [{"image": image, "mask": mask} for image, mask in zip(IMAGES, masks, strict=True)]
    model = make("crate").double()
    tables = [
        ci.circuits.atom_names(model, data, batch_size=size, progress=False).table()
        for size in (34, 5, 1)
    ]
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0], rtol=1e-6)
    of_tokens = tables[0]["n"].max()
    assert of_tokens == 13 * 17


def test_names_are_saved_and_shown_by_a_graph(tmp_path):
    model = make("crate")
    names = ci.circuits.atom_names(model, IMAGES, progress=False)
    again = type(names).load(names.save(tmp_path / "names"))
    pd.testing.assert_frame_equal(again.table(), names.table())
    graph = ci.graph(model, IMAGES[0], most=40, names=names)
    codes = graph.table("nodes").query("atom >= 0")
    for row in codes.itertuples():
        assert row.label == (names.name_of(row.layer, row.atom) or "no name")
    examples = graph.table("examples")
    assert set(zip(examples["layer"], examples["atom"], strict=True)) <= set(
        zip(codes["layer"], codes["atom"], strict=True)
    )
    assert "data:image/webp" in ci.viz.graph(graph).html()
    with pytest.raises(ValueError, match="names: give those of this model"):
        ci.graph(make("crate", seed=1), IMAGES[0], names=names)


def test_candidates_of_patches_and_tokens():
    model = make("crate")
    rows, columns = model.cfg.grid
    masks = torch.zeros(2, 6, 20, dtype=torch.uint8)
    masks[1, :3, :10] = 1
    found = of_patches(model, 2, 1 + rows * columns, masks)
    assert found[0][0] == "CLS" and found[0][2].sum() == 2
    places = sum(on.int() for _, _, on in found[1:10])
    assert (places[:, 1:] == 1).all() and (places[:, 0] == 0).all()
    on = {name: on for name, _, on in found}["patches on the object"]
    assert not on[0].any() and on[1].any() and not on[1, 0]
    words = ["'", " the", "3", "X"]
    tokens = torch.tensor([[0, 1, 2, 3, 0]])
    texts = of_tokens(tokens, words)
    at = {name: on[0] for name, _, on in texts}
    assert at["a quotation mark"].tolist() == [True, False, False, False, True]
    assert at["after a digit"].tolist() == [False, False, False, True, False]
    assert at["the first token"].tolist() == [True, False, False, False, False]
    assert at["after ' the'"].tolist() == [False, False, True, False, False]
    assert "token set" not in {one[1] for one in of_tokens(tokens, ["0", "1", "2", "3"])}


def test_a_cut_out_is_its_patch():
    import io

    from PIL import Image

    picture = Image.new("RGB", (40, 20))
    picture.paste((255, 0, 0), (10, 0, 20, 10))
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=True)
    with Image.open(io.BytesIO(cut_out(buffer.getvalue(), (0, 1), (2, 4)))) as found:
        middle = found.getpixel((24, 24))
    assert middle[0] > 200 and middle[1] < 60


def test_too_little_data_has_no_names():
    with pytest.raises(ValueError, match="names need four"):
        ci.circuits.atom_names(make("crate"), IMAGES[:3], progress=False)
    with pytest.raises(ValueError, match="attention alone"):
        ci.circuits.atom_names(make("aot"), IMAGES, progress=False)
