"""A sweep or an audit of a tiny model on random images, in a process of its own.

    python tests/working.py sweep '{"n": 103, "out": "DIR", "shard": "0/2"}'

prints the digest of the result, or "None" where chunks are missing. `torch.distributed.run` starts
it as well as Python does.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch

import crate_interp as ci
from conftest import make

CHUNK, WAIT = 59, "CRATE_TEST_WAIT"
VERBS = {
    "sweep": (ci.sweep, ci.SweepResult, {"controls": 7}),
    "audit": (ci.audit, ci.AuditResult, {"untrained": 1, "grid": False}),
}


def images(n):
    return torch.randn(n, 3, 6, 20, generator=torch.Generator().manual_seed(n))


def network(seconds=0.0):
    """Returns a model; a hook of torch on it waits so many seconds in every forward.

    The environment may say other seconds, as the hook itself is a setting of a run.
    """
    model = make(n_layers=2)
    if seconds:
        wait = lambda *_: time.sleep(float(os.environ.get(WAIT, seconds)))  # noqa: E731
        model.blocks[0].register_forward_pre_hook(wait)
    return model


def work(verb, n, model=None, **more):
    """Returns the result of a verb on n images, in chunks of 59 if nothing else is said."""
    function, _, own = VERBS[verb]
    settings = {"batch_size": 13, "chunk_size": CHUNK, "progress": False, **own, **more}
    return function(model or network(), images(n), **settings)


def digest(result):
    """Returns the digest of a result, or "None" for no result."""
    return "None" if result is None else result.digest()


if __name__ == "__main__":
    found = work(sys.argv[1], **json.loads(sys.argv[2]))
    assert not torch.distributed.is_initialized()
    sys.stdout.write(f"{digest(found)}\n")
