"""The demos, notebooks and benchmarks run, and say what their stored numbers say."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from nbclient import NotebookClient

import crate_interp as ci
from segments import rectangles_and_noise

sys.path.append(str(Path(__file__).parent.parent / "demos"))

import neuron_records
import pair_measures
import planted
import train_sae
import train_tiny_cutouts as demo
import whitebox_family as family

from trainings import goes_on


@pytest.fixture
def data():
    return demo.Composites(*rectangles_and_noise(13, width=97))


def settings(folder, steps=5, model="crate"):
    folder.mkdir(exist_ok=True)
    return argparse.Namespace(out=folder, steps=steps, lr=1e-3, decay=0.05, model=model)


def test_composites_have_exact_masks_and_do_not_depend_on_their_neighbours(data):
    images, labels, masks = data.batch([3, 7, 3], 2)
    assert torch.equal(images[0], images[2])
    assert not torch.equal(images[0], data.batch([3], 1)[0][0])
    assert torch.equal(data.batch([7], 2)[0][0], images[1]) and labels.tolist() == [3, 7, 3]
    assert images.shape == (3, 3, 64, 64) and images.dtype == torch.uint8
    assert masks.shape == (3, 64, 64)
    for mask in masks:
        rows, columns = (torch.nonzero(mask.any(dim=1 - axis)).flatten() for axis in (0, 1))
        height, width = len(rows), len(columns)
        assert 0.44 * 64 < height < 0.81 * 64 and abs(height / width - 11 / 7) < 0.2
        assert mask.sum() >= 0.9 * height * width  # the object is a rectangle


def test_training_goes_on_from_any_step(data, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "BATCH", 4)
    monkeypatch.setattr(demo, "HELD_OUT", 6)
    train = lambda name, **more: demo.train(settings(tmp_path / name, **more), data, data)  # noqa: E731
    _, _, facts = goes_on(monkeypatch, train, lambda name: train(name, steps=6), 3)
    assert facts["minutes"] > 0 and (tmp_path / "parts" / "steps" / "step-0.safetensors").exists()


def test_the_plain_vit_is_a_vit_with_the_same_points_and_about_as_large():
    crate, vit = demo.make_model("crate"), demo.make_model("vit").eval()
    sizes = [sum(value.numel() for value in model.parameters()) for model in (crate, vit)]
    assert abs(sizes[0] / sizes[1] - 1) < 0.05
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, cache = vit.run_with_cache(images)
    assert logits.shape == (2, 10)
    block, z = vit.blocks[3], cache["blocks.3.hook_resid_pre"]
    q, k, v = block.attn.qkv(block.ln1(z)).chunk(3, dim=-1)
    heads = [part.unflatten(-1, (6, 16)).transpose(1, 2) for part in (q, k, v)]
    mixed = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    torch.testing.assert_close(cache["blocks.3.hook_resid_mid"], z + block.attn.out(mixed))
    mid = cache["blocks.3.hook_resid_mid"]
    torch.testing.assert_close(cache["blocks.3.hook_resid_post"], mid + block.mlp(block.ln2(mid)))


def test_records_hold_the_strongest_pieces_and_moments_of_the_code(tmp_path):
    lm = ci.load("crate-tiny-lm")
    samples = ci.data.open_text("embedded:held-out-text", lm.window_rows, 3, lm.to_tokens)
    tokens = samples.read(0, 3)
    neuron_records.neuron_records(lm, tokens, tmp_path, layer=1, atoms=[2, 5], top=3, random=2)
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["2.json", "5.json"]
    whole = tokens.shape[1] // 64 * 64
    point = "blocks.1.mlp.hook_post"
    _, cache = lm.run_with_cache(tokens, names_filter=point)
    for atom in (2, 5):
        record = json.loads((tmp_path / "1" / f"{atom}.json").read_text())
        codes = cache[point][:, :whole, atom].reshape(-1, 64).double().numpy()
        assert [*record["neuron_id"].values()][1:] == [1, atom]
        assert record["mean"] == pytest.approx(codes.mean(), rel=1e-5)
        assert record["variance"] == pytest.approx(codes.var(), rel=1e-5)
        best = record["most_positive_activation_records"]
        assert len(best) == 3 and len(record["random_sample"]) == 2
        pieces = tokens[:, :whole].reshape(-1, 64)
        for piece, n in zip(best, np.argsort(-codes.max(axis=1), kind="stable"), strict=False):
            np.testing.assert_allclose(piece["activations"], codes[n], rtol=1e-4, atol=1e-6)
            assert piece["tokens"] == list(map(lm.to_single_str_token, pieces[n].tolist()))


@pytest.mark.slow
def test_an_autoencoder_learns_from_a_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_sae, "TRAINING", 40)
    monkeypatch.setattr(train_sae, "IMAGES", 51)
    train_sae.main(tmp_path / "s", steps=1)
    train_sae.main(tmp_path / "s", steps=100)  # on the store that is there
    said = capsys.readouterr().out
    first, last = (line for line in said.splitlines() if line.startswith("step"))
    errors = [float(line.split("error ")[1]) for line in (first, last)]
    assert errors[1] < 0.5 * errors[0]
    assert said.count("Measured on 11 images, with the cross-entropy of the labels") == 2
    for coder in ("autoencoder", "shuffled weights", "pca", "zero", "mean"):
        assert f" {coder} " in said


def writing(share, seed):
    """A planted layer whose W_O is, in this share, the multiple of U^T that lowers R^c."""
    one = planted.ideal(n=4, n_layers=1)
    weight = one.model.blocks[0].attn.out_proj.weight
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(len(weight), len(weight), generator=generator))[0]
    with torch.no_grad():
        weight.copy_(share * weight + (1 - share) * turn @ weight)
    return one


@pytest.mark.parametrize(("share", "wanted"), [(0.4, "yes"), (0.0, "no")])
def test_a_planted_attention_is_judged_beside_random_maps_alone(share, wanted):
    """Gradient steps, ceilings and U itself lower R^c more than the planted layer does."""
    parts = []
    for seed in range(3):
        one = writing(share, seed)
        found = family.of_audit(one.model, one.images)
        values = pd.DataFrame({"statistic": found.keys(), "value": found.values()})
        parts.append(values.assign(kind="crate", seed=seed))
    assert family.followed(pd.concat(parts), "crate")[0] == wanted


def test_the_page_has_the_tables_of_the_stored_numbers():
    cost = pd.DataFrame(1.0, index=list(family.NAMES), columns=list(family.TOKENS.values()))
    page = (Path(family.__file__).parent / "docs" / "pages" / "family.md").read_text()
    tables, _ = family.text(pd.read_csv(family.STORED), cost).split("\n\n| microseconds")
    assert tables in page


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cbt", "aot", "vit"])
def test_a_network_is_measured_as_its_stored_row_says(kind):
    found = family.measured(kind, 0, pair_measures.sample())
    stored = pd.read_csv(family.STORED).query("kind == @kind and seed == 0")
    wanted = stored.set_index("statistic")["value"]
    assert set(found) == set(wanted.index)
    for name, value in found.items():
        assert value == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_a_benchmark_holds():
    command = [sys.executable, Path(__file__).parent / "benchmarks" / "bench_memory.py", "small"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "over features" in done.stdout, done.stdout + done.stderr


DEMOS = Path(__file__).parent.parent / "demos"
SHOWN = {  # what their outputs must hold, and how many pictures
    "01_meet_crate": ("Answer: you can see every step", 1),
    "02_is_each_layer_doing_its_job": ("Answer, for 6 layers", 2),
    "03_segmentation_for_free": ("Answer: the fixed head", 2),
    "04_edit_a_subspace": ("Answer: on images that did not choose it", 1),
    "05_a_circuit_in_a_tiny_language_model": ("Answer: L0H0", 5),
    "06_watch_it_learn": ("Answer: the rate", 5),
    "07_crate_alpha_from_the_hub": ("Answer, for a random network", 0),
    "08_do_the_job_better": ("Answer: not measurably", 1),
    "09_is_it_crate_or_any_transformer": ("Answer: training brings", 2),
    "10_why_this_word": ("Answer: the graph of one sequence finds more", 2),
    "11_why_this_picture": ("Answer: rollout orders the patches best", 2),
    "12_why_it_looks_there": ("Answer: without the 10 strongest atoms", 2),
    "13_how_a_tied_head_looks_back": ("Answer: with equal norms in layer 0", 1),
}
NAMES = list(SHOWN)
CLAIMS = {  # in how many of the three networks of notebook 05 each holds, as its top says
    "the lines cross": 3,
    "the head looks after the copy": 3,
    "exchanged positions turn it round": 2,
    "the found heads are a circuit": 3,
}


def runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", DEMOS / "run_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_shows_what_it_announces(name, tmp_path):
    """In processes of its own, without network."""
    command = [sys.executable, DEMOS / "run_notebooks.py", name, "--out", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(rf"{name}: [\d.]+ s", done.stdout)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    streams = [output for output in outputs if output.output_type == "stream"]
    red = [output["text"] for output in streams if output["name"] == "stderr"]
    assert not red, red
    text = "".join(output["text"] for output in streams)
    words, pictures = SHOWN[name]
    assert words in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    pages = [output["data"].get("text/html", "") for output in outputs if "data" in output]
    assert any("Point at a" in page for page in pages) == name.startswith(("01", "05", "10", "11"))
    if name.startswith("05"):
        check_circuit(text)


FIGURE, TABLES = "ci.viz.heatmap(torch.eye(2))", "display(model.cfg, cache)"
CELLS = [
    "import torch, crate_interp as ci\n" + FIGURE,  # no magic, and no pyplot
    "%matplotlib inline\n" + FIGURE, "import matplotlib.pyplot as plt\n" + FIGURE,
    "model = ci.load('crate-tiny-lm'); cache = model.run_with_cache('a')[1]; " + TABLES,
]  # fmt: skip


@pytest.mark.slow
def test_a_cell_shows_its_last_line_once():
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute()
    for cell in cells[:3]:
        (output,) = cell.outputs
        assert output["data"]["image/png"] and "Figure" in output["data"]["text/plain"]
    assert all("<details" in output["data"]["text/html"] for output in cells[3].outputs)


def check_circuit(text):
    """What notebook 05 prints: the heads of each kind, how faithful they are, its claims."""
    kinds = re.findall(r"^(previous-token|duplicate-token|induction) heads: (.*)$", text, re.M)
    assert [kind for kind, _ in kinds] == ["previous-token", "duplicate-token", "induction"]
    found = re.search(
        r"^faithfulness ([.\d]+) \(95 % ([.\d]+) to ([.\d]+)\); 100 random circuits of (\d+) heads "
        r"([.\d]+) \(([.\d]+) to ([.\d]+)\), share as good ([.\d]+)$",
        text,
        re.MULTILINE,
    )
    value, low, high, count, mean, least, most, share = map(float, found.groups())
    assert 0.8 < low < value < high and least < mean < most < low and share < 0.05
    assert count == len({head for _, heads in kinds for head in heads.split(", ")})
    assert "turns round" in text and "are a circuit." in text
    for claim, networks in CLAIMS.items():
        assert f"\n{claim}: in {networks} of 3 networks\n" in text


def test_text_and_notebook_are_the_same():
    """And the outputs are those of the code: the digest of its cells tells which are stale."""
    here = runner()
    assert sorted(path.stem for path in here.sources([])) == NAMES
    for name in NAMES:
        path = DEMOS / f"{name}.ipynb"
        kept = nbformat.read(path, as_version=4)
        code = here.as_notebook(DEMOS / f"{name}.py").metadata["code_sha256"]
        assert kept.metadata["code_sha256"] == code == here.digest(kept), f"{name}: make notebooks"
        assert nbformat.writes(here.synced(DEMOS / f"{name}.py")) == nbformat.writes(kept), (
            f"{name}: run_notebooks.py --sync"
        )
        assert path.stat().st_size < 1_500_000
        assert all(cell["outputs"] or "import" in cell.source or "=" in cell.source
                   for cell in kept.cells if cell.cell_type == "code")  # fmt: skip
        lead = kept.cells[0].get("attachments", {})
        assert name.startswith("07") or lead["lead.png"]["image/png"]
        outputs = [output for cell in kept.cells for output in cell.get("outputs", [])]
        assert any(SHOWN[name][0] in output.get("text", "") for output in outputs)
