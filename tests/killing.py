"""Work that dies: in a fork of this process, at a given step on the disk or after some time."""

import os
import signal
import sys
import threading
import time

from tqdm import tqdm

_STEPS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "tempfile.mkstemp")


def fork(work, prepare=lambda: None):
    """Starts `work` in a fork, after `prepare`, and returns the fork's process id.

    The fork ends with code 0 if the work does, and with 1 after an error.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars
        tqdm.set_lock(threading.RLock())  # the usual one is shared, and a dead fork keeps it
        prepare()
        work()
        os._exit(0)
    except BaseException as error:
        os.write(1, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        os._exit(1)


def died_at(step, work):
    """Runs `work` in a fork that SIGKILL ends at its step-th change of the disk.

    Returns False if it ended before.
    """
    left = [step]

    def count(event, args):
        reads = event == "open" and not (isinstance(args[2], int) and args[2] & 3)
        if event in _STEPS and not reads:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(fork(work, lambda: sys.addaudithook(count)), 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work itself failed"
    return os.WIFSIGNALED(status)


def killed_after(seconds, work):
    """Runs `work` in a fork that SIGKILL ends after some seconds.

    Returns False if it ended before.
    """
    child = fork(work)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, "the work itself failed"
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True
