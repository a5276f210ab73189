"""Work that another machine can hold up, in a thread of its own, given up when nothing comes."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

SILENCE = 60.0  # seconds
Result = TypeVar("Result")


class Watch:
    """How work tells that it goes on."""

    def __init__(self) -> None:
        self.beats = 0

    def beat(self) -> None:
        """Notes that the work got somewhere."""
        self.beats += 1


def watched(work: Callable[[Watch], Result]) -> Result:
    """Returns what `work` returns.

    Raises TimeoutError if SILENCE seconds (twice as many at most) bring no beat: no timeout of a
    socket ends a server that sends a byte now and then. What hangs is left behind in its thread.
    Ctrl-C ends the waiting at once.
    """
    watch, done, outcome = Watch(), threading.Event(), []

    def run() -> None:
        try:
            outcome.append((work(watch), None))
        except BaseException as error:
            outcome.append((None, error))
        finally:
            done.set()

    threading.Thread(target=run, name="crate_interp download", daemon=True).start()
    seen = 0
    while not done.wait(SILENCE):
        if seen == watch.beats:
            raise TimeoutError("nothing came")
        seen = watch.beats
    answer: Any
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer
