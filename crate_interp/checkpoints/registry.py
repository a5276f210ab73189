"""The models that load by name: data, not code."""

from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent.parent / "assets"

# One row per model. `steps`: the training steps that load with revision="step-N".
MODELS: tuple[dict[str, Any], ...] = (
    {
        "name": "crate-tiny-fashion",
        "family": "crate",
        "repo": None,
        "file": "crate-tiny-fashion/model.safetensors",
        "revision": None,
        "sha256": "0c65e520808eef226f3b1cbe0bb6fc00936aab4bfa6cd0b3b5af17a2b29a5639",
        "bytes": 1242360,
        "licence": "MIT",
        "params": 309290,
        "embedded": True,
        "steps": (0, 10, 40, 160, 640, 2560),
    },
)


def models() -> Any:
    """A pandas table of the models that load by name: name, family, repo, file, revision, sha256, bytes, licence,
    params, embedded, steps."""
    import pandas as pd

    return pd.DataFrame(list(MODELS))


def names() -> list[str]:
    """The names `ci.load` knows."""
    return [row["name"] for row in MODELS]


def find(name: str) -> dict[str, Any] | None:
    """The row of a model, or None."""
    return next((row for row in MODELS if row["name"] == name), None)
