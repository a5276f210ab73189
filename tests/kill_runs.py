"""SIGKILL at random moments of a run that goes on, until its result can be compared.

    python tests/kill_runs.py 20

kills a sweep of 5,000 images and an audit of 5,000, each so many times: half of them after a random
time and half at a random change of the disk. The same call goes on every time, and the result has
to have the digest of a run that nothing disturbed, in a folder without leftovers.
tests/test_folders.py does it on 600 images.
"""

import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from folders import leftovers
from killing import died_at, killed_after
from working import CHUNK, VERBS, digest, work

FILES = 6  # changes of the disk for a chunk


def whole(verb, n, out):
    """Runs undisturbed, in a fork too; returns the digest and the seconds that it took."""
    began = time.monotonic()
    assert not killed_after(3600, lambda: work(verb, n, out=out))
    return digest(VERBS[verb][1].load(out)), time.monotonic() - began


def check(verb, n, out, wanted):
    """Raises AssertionError unless the result is the undisturbed one, with every sample once.

    Nothing of the killed processes may be left.
    """
    assert not leftovers(out)
    result = VERBS[verb][1].load(out)
    assert digest(result) == wanted, "another result"
    assert result.meta["n_samples"] == n
    if verb == "sweep":
        for _, rows in result.samples().groupby("layer"):
            assert rows["sample"].tolist() == list(range(n))


def run(verb, n, kills, seed=0):
    """Kills a run so many times and checks its result; returns what was counted."""
    rng, counts = random.Random(f"{verb} {seed}"), Counter()
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out"
        wanted, seconds = whole(verb, n, Path(place) / "whole")
        chunks = -(-n // CHUNK)
        longest, steps = 2 * seconds / (kills + 1), 2 * FILES * chunks // (kills + 1) + 1
        done = set()
        while counts["kills"] < kills:
            if rng.random() < 0.5:
                died = killed_after(rng.random() * longest, lambda: work(verb, n, out=out))
            else:
                died = died_at(rng.randrange(steps), lambda: work(verb, n, out=out))
            if died:
                counts["kills"] += 1
                done.add(len(list(out.glob("chunks/*.parquet"))))
                continue
            check(verb, n, out, wanted)
            counts["finished before"] += 1
            shutil.rmtree(out)
        assert not killed_after(3600, lambda: work(verb, n, out=out))
        check(verb, n, out, wanted)
        counts |= {"chunks": chunks, "different numbers of chunks at a kill": len(done)}
    return counts


if __name__ == "__main__":
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    for name in sys.argv[2:] or VERBS:
        found = run(name, 5000, total, seed=int(time.time()))
        shown = ", ".join(f"{count} {what}" for what, count in found.items())
        print(
            f"{name}: 5,000 images in chunks of {CHUNK}: {shown}; identical; leftovers: 0",
            flush=True,
        )
