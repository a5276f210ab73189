"""The recorded oracles: inputs on which floats run out, and what the slow forms make of them.

tests/oracles/KIND.json holds numbers as strings of 17 digits, which are the same on every machine;
`make oracles` writes them. The inputs are recorded too, because another processor draws others.
"""

import functools
import json
from pathlib import Path

import numpy as np
import torch

import reference
from oracle_cases import BATCH, RECORDED, SHAPES, drawn, in_dtype, sample

FOLDER = Path(__file__).parent / "oracles"
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def as_text(x) -> dict:
    x = np.asarray(x)
    return {"shape": list(x.shape), "digits": [repr(value) for value in x.ravel().tolist()]}


def as_numbers(text: dict) -> np.ndarray:
    return np.array([float(word) for word in text["digits"]]).reshape(text["shape"])


def as_tensors(texts: dict[str, dict]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(as_numbers(text)) for name, text in texts.items()}
    return tensors | {"labels": tensors["labels"].long()}


def path_of(kind: str) -> Path:
    return FOLDER / f"{kind.replace(' ', '_')}.json"


def case(name: str, shape: str, dtype: str, i: int) -> str:
    return f"{name}; {shape}; {dtype}; sample {i}"


def computed(name: str, inputs: dict, dtype: str, i: int) -> np.ndarray:
    """Returns the slow form of one sample."""
    one = sample(in_dtype(inputs, DTYPES[dtype]), i)
    return np.asarray(RECORDED[name](reference, one), np.float64)


@functools.cache
def read(kind: str) -> dict:
    return json.loads(path_of(kind).read_text())


@functools.cache
def inputs(kind: str, shape: str) -> dict:
    """Returns the recorded inputs as tensors, floats in float64."""
    return as_tensors(read(kind)["inputs"][shape])


def recorded(name: str, kind: str, shape: str, dtype: str, i: int) -> np.ndarray:
    """Returns what the slow form gave when it was recorded."""
    return as_numbers(read(kind)["wanted"][case(name, shape, dtype, i)])


def record(kind: str) -> dict:
    """Returns the record of one kind. Inputs that are recorded already stay as they are."""
    kept = read(kind)["inputs"] if path_of(kind).exists() else {}
    found = {"inputs": {}, "wanted": {}}
    for shape in SHAPES:
        texts = {name: as_text(value) for name, value in drawn(kind, shape).items()}
        same = kept.get(shape, {})
        found["inputs"][shape] = same if same.keys() == texts.keys() else texts
        tensors = as_tensors(found["inputs"][shape])
        for name in RECORDED:
            for dtype in DTYPES:
                for i in range(BATCH):
                    value = computed(name, tensors, dtype, i)
                    found["wanted"][case(name, shape, dtype, i)] = as_text(value)
    return found


def write(kind: str) -> Path:
    """Writes the record of one kind, one line for each array, and returns its path."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(record(kind))
    path_of(kind).write_text(text.replace("]}, ", "]},\n") + "\n")
    return path_of(kind)
