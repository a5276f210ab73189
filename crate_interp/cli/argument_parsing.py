"""Reads arguments of commands, and writes their pages that show the data itself."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crate_interp as ci
from crate_interp.circuits import HeadAblation
from crate_interp.circuits.atlases.excerpts import excerpts
from crate_interp.data import open_data, open_text
from crate_interp.data.streams import Stream
from crate_interp.models.hooked import HookedModel
from crate_interp.questions.batches import data_of
from crate_interp.results.result_reading import META
from crate_interp.sweeps.atom_statistics import AtomResult
from crate_interp.sweeps.result import SweepResult
from crate_interp.viz.explorer.explorer_page import check_count, shown_points

if TYPE_CHECKING:
    from crate_interp.cli.command_options import Asked

# loads the network that a text names, such as NAME@step-100
Load = Callable[[str], HookedModel]


def networks(asked: str, load: Load) -> tuple[list[HookedModel | SweepResult], str]:
    """Returns the networks that a comma-separated text names, and one name for all of them.

    Each part of the text is the folder of a saved sweep, or a source for `load`: a name, a file or
    a folder. Raises ValueError if the text names no network.
    """
    words = [asked] if Path(asked).exists() else [word.strip() for word in asked.split(",")]
    words = [word for word in words if word]
    if not words:
        raise ValueError(
            f"{asked!r} names no network. Give a name of `crate-interp models`, a weight file, or "
            "the folder of a saved model or sweep. Separate several seeds with commas."
        )
    called = Path(words[0]).name if Path(words[0]).exists() else words[0]
    more = f" and {len(words) - 1} more" if words[1:] else ""
    found: list[HookedModel | SweepResult] = [
        SweepResult.load(word) if (Path(word) / META).is_file() else load(word) for word in words
    ]
    return found, called + more


def one_sample(model: Any, data: str, sample: int, size: int | None = None) -> tuple[Any, Any, str]:
    """Returns a cache of one sample of the data, the sample itself, and its name.

    The cache has what the explorer shows. size: the side of a larger image, or None for the model's
    own size. Raises ValueError for a model with several towers, for a sample that the data lacks,
    and if the page has no room for its tokens.
    """
    if getattr(model, "towers", True):
        raise ValueError("this model cannot be explored. Give a model of images or of texts.")
    text = model.unit == "windows"
    if size is not None:
        if text:
            raise ValueError("--size is the side of images, but this model reads text.")
        model = model.resized(size)
    if not text:
        check_count(model, model.cfg.n_tokens)
    samples = (
        open_text(data, model.window_rows, None, model.to_tokens)
        if text
        else open_data(data, model.preprocess)
    )
    if not 0 <= sample < samples.n:
        raise ValueError(f"--sample {sample}: the data has samples 0 to {samples.n - 1}.")
    inputs = samples.read(sample, sample + 1).to(model.cfg.device)
    if text and inputs.shape[1] == model.cfg.n_ctx > 1:
        inputs = inputs[:, :-1]  # no training has a target for the last place of a window
    points = shown_points(model)
    shown = {"names_filter": lambda name: name.endswith(points)}
    cache = model.requires_grad_(False).run_with_cache(inputs, **shown, **model.full_options)[1]
    label = None if samples.labels is None else samples.labels[sample]
    called = samples.names or getattr(model.cfg, "labels", None)
    if isinstance(label, int) and called is not None and 0 <= label < len(called):
        label = called[label]
    return cache, inputs, f"sample {sample} of {data}" + ("" if label is None else f", {label}")


def ablation_pages(asked: "Asked", result: HeadAblation, out: Path) -> Path:
    """Writes the page of an ablation, with the explorer of the first sample if it has room."""
    try:
        cache, inputs, name = one_sample(asked.model, asked.data, 0)
    except ValueError:  # such as a text of more tokens than a page shows
        return ci.viz.ablation_page(result, out)
    page = ci.viz.ablation_page(result, out, explorer="explore.html")
    ci.viz.explore(cache, inputs, name=name).save(out / "explore.html")
    return page


def atoms_page(asked: "Asked", result: AtomResult, out: Path) -> Path:
    """Writes the page of atoms, with the patches or contexts in which they are largest."""
    source = data_of(asked.model, asked.data)
    if isinstance(source, Stream):  # can be read once only
        return ci.viz.atoms_page(result, out)
    shown = result.table("top").query("rank < 4")
    return ci.viz.atoms_page(result, out, excerpts=excerpts(shown, asked.model, source, False))


def answers(asked: str | None) -> Any:
    """Returns the answer, or the pair of answers, that a text names by numbers or names."""
    if asked is None:
        return None
    words = [word.strip() for word in asked.split(",")] if asked.count(",") == 1 else [asked]
    found = [int(word) if word.isascii() and word.isdigit() else word for word in words]
    return found[0] if len(found) == 1 else tuple(found)
