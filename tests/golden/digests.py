"""What a case gives, as digests: of its bits, and of its numbers."""

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

import crate_interp as ci
from crate_interp.results.result import Result

TOLERANCE = 1e-6  # of a column's largest magnitude
_SUMS = 3  # weighted sums that stand for the numbers of a column


def machine() -> str:
    """Returns what has to be the same for bits to be compared."""
    about = Path("/proc/cpuinfo")
    text = about.read_text("utf-8") if about.exists() else ""
    maker = text.partition("vendor_id")[2].partition("\n")[0].strip(" :\t") or platform.machine()
    cpu = torch.backends.cpu.get_cpu_capability()
    return f"{maker} {cpu} torch {torch.__version__} numpy {np.__version__}"


def columns(value: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays in a result, table, tensor, figure, folder, or a collection of them."""
    if isinstance(value, Result):
        yield from columns(value.tables, name)
    elif isinstance(value, pd.DataFrame):
        for column in value:
            yield f"{name}.{column}", value[column].to_numpy()
    elif isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        yield name, (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    elif isinstance(value, Figure):
        for number, axes in enumerate(value.axes):
            drawn = [line.get_xydata() for line in axes.lines]
            drawn += [image.get_array() for image in axes.images]
            drawn += [np.asarray(one.get_offsets()) for one in axes.collections]
            drawn += [np.array([*one.get_extents().extents]) for one in axes.patches]
            for place, array in enumerate(drawn):
                yield f"{name}.axes{number}.{place}", np.ma.getdata(array)
    elif isinstance(value, Path):
        for path in sorted(value.rglob("meta.json")):
            kind = json.loads(path.read_text())["kind"]
            yield f"{name}.{path.parent.relative_to(value)}", np.array([kind])
        for path in sorted(value.rglob("*.parquet")):
            yield from columns(pd.read_parquet(path), f"{name}.{path.relative_to(value)}")
        for path in sorted(value.rglob("*.safetensors")):
            yield from columns(ci.load(path.parent).state_dict(), f"{name}.{path.name}")
    elif isinstance(value, torch.nn.Module):
        yield from columns(dict(value.state_dict()), name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from columns(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)) and any(not np.isscalar(item) for item in value):
        yield from columns(dict(enumerate(value)), name)
    elif hasattr(value, "__dataclass_fields__"):
        yield from columns(vars(value), name)
    elif value is not None:
        yield name, np.asarray(value)


def digest(array: np.ndarray) -> list[Any]:
    """Returns [exact, length, largest magnitude, weighted sums...]; of words, only the first two.

    The sums have random weights of mean square 1 / n, so that one number which moves by x of the
    largest magnitude moves a sum by about x / sqrt(n).
    """
    if array.dtype.kind not in "biuf":
        text = json.dumps(_plain(array.tolist()))
        return [hashlib.sha256(text.encode()).hexdigest()[:12], int(array.size)]
    exact = hashlib.sha256(np.ascontiguousarray(array).tobytes() + str(array.dtype).encode())
    values = array.astype(np.float64).ravel()
    lost = ~np.isfinite(values)
    values = np.where(lost, 0.0, values)
    scale = float(np.abs(values).max(initial=0.0))
    weights = np.random.default_rng(0).standard_normal((_SUMS + 1, values.size))
    weights /= max(values.size, 1) ** 0.5
    sums = weights[:_SUMS] @ (values / (scale or 1.0))
    return [exact.hexdigest()[:12], int(array.size), scale, *sums, weights[_SUMS] @ lost]


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else str(value)


def digests(value: Any) -> dict[str, list[Any]]:
    """Returns the digest of each array in what a case gave."""
    return {name: digest(array) for name, array in columns(value)}


def moved(before: dict[str, list], after: dict[str, list], compared: str) -> dict[str, str]:
    """Returns what moved: array -> how. compared: bits, numbers or sizes."""
    found = {name: "is gone" for name in before.keys() - after.keys()}
    found |= {name: "is new" for name in after.keys() - before.keys()}
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if not (old and new):
            found[name] = "is no number"
        elif old[1] != new[1] or len(old) != len(new):
            found[name] = f"has {new[1]} numbers, not {old[1]}"
        elif compared == "sizes":
            continue
        elif len(old) == 2:
            if old[0] != new[0]:
                found[name] = "has other words"
        else:
            distance = np.abs(np.subtract(old[3:], new[3:])).max()
            distance = max(distance, abs(old[2] - new[2]) / (max(old[2], new[2]) or 1.0))
            if distance > TOLERANCE:
                found[name] = f"moved by {distance:.1e} of its largest magnitude"
            elif compared == "bits" and old[0] != new[0]:
                found[name] = f"has other bits ({distance:.1e})"
    return found
