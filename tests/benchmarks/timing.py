"""Honest timings on a shared machine: one process, one thread, processor time, alternating, least of many.

Run a benchmark with OMP_NUM_THREADS=1: two-thread times vary several-fold, and the library never sets threads itself.
"""

import random
import sys
import time
from collections.abc import Callable

import torch


def require_one_thread() -> None:
    """Stops where more than one thread would be timed."""
    if torch.get_num_threads() != 1:
        sys.exit("run this with OMP_NUM_THREADS=1 (make bench does)")


def least(jobs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The least processor seconds of each job; rounds of all of them for about so long.

    Each round has an order of its own: what ran before leaves a heap and caches, and twins that always follow
    different jobs differed by a tenth.
    """
    names = list(jobs)
    best = dict.fromkeys(names, float("inf"))
    for name in names:
        jobs[name]()  # warm up
    turn, end = 0, time.monotonic() + seconds
    while turn < 5 or time.monotonic() < end:
        for name in random.Random(turn).sample(names, len(names)):
            start = time.process_time()
            jobs[name]()
            best[name] = min(best[name], time.process_time() - start)
        turn += 1
    return best


def verdict(what: str, value: float, limit: float, at_least: bool = False) -> bool:
    """Prints a line and says whether the limit holds."""
    holds = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    print(f"{what}: {value:.3f} (wanted {sign} {limit:g}) {'ok' if holds else 'MISSED'}")
    return holds
