"""A pytest plugin: TransformerLens' tests get our language models where they boot a bridge.

`boot_native(cfg)` becomes a random HookedCrateLM of the size that is asked for;
`boot_transformers(name)`, and the loader of older files, one with the layers and heads of the
network that is named, narrow, with the tokenizer.json that TL_TOKENIZER names. No method of a model
is replaced, with one exception: a fixture or a helper that prepares a model by
`enable_compatibility_mode` or `process_weights` gets it as it is, since it has the older names
from the start. A test that calls these itself meets the refusal.

Where TL_REPORT names a file, each outcome is a line of JSON there.
"""

import functools
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

# name -> layers and heads; any other name gets those of GPT-2
_SHAPES = {"distilgpt2": (6, 12), "tiny": (2, 2), "pythia-14m": (6, 4)}
_WIDTHS = dict(d_head=8, d_model=96, d_mlp=384, n_ctx=1024)
_booted: list[Any] = []  # one entry for each model that was made


def _prepared(model: Any, name: str) -> Any:
    """Stands for HookedCrateLM.__getattr__ while tests run."""
    prepares = name in ("enable_compatibility_mode", "process_weights")
    if prepares and not sys._getframe(1).f_code.co_name.startswith("test"):
        return lambda *args, **kwargs: None
    return _getattr(model, name)


def _model(seed: int | None, dtype: Any, **sizes: int) -> Any:
    import torch

    import crate_interp as ci

    _booted.append(None)
    cfg = ci.CrateConfig(family=os.environ.get("TL_FAMILY", "crate-lm"), **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if seed is None else seed)
        return ci.HookedCrateLM(cfg).to(dtype or torch.float32)


def boot_native(config: Any, tokenizer: Any = None, device=None, dtype=None, **_: Any) -> Any:
    """Returns a random model of the size that is asked for."""
    given = config if isinstance(config, dict) else config.__dict__
    names = ("n_layers", "n_heads", "d_head", "d_model", "d_mlp", "n_ctx", "d_vocab")
    sizes = {name: given[name] for name in names if given.get(name) not in (None, -1)}
    model = _model(given.get("seed"), dtype or given.get("dtype"), **sizes)
    if tokenizer is not None:
        model.tokenizer = tokenizer
    return model


def boot_transformers(name: str, *args: Any, dtype=None, tokenizer=None, **_: Any) -> Any:
    """Returns a random model that reads text, as deep as the network that is named."""
    shape = next((shape for part, shape in _SHAPES.items() if part in name), (12, 12))
    reader, d_vocab = _reader()
    sizes = dict(n_layers=shape[0], n_heads=shape[1], d_vocab=d_vocab)
    model = _model(zlib.crc32(name.encode()), dtype, **_WIDTHS, **sizes).eval()
    object.__setattr__(model.cfg, "prepend_bos", True)  # TransformerLens' default
    model.tokenizer = reader if tokenizer is None else tokenizer
    return model


@functools.cache
def _reader() -> tuple[Any, int]:
    from crate_interp.models.text.tokenizer import build

    text = Path(os.environ["TL_TOKENIZER"]).read_text()
    return build(json.loads(text)), json.loads(text)["added_tokens"][-1]["id"] + 1


@pytest.hookimpl(trylast=True)  # after jaxtyping's own, which has to see the first import
def pytest_configure(config):
    install()


def install() -> None:
    """Puts our models in place of the bridges that TransformerLens boots."""
    global _getattr
    from transformer_lens.model_bridge import TransformerBridge

    import crate_interp as ci

    _getattr = ci.HookedCrateLM.__getattr__
    setattr(ci.HookedCrateLM, "__getattr__", _prepared)  # noqa: B010
    ways: dict[str, Any] = dict.fromkeys(("boot_transformers", "boot_tl_legacy"), boot_transformers)
    for name, way in (ways | {"boot_native": boot_native}).items():
        setattr(TransformerBridge, name, staticmethod(way))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    from crate_interp.models.hooked import HookedModel

    before = len(_booted)
    try:
        return (yield)
    finally:
        ours = any(isinstance(value, HookedModel) for value in item.funcargs.values())
        item.user_properties.append(("ours", ours or len(_booted) > before))


def pytest_runtest_logreport(report):
    path = os.environ.get("TL_REPORT")
    kept = report.when == "call" or report.failed or report.skipped
    if not path or not kept or "PYTEST_XDIST_WORKER" in os.environ:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    line = {"test": report.nodeid, "outcome": report.outcome}
    line |= {"ours": dict(report.user_properties).get("ours", False)}
    line |= {"message": str(crash.message if crash else report.longrepr or "")[:2000]}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
