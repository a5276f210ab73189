"""Tiny models with prime sizes, the choice of tests, and the rule about skips.

No global thread or random settings are left behind.
"""

import gc
import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import hypothesis
import jaxtyping
import pytest
import torch

import shape_checks

jaxtyping.jaxtyped = shape_checks.checked  # before crate_interp is imported

import crate_interp as ci  # noqa: E402
import selection  # noqa: E402
from scheduling import pytest_xdist_make_scheduler  # noqa: E402, F401
from selection import pytest_collection_modifyitems, pytest_report_header  # noqa: E402, F401

for _name, _examples in selection.EXAMPLES.items():
    hypothesis.settings.register_profile(_name, max_examples=_examples, deadline=None)
hypothesis.settings.load_profile(selection.profile())

FIXTURES = Path(__file__).parent / "fixtures"
SKIPS = Path(__file__).parent / "SKIPS.md"
BATCH, LAYERS, HEADS, D_HEAD, D_MODEL, CLASSES = 2, 3, 5, 7, 31, 11
# pos is 13: 3 x 4 patches and CLS
SIZES = dict(n_layers=LAYERS, n_heads=HEADS, d_head=D_HEAD, d_model=D_MODEL, n_classes=CLASSES)
PLAIN = dict(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))  # pictures as [0, 1]
LMS = ["crate-lm", "crate-lm vanilla", "gpt-baseline", "nanochat-crate"]
IMAGE = dict(image_size=(6, 20), patch_size=(2, 5), channels=3)


def pytest_collection():
    """Keeps the collector of garbage away from the imports: most of what they make stays."""
    gc.disable()


def pytest_collection_finish():
    """Lets it see only what the tests make."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A skip that tests/SKIPS.md does not list is a failure."""
    report = yield
    listed = SKIPS.read_text() if SKIPS.exists() else ""
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and f"`{item.originalname}`" not in listed
    ):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} was skipped, but tests/SKIPS.md does not list {item.originalname}"
        )
    return report


def make(family: str = "crate", seed: int = 0, **over) -> "ci.HookedCrate":
    """Returns a random model. Every parameter is drawn anew, biases too: none is zero or one."""
    cfg = ci.CrateConfig(family=family, **{**SIZES, **IMAGE, **over})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ci.HookedCrate(cfg)
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value.data = 0.3 * torch.randn_like(value) + (1.0 if "weight" in name else 0.0)
    return model.eval()


def make_lm(name: str = "crate-lm", seed: int = 0, **over) -> "ci.HookedCrateLM":
    """Returns a random language model; "crate-lm vanilla" has CRATE's square dictionary."""
    family, _, vanilla = name.partition(" ")
    more = {
        "nanochat-crate": dict(softcap=15.0, window=True, window_pattern="SL"),
        "gpt-baseline": dict(bias=True),
    }.get(family, {})
    more |= {"sparse_step": "ista"} if vanilla else {}
    size = dict(n_layers=LAYERS, n_heads=HEADS, d_head=6, d_model=D_MODEL, n_ctx=13, d_vocab=47)
    cfg = ci.CrateConfig(family=family, **{**size, **more, **over})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = ci.HookedCrateLM(cfg)
        for parameter, value in lm.named_parameters():
            norm = value.ndim == 1 and ("weight" in parameter or "lambdas" in parameter)
            value.data = 0.3 * torch.randn_like(value) + (1.0 if norm else 0.0)
    return lm.eval()


def refuses(words, call, error=ValueError) -> str:
    """Asserts that a call raises an error of one line with these words, and returns it."""
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def fails(words, *args, **kwargs) -> str:
    """Asserts that `ci.load` refuses what it is given, in one line, and returns the line."""
    return refuses(words, lambda: ci.load(*args, **kwargs), ci.CheckpointError)


def same_model(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Asserts that two models have one config and the same bits under the same names."""
    weights = other.state_dict()
    assert one.cfg == other.cfg and list(one.state_dict()) == list(weights)
    for name, value in one.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.fixture
def unchecked():
    """Switches the type checks of jaxtyping and beartype off while a test runs.

    Users have no such checks: the error of a public function for a wrong type is tested without
    them.
    """
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def interrupts():
    """Lets SIGINT raise KeyboardInterrupt; the workers of a parallel run ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def hub(monkeypatch):
    """A running stand-in; nothing is stored anywhere but in the test's own folder."""
    from huggingface_hub import constants

    from loopback import Hub

    served = Hub()
    with served.serve() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        yield served


@pytest.fixture(params=["crate", "crate-alpha"])
def model(request):
    return make(request.param)


@pytest.fixture(params=LMS)
def lm(request):
    return make_lm(request.param)


@pytest.fixture
def images():
    return torch.randn(BATCH, 3, 6, 20, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(2)


def leftover_hooks(model) -> list[str]:
    """Returns the hook points that still carry a hook of any kind."""
    return [
        name
        for name, point in model.hook_dict.items()
        if point._forward_hooks or point._backward_hooks or point.fwd_hooks or point.bwd_hooks
    ]
