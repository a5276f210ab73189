"""Maps read back from a notebook that we drew, and notebooks that are refused."""

import base64
import json
from io import BytesIO
from itertools import combinations

import numpy as np
import published_figures as lab
import pytest
from matplotlib.figure import Figure
from PIL import Image
from scipy.stats import spearmanr

random = np.random.default_rng(0)
PICTURES = [random.random((30, 30, 3)) * 0.9 for _ in range(6)]
MAPS = [random.random((6, 60, 60)) * random.random((6, 60, 1)) ** 3 for _ in PICTURES]
MAPS = [(m - m.min((1, 2), keepdims=True)) / np.ptp(m, (1, 2), keepdims=True) for m in MAPS]
FEW = [0, 4, 5]  # the pictures of figures of four heads; those of all heads are the first four


def drawn(picture, maps):
    figure, file = Figure((15, 3)), BytesIO()
    for at, shown in enumerate([picture, *maps]):
        axis = figure.add_subplot(1, 1 + len(maps), at + 1, xticks=[], yticks=[], frame_on=False)
        axis.imshow(shown, interpolation="nearest")
    figure.savefig(file, bbox_inches="tight")
    return file.getvalue()


def notebook(path, *pngs):
    """A notebook whose outputs these are; its code would leave a file."""
    texts = [base64.encodebytes(one).decode() if isinstance(one, bytes) else one for one in pngs]
    outputs = [{"data": {"image/png": text}} for text in texts]
    code = {"source": f"open({str(path)!r} + '.run', 'w')", "outputs": outputs}
    path.write_text(json.dumps({"cells": [code, {"cell_type": "markdown", "source": ""}]}))
    return path


@pytest.fixture(scope="module")
def pngs():
    every = [drawn(PICTURES[k], MAPS[k]) for k in range(4)]
    return [*every, *(drawn(PICTURES[k], MAPS[k][lab.CHOSEN]) for k in FEW)]


@pytest.fixture
def rows(pngs, tmp_path):
    return [lab.parts(each) for each in lab.figures(notebook(tmp_path / "a.ipynb", *pngs))]


def test_maps_are_read_back_to_a_colour_step(rows):
    truth = [*MAPS[:4], *(MAPS[k][lab.CHOSEN] for k in FEW)]
    for row, maps in zip(rows, truth, strict=True):
        for panel, wanted in zip(row[1:], maps, strict=True):
            found, rest = lab.read(panel)
            # viridis has two pairs of neighbours of one colour
            assert np.abs(found / 255 - wanted).max() < 2 / 255 and rest < 0.01


def test_pictures_are_those_of_the_figures(rows, tmp_path):
    for at, row in enumerate(rows):
        Image.fromarray(row[0]).resize((97, 83)).save(tmp_path / f"{at}.png")
    assert {each.shape for each in lab.tensors(rows, tmp_path)} == {(3, 480, 480)}
    for order, words in ((rows[::-1], "is not the picture"), (rows[1:], "7 PNG files for 6")):
        with pytest.raises(ValueError, match=words):
            lab.tensors(order, tmp_path)


def test_the_command_measures_and_writes_into_out_alone(pngs, tmp_path, monkeypatch, capsys):
    tiny = [[what, lab.TINY, k, k // 2, 0.1 * k] for what in ("alike", "mass") for k in range(12)]
    monkeypatch.setattr(lab, "of_tiny", lambda: tiny)
    path, out = notebook(tmp_path / "a.ipynb", *pngs), tmp_path / "out"
    options = {"notebook": "", "pictures": ""}
    found = lab.main(lab.run, lab.draw, ["--notebook", str(path), "--out", str(out)], **options)
    assert sorted(tmp_path.iterdir()) == [path, out] and (out / "published_figures.png").exists()
    again = lab.LabResult.load(out)
    assert again.headline() in capsys.readouterr().out and again.digest() == found.digest()
    colours = [np.minimum(np.floor(256 * m), 255) for m in MAPS]
    heights = np.array([m.sum(2) @ np.arange(60) / m.sum((1, 2)) for m in colours])
    orders = heights[FEW][:, lab.CHOSEN], heights[:4], heights[1:4]
    for name, each in zip(lab.SETS, orders, strict=True):
        slow = np.mean([spearmanr(a, b).statistic for a, b in combinations(each, 2)])
        assert again.numbers("alike", setting=name, place=0)["value"].mean() == pytest.approx(slow)
    top = np.sort(np.reshape(colours[:4], (4, 6, -1)))
    slow = (top[..., -36:].sum(-1) / top.sum(-1)).mean(1)
    told = again.numbers("mass", setting=lab.AUTHORS)["value"]
    assert told[:4].to_numpy() == pytest.approx(slow, rel=1e-3) and len(told) == 6
    with pytest.raises(SystemExit) as ended:
        lab.main(lab.run, lab.draw, ["--out", str(tmp_path / "none")], **options)
    assert not ended.value.code and not (tmp_path / "none").exists()


REFUSED = {  # what the sentence says: what is written, of the figures
    "is not a file": lambda path, _: path.mkdir(),
    "is not a notebook": lambda path, _: path.write_bytes(b"\xff\x00{"),
    "not a notebook": lambda path, _: path.write_text("[1, 2]"),
    "a notebook": lambda path, _: path.write_text("[" * 10**6),
    "has 0 PNG outputs": lambda path, _: notebook(path),
    "outputs are broken": lambda path, _: notebook(path, "iVBOR*w0KGgo="),
    "does not begin as a PNG": lambda path, _: notebook(path, b"GIF89a"),
    "2001 x 2000 pixels": lambda path, _: (
        Image.new("L", (2001, 2000)).save(path, "PNG"), notebook(path, path.read_bytes())),
    "has 3 panels": lambda path, _: notebook(path, drawn(PICTURES[0], MAPS[0][:2])),
    "one colour": lambda path, pngs: notebook(path, *pngs, drawn(PICTURES[0], np.zeros((4, 2, 2)))),
    "from viridis": lambda path, pngs: notebook(path, *pngs, drawn(*PICTURES[:1], PICTURES[1:5])),
    "3 figures of 6 maps": lambda path, pngs: notebook(path, *pngs[1:]),
    "no two figures": lambda path, pngs: notebook(path, *pngs[:4], *pngs[5:], pngs[5]),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_such_notebook_is_refused_in_a_sentence(words, pngs, tmp_path):
    REFUSED[words](tmp_path / "a.ipynb", pngs)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=rf"^[^\n]*{words}[^\n]*$") as error:
        lab.run("quick", None, tmp_path / "a.ipynb", None)
    assert ". " not in str(error.value) and len(str(error.value)) < 300
    assert sorted(tmp_path.iterdir()) == before
