"""Ray clusters of this machine, and torchrun: the same bits, whoever dies. See tests/on_ray.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ray_stand_in
from selection import few
from working import VERBS, WAIT, digest, network, work

SCRIPT = Path(__file__).with_name("on_ray.py")
SMALL = dict(n=53, chunk_size=7, controls=0, probes="sparsity")


@pytest.fixture(scope="module")
def alone():
    return digest(work("sweep", **SMALL))


def start(scenario, place):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""}
    environment["RAY_worker_niceness"] = "0"  # Ray's 15 starves workers on a machine that is busy
    return subprocess.Popen(
        [sys.executable, SCRIPT, scenario, place],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def stopped(process, sign):
    """Sends a signal until the process ends, as a person presses Ctrl-C again.

    Python drops a KeyboardInterrupt that falls into a destructor, and Ray's objects have them.
    """
    while True:
        process.send_signal(sign)
        try:
            return process.communicate(timeout=8)
        except subprocess.TimeoutExpired:
            continue


def found(scenario, place):
    with start(scenario, place) as process:
        printed, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return json.loads(printed.splitlines()[-1])


@pytest.mark.slow
def test_one_of_two_workers_is_killed(tmp_path):
    wanted = {"digest": digest(work("sweep", 600)), "killed": 1, "open": False}
    assert found("killed", tmp_path) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_stops_leaves_chunks_and_no_process(tmp_path, sign, monkeypatch):
    import psutil

    with start("slow", tmp_path) as process:
        while len(list(tmp_path.glob("out/chunks/*.parquet"))) < 2:
            time.sleep(0.05)
            assert process.poll() is None, process.communicate()
        below = psutil.Process(process.pid).children(recursive=True)
        printed, errors = stopped(process, sign)
    assert process.returncode != 0 and printed == "", errors[-3000:]
    if sign == signal.SIGINT:
        assert "The same call continues" in errors
    psutil.wait_procs(below, timeout=300)  # the agents of a killed cluster look up now and then
    assert not [one for one in below if one.is_running()]
    monkeypatch.setenv(WAIT, "0")
    result = work("sweep", 600, out=tmp_path / "out", model=network(1.0))
    assert digest(result) == digest(work("sweep", 600))


def test_the_stand_in_gives_the_bits_of_one_process(tmp_path, monkeypatch, alone):
    cluster = ray_stand_in.install(monkeypatch)
    result = work("sweep", **SMALL, out=tmp_path, engine="ray")
    assert digest(result) == alone and cluster.calls == 8 and not cluster.cancelled


@pytest.mark.parametrize("dies", few([{1}, {3}, {1, 2, 3}, {5, 6, 7, 8}], 2))
def test_what_a_worker_took_with_it_is_measured_again(monkeypatch, dies, alone):
    """dies: at which calls the worker does."""
    cluster = ray_stand_in.install(monkeypatch, dies=dies)
    assert digest(work("sweep", **SMALL, engine="ray")) == alone
    assert cluster.calls == 8 + len(dies)


def test_a_worker_with_other_software_is_refused(monkeypatch):
    ray_stand_in.install(monkeypatch, versions={"torch": "1.0", "torch threads": 7})
    with pytest.raises(
        ValueError, match=r"torch .* \(driver: 1.0\).*threads 1 \(driver: 7\).*would differ"
    ):
        work("sweep", **SMALL, engine="ray")


WORKING = Path(__file__).with_name("working.py")


def started(command, **settings):
    """Returns what a process printed that works on the data; command: what starts the script."""
    verb, settings = settings.pop("verb"), json.dumps(settings)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, WORKING, verb, settings],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def torchrun(processes):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_torchrun_gives_the_bits_of_one_process(tmp_path, verb, processes):
    out = tmp_path / "out"
    printed = started(torchrun(processes), verb=verb, n=600, out=str(out))
    wanted = digest(work(verb, 600))
    assert len(printed) == processes and set(printed) - {"None"} == {wanted}
    assert digest(VERBS[verb][1].load(out)) == wanted
