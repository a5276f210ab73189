"""Maps read back from a notebook that we drew, and notebooks that are refused."""

import base64
import json
import struct
import zlib
from io import BytesIO
from itertools import combinations

import numpy as np
import published_figures as lab
import pytest
from matplotlib.figure import Figure
from scipy.stats import spearmanr

random = np.random.default_rng(0)
PICTURES = [random.random((30, 30, 3)) * 0.9 for _ in range(6)]
MAPS = [random.random((6, 60, 60)) * random.random((6, 60, 1)) ** 3 for _ in PICTURES]
MAPS = [(m - m.min((1, 2), keepdims=True)) / np.ptp(m, (1, 2), keepdims=True) for m in MAPS]


def drawn(picture, maps):
    """A row of a picture and its maps, as the notebook draws it."""
    figure, file = Figure((15, 3)), BytesIO()
    for at, shown in enumerate([picture, *maps]):
        axis = figure.add_subplot(1, 1 + len(maps), at + 1)
        axis.imshow(shown, interpolation="nearest")
        axis.axis("off")
    figure.savefig(file, bbox_inches="tight")
    return file.getvalue()


def notebook(path, *pngs, encoded=None):
    """A notebook whose outputs these are; its code would leave a file."""
    texts = encoded or [base64.encodebytes(png).decode() for png in pngs]
    outputs = [{"data": {"image/png": text}} for text in texts]
    code = {"cell_type": "code", "source": f"open({str(path)!r} + '.run', 'w')", "outputs": outputs}
    path.write_text(json.dumps({"cells": [code, {"cell_type": "markdown", "source": ""}]}))
    return path


def named(width, height):
    """A PNG file that says it has this size and holds nothing."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


@pytest.fixture(scope="module")
def pngs():
    """Four figures of all heads, and two of four: the first picture again, and another."""
    every = [drawn(p, m) for p, m in zip(PICTURES[:4], MAPS[:4], strict=True)]
    return [*every, *(drawn(PICTURES[k], MAPS[k][lab.CHOSEN]) for k in (0, 4, 5))]


def test_maps_are_read_back_to_a_colour_step(pngs, tmp_path):
    rows = [lab.parts(each) for each in lab.figures(notebook(tmp_path / "a.ipynb", *pngs))]
    truth = [*MAPS[:4], *(MAPS[k][lab.CHOSEN] for k in (0, 4, 5))]
    for row, maps in zip(rows, truth, strict=True):
        for panel, wanted in zip(row[1:], maps, strict=True):
            found, rest = lab.read(panel)
            assert np.abs(found / 255 - wanted).max() < 1.5 / 255 and rest < 0.01
    with pytest.raises(ValueError, match="from viridis"):
        lab.read(rows[0][0])


def test_the_command_measures_the_maps_and_writes_into_out_alone(pngs, tmp_path, monkeypatch):
    tiny = [[what, lab.TINY, k, at, 0.1 * k] for what in ("alike", "mass")
            for k in range(3) for at in range(6)]  # fmt: skip
    monkeypatch.setattr(lab, "of_tiny", lambda: tiny)
    path, out = notebook(tmp_path / "a.ipynb", *pngs), tmp_path / "out"
    options = {"notebook": "", "pictures": ""}
    found = lab.main(lab.run, lab.draw, ["--notebook", str(path), "--out", str(out)], **options)
    assert sorted(tmp_path.iterdir()) == [path, out] and (out / "published_figures.png").exists()
    colours = [np.minimum(np.floor(256 * m), 255) for m in MAPS]
    heights = np.array([m.sum(2) @ np.arange(60) / m.sum((1, 2)) for m in colours])
    orders = heights[[0, 4, 5]][:, lab.CHOSEN], heights[:4], heights[1:4]
    for name, each in zip(lab.SETS, orders, strict=True):
        slow = np.mean([spearmanr(a, b).statistic for a, b in combinations(each, 2)])
        assert found.numbers("alike", setting=name, place=0)["value"].mean() == pytest.approx(slow)
    top = np.sort(np.stack(colours[:4]).reshape(4, 6, -1))
    slow = (top[..., -36:].sum(-1) / top.sum(-1)).mean(1)
    told = found.numbers("mass", setting=lab.AUTHORS)["value"]
    assert told[:4].to_numpy() == pytest.approx(slow, rel=1e-3) and len(told) == 6
    with pytest.raises(SystemExit) as ended:
        lab.main(lab.run, lab.draw, ["--out", str(tmp_path / "none")], **options)
    assert not ended.value.code and not (tmp_path / "none").exists()


REFUSED = {
    "no file": lambda path, _: None,
    "a folder": lambda path, _: path.mkdir(),
    "no JSON": lambda path, _: path.write_bytes(b"\xff\x00{"),
    "a list": lambda path, _: path.write_text("[1, 2]"),
    "deep": lambda path, _: path.write_text("[" * 10**6),
    "no images": lambda path, _: notebook(path),
    "base64": lambda path, _: notebook(path, encoded=["iVBOR*w0KGgo="]),
    "a number": lambda path, _: notebook(path, encoded=[7]),
    "no PNG": lambda path, _: notebook(path, b"GIF89a"),
    "huge": lambda path, _: notebook(path, named(60_000, 60_000)),
    "cut": lambda path, pngs: notebook(path, pngs[0][:500]),
    "wrong size": lambda path, pngs: notebook(path, drawn(PICTURES[0], MAPS[0][:2])),
    "one colour": lambda path, pngs: notebook(
        path, *pngs[:6], drawn(PICTURES[0], np.zeros((4, 2, 2)))
    ),
    "too few": lambda path, pngs: notebook(path, *pngs[:3]),
    "none twice": lambda path, pngs: notebook(path, *pngs[:4], *pngs[5:], pngs[5]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_such_notebook_is_refused_in_a_sentence(what, pngs, tmp_path):
    REFUSED[what](tmp_path / "a.ipynb", pngs)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        lab.run("quick", None, tmp_path / "a.ipynb", None)
    assert ". " not in str(error.value) and len(str(error.value)) < 300
    assert sorted(tmp_path.iterdir()) == before


def test_pictures_are_those_of_the_figures(pngs, tmp_path):
    from PIL import Image

    rows = [lab.parts(each) for each in lab.figures(notebook(tmp_path / "a.ipynb", *pngs))]
    for at, row in enumerate(rows):
        Image.fromarray(row[0]).resize((97, 83)).save(tmp_path / f"{at}.png")
    assert [tuple(each.shape) for each in lab.tensors(rows, tmp_path)] == [(3, 480, 480)] * len(
        rows
    )
    for order, words in ((rows[::-1], "is not the picture"), (rows[1:], "7 PNG files for 6")):
        with pytest.raises(ValueError, match=words):
            lab.tensors(order, tmp_path)
