"""Sweeps on Ray clusters of this machine, whose workers and nodes are killed meanwhile.

    python tests/on_ray.py sizes DIR

runs one of the scenarios below in an empty folder and prints what it returns as JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil
import ray
from ray.cluster_utils import Cluster

import crate_interp as ci
from conftest import PLAIN, make
from gathered import CHUNKS, table
from working import CHUNK, digest, network, work

VERB = "sweep"
SIZES = (1, 2, 103, CHUNK - 1, CHUNK, CHUNK + 1)


def workers():
    """Returns the processes of the actors of this cluster."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [one] * ("ray::Worker" in " ".join(one.cmdline()))
    return found


def after_chunks(out, count, act):
    """Starts a thread that acts when so many chunks are in a folder."""

    def watch():
        while len(list(out.glob("chunks/*.parquet"))) < count:
            time.sleep(0.01)
        act()

    threading.Thread(target=watch, daemon=True).start()


def held(acts, hook, gate):
    """A hook that waits while a file is there."""
    while gate.exists():
        time.sleep(0.05)


def sizes(place):
    """More workers than most of these have chunks."""
    ray.init(address="local", num_cpus=3, include_dashboard=False)
    found = {n: work(VERB, n, engine="ray") for n in SIZES}
    return {n: [digest(result), result.meta["n_samples"]] for n, result in found.items()}


def streamed(place):
    """A stream, whose rows the driver reads and sends."""
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    stream = table().to_iterable_dataset()
    return {"digest": digest(ci.sweep(make(**PLAIN), stream, engine="ray", **CHUNKS))}


def killed(place, verb=VERB):
    """One of two workers dies of SIGKILL; the driver starts a cluster and ends it."""
    victims = []

    def kill():
        victims.append(workers()[0].pid)
        os.kill(victims[0], signal.SIGKILL)

    after_chunks(place / "out", 2, kill)
    result = work(verb, 600, network(0.1), out=place / "out", engine="ray")
    return {"digest": digest(result), "killed": len(victims), "open": ray.is_initialized()}


def killed_audit(place):
    """The same for an audit, whose chunks are of several stages."""
    return killed(place, "audit")


def nodes(place):
    """One of two nodes goes, and when it is gone another one comes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    alive, pids, found, gate = {2}, set(), {}, place / "gate"
    model = network(0.05)
    model.blocks[0].hook_resid_pre.add_hook(partial(held, gate=gate))

    def run():
        found["digest"] = digest(work(VERB, 600, model, out=place / "out", engine="ray"))

    def look():
        alive.add(sum(node["Alive"] for node in ray.nodes()))
        pids.update(one.pid for one in workers())
        time.sleep(0.1)

    thread = threading.Thread(target=run)  # Ray starts nodes in the main thread
    thread.start()
    after_chunks(place / "out", 2, gate.touch)
    while not gate.exists():
        look()
    cluster.remove_node(second, allow_graceful=False)
    while 1 not in alive:
        look()
    cluster.add_node(num_cpus=1)
    while len(pids) < 3:
        look()
    gate.unlink()
    thread.join()
    ray.shutdown()
    cluster.shutdown()
    return {**found, "alive": sorted(alive), "workers": len(pids)}


def errors(place):
    """What goes wrong in a worker, and what cannot be sent to one."""
    ray.init(address="local", num_cpus=1, include_dashboard=False)
    found = {}

    def tell(name, **more):
        try:
            work(VERB, 103, **{"engine": "ray", **more})
        except ValueError as error:
            found[name] = [type(error).__name__, str(error)]

    def breaks(block, acts):
        return {"one": acts["hook_resid_pre"].sum(dim=(1, 2)) / 0.0}

    infinite = ci.Probe("infinite", ("hook_resid_pre",), breaks, {"one": ("", None, None, "")})
    tell("chunk", probes=infinite)
    tell("chunk of one process", probes=infinite, engine="local")
    lock, model = threading.Lock(), network()
    model.blocks[0].hook_resid_pre.add_hook(lambda acts, hook: lock and None)
    tell("lock", model=model)
    return found


def slow(place):
    """A sweep that somebody interrupts or kills."""
    return {"digest": digest(work(VERB, 600, network(1.0), out=place / "out", engine="ray"))}


if __name__ == "__main__":
    scenario, folder = sys.argv[1:]
    sys.stdout.write(json.dumps(globals()[scenario](Path(folder))) + "\n")
