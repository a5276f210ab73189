"""Turns the library's errors for Python users into the words of the command line."""

import re

# options of commands whose argument an error may name
_OPTIONS = (
    "ablate", "address", "batch_size", "chunk_size", "controls", "data", "device", "dtype",
    "engine", "eps", "family", "format", "fraction", "how", "limit", "mass", "metric", "out",
    "precision", "probes", "revision", "sample", "seed", "shard", "top", "untrained", "workers",
)  # fmt: skip
_WORDS = {
    "ci.list_models()": "`crate-interp models`",
    "load it with labels=[...], ": 'give --config \'labels=["...", "..."]\', ',
    "Load it with mean and std, ": 'Give --config "mean=[...]" and --config "std=[...]", ',
}
_ARGUMENT = re.compile(rf"(?<![\w.(])({'|'.join(_OPTIONS)})=")
_LOAD = re.compile(r"ci\.load\(\.\.\., ((?:[^()]|\([^()]*\))*)\)")
_FIELD = re.compile(r"(\w+)=((?:\([^()]*\)|'[^']*'|[^,\s])+)")


def spoken(text: str) -> str:
    """Returns an error with command-line options in place of Python's arguments.

    ci.load(..., n_heads=6) becomes --config n_heads=6, limit=0 becomes --limit 0.
    """
    text = _LOAD.sub(lambda found: " ".join(map(_config, _FIELD.finditer(found[1]))), text)
    for python, said in _WORDS.items():
        text = text.replace(python, said)
    return _ARGUMENT.sub(lambda found: f"--{found[1].replace('_', '-')} ", text)


def _config(found: re.Match[str]) -> str:
    name, value = found[1], found[2].strip("'")
    if name in ("family", "file", "revision"):
        return f"--{name} {value}"
    if value.startswith("("):  # a pair, which --config takes as JSON
        return f"--config '{name}=[{value[1:-1]}]'"
    return f"--config {name}={value}"
